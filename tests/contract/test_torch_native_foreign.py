"""Variants of the native library that this CPU cannot run by itself, as programs.

The other architecture's runs under qemu-user, on Debian: `apt-get install qemu-user` and
`gcc-aarch64-linux-gnu libc6-dev-arm64-cross`, or on ARM `gcc-x86-64-linux-gnu
libc6-dev-amd64-cross`. The code of AVX-VNNI runs in AVX-512's encoding.
"""

import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from semantic.adapters.outbound.backends.torch.native import variants
from semantic.adapters.outbound.backends.torch.native.variants import SCALAR, VARIANTS, NativeBuild
from semantic.domain.errors import InvalidRequestError

pytestmark = [pytest.mark.contract, pytest.mark.slow]

Lines = dict[str, str]
RunProgram = Callable[[Sequence[str], Sequence[str], Sequence[str]], Lines]

SOURCE = Path(variants.__file__).with_name("source")
FLAGS = ("-std=gnu11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread")
BY_NAME = {variant.name: variant.flags for variant in VARIANTS}
IS_ARM = platform.machine() in ("aarch64", "arm64")
FOREIGN = "x86_64" if IS_ARM else "aarch64"
FOREIGN_COMPILER = f"{FOREIGN}-linux-gnu-gcc"
EMULATOR = (f"qemu-{FOREIGN}", "-cpu", "max", "-L", f"/usr/{FOREIGN}-linux-gnu")


@pytest.fixture(scope="session")
def run_program(tmp_path_factory: pytest.TempPathFactory) -> RunProgram:
    """Compiles the program, runs it, and returns the lines that it prints, by name."""
    directory = tmp_path_factory.mktemp("native-programs")

    def run(compiler: Sequence[str], flags: Sequence[str], emulator: Sequence[str]) -> Lines:
        program = directory / f"program-{len(list(directory.iterdir()))}"
        files = [Path(__file__).with_name("native_program.c"), *sorted(SOURCE.glob("*.c"))]
        sources = [str(file) for file in files if file.name != "supported.c"]
        command = [*compiler, *FLAGS, f"-I{SOURCE}", *flags, *sources, "-lm", "-o", str(program)]
        subprocess.run(command, check=True)  # noqa: S603 - our own program
        command = [*emulator, str(program)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - ours
        pairs = (line.partition(": ") for line in done.stdout.splitlines())
        return {name: value for name, _, value in pairs}

    return run


@pytest.fixture(scope="session")
def reference(run_program: RunProgram) -> Lines:
    """What the reference prints on this machine."""
    need("cc")
    return run_program(["cc"], SCALAR.flags, [])


def need(*commands: str) -> None:
    for command in commands:
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed")


def check(found: Lines, reference: Lines) -> None:
    """Integer linears and exponentials are the same bytes; whole steps round as lanes add up."""
    assert found.keys() == reference.keys()
    steps = [name for name in reference if name.startswith("step")]
    exact = [name for name in reference if name not in steps]
    assert len(exact) == 21  # four shapes of five kinds, and exponentials
    assert {name: found[name] for name in exact} == {name: reference[name] for name in exact}
    numbers = [np.array([float.fromhex(by[name]) for name in steps]) for by in (found, reference)]
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=0, atol=1e-4 * abs(numbers[1]).max())


@pytest.mark.parametrize("name", ["avx2", "scalar"] if IS_ARM else ["i8mm", "dotprod", "scalar"])
def test_the_other_architecture_gives_the_same_bytes(
    run_program: RunProgram, reference: Lines, name: str
) -> None:
    need(FOREIGN_COMPILER, EMULATOR[0])
    check(run_program([FOREIGN_COMPILER], BY_NAME[name], EMULATOR), reference)


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS if variant is not SCALAR])
def test_a_variant_gives_the_same_bytes(
    run_program: RunProgram, reference: Lines, native_directory: Path, name: str
) -> None:
    try:
        NativeBuild(native_directory, name).library()
    except InvalidRequestError as error:
        pytest.skip(str(error))
    check(run_program(["cc"], BY_NAME[name], []), reference)


def test_the_code_for_avx_vnni_gives_the_same_bytes(
    run_program: RunProgram, reference: Lines, native_directory: Path
) -> None:
    try:
        NativeBuild(native_directory, "avx512vnni").library()
    except InvalidRequestError as error:
        pytest.skip(str(error))
    check(run_program(["cc"], (*BY_NAME["avx512vnni"], "-DSEMANTIC_NARROW"), []), reference)
