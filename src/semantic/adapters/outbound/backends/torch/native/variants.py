"""Variants of the C library: how each one is built, and which one this machine uses.

A variant is the same source compiled for one instruction set with fixed flags, so a library built
on another machine is the one that the tests cover. Libraries shipped in the package (in `prebuilt/`
of a wheel) take precedence. In a checkout, the machine's compiler builds the library once, in the
background while torch is imported; this takes some seconds. A library's file name contains a hash
of its source and flags, so a library of another version is never loaded.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from semantic.adapters.outbound.backends.torch.native.library import Library
from semantic.domain.errors import InvalidRequestError

_SOURCE = Path(__file__).with_name("source")
PREBUILT = Path(__file__).with_name("prebuilt")
_FILES = ("threads.c", "linears.c", "pack.c", "attention.c", "experts.c", "step.c")
_SUPPORT = "supported.c"
# Multiply-adds are explicit, because compilers differ in which operations they contract.
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
_LINK = ("-shared", "-pthread", "-lm")
_BUILD_CPU_S = 120  # CPU time, not wall time, so that a busy machine does not fail
_ZIG = "ziglang"  # a package with a C compiler, for machines without one
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = tuple(f"-mavx512{part}" for part in ("f", "cd", "bw", "dq", "vl", "vnni"))

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set that the library is built for.

    Attributes:
        machines: Values of `platform.machine` for CPUs that may support it.
        flags: For GCC and Clang.
        zig_flags: For `zig cc`, where its CPU names differ.
    """

    name: str
    machines: tuple[str, ...]
    flags: tuple[str, ...]
    zig_flags: tuple[str, ...] = ()


_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
SCALAR = Variant("scalar", (*_X86, *_ARM), ("-DSEMANTIC_SCALAR", "-O1"))
"""The reference for tests; `auto` never chooses it."""
VARIANTS = (
    Variant("avx512vnni", _X86, (*_AVX2, *_AVX512)),
    Variant("avxvnni", _X86, (*_AVX2, "-mavxvnni")),
    Variant("avx2", _X86, _AVX2),
    Variant(
        "i8mm",
        _ARM,
        ("-march=armv8.2-a+dotprod+fp16+i8mm",),
        ("-mcpu=generic+v8_2a+dotprod+fullfp16+i8mm",),
    ),
    Variant(
        "dotprod",
        _ARM,
        ("-march=armv8.2-a+dotprod+fp16",),
        ("-mcpu=generic+v8_2a+dotprod+fullfp16",),
    ),
    SCALAR,
)


def digest(variant: Variant) -> str:
    """Hash the source and flags of a variant."""
    parts = [path.read_bytes() for path in sorted(_SOURCE.iterdir()) if path.is_file()]
    parts.append(repr((variant, _FLAGS, _LINK)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def file_name(variant: Variant) -> str:
    """Return the file name of a variant of this version, the same on every operating system."""
    return f"{variant.name}-{digest(variant)}.so"


def compile_library(
    variant: Variant, path: Path, compiler: Sequence[str] = ("cc",), more: Sequence[str] = ()
) -> None:
    """Compile a variant.

    To build for another system, for wheels, pass a `compiler` that targets it, such as the one in
    the package `ziglang`, and a `path` in the wheel's `prebuilt/` directory named by `file_name`:

        for variant in VARIANTS: if "x86_64" in variant.machines and variant != SCALAR:
            zig = (sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17")
            compile_library(variant, prebuilt / file_name(variant), zig)

    Other targets are `aarch64-linux-gnu.2.17`, `x86_64-linux-musl`, `aarch64-macos`, and, with the
    option `-lapi-ms-win-core-synch-l1-2-0` in `more`, `x86_64-windows-gnu`.

    Args:
        path: File to write. It appears only when the library is complete.
        compiler: A command that accepts GCC's options.
        more: Additional linker options.

    Raises:
        subprocess.CalledProcessError: the compiler failed; `stderr` has its messages.
    """
    with _atomic_file(path) as made:
        support = made.with_suffix(".o")
        name = f'-DSEMANTIC_VARIANT="{variant.name}"'
        _run(*compiler, *_FLAGS, name, "-c", str(_SOURCE / _SUPPORT), "-o", str(support))
        flags = variant.zig_flags if "ziglang" in compiler and variant.zig_flags else variant.flags
        files = (*(str(_SOURCE / file) for file in _FILES), str(support))
        _run(*compiler, *_FLAGS, *flags, *files, *_LINK, *more, "-o", str(made))


@contextlib.contextmanager
def _atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file there replaces `path` when the block succeeds."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        yield made
        made.replace(path)


def _run(*command: str) -> None:
    limited: Sequence[str] = command
    if os.name == "posix":
        limited = ["/bin/sh", "-c", f'ulimit -t {_BUILD_CPU_S}; exec "$@"', "sh", *command]
    # A fixed command over this package's source.
    subprocess.run(limited, check=True, capture_output=True, text=True)  # noqa: S603


class NativeBuild:
    """The library that this machine uses; it is loaded or compiled in the background.

    Attributes:
        directory: Where libraries compiled on this machine are stored.
        lacks_compiler: Whether there is no library because there is no C compiler.
    """

    def __init__(self, directory: Path, choice: str = "auto", prebuilt: Path = PREBUILT) -> None:
        """Start in the background; `choice` is a variant's name, `auto` (the best here) or `off`.

        Raises:
            InvalidRequestError: there is no such variant.
        """
        names = [variant.name for variant in VARIANTS]
        if choice not in ("auto", "off", *names):
            raise InvalidRequestError(
                f"native must be auto, off, {', '.join(names[:-1])} or {names[-1]}; got {choice!r}",
                param="native",
            )
        self.directory, self._choice, self._prebuilt = directory, choice, prebuilt
        self._library: Library | None = None
        self.lacks_compiler = False
        self._reason = "the setting native is off"
        self._thread = threading.Thread(target=self._make, name="native-build", daemon=True)
        if choice != "off":
            self._thread.start()

    def library(self) -> Library | None:
        """Wait for the build and return the library; None if there is none.

        Raises:
            InvalidRequestError: `choice` names a variant that this CPU does not support or that
                cannot be built.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._library is None and self._choice not in ("auto", "off"):
            raise InvalidRequestError(f"native {self._choice}: {self._reason}", param="native")
        return self._library

    @property
    def reason(self) -> str:
        """Why there is no library; empty if there is one. Waits for the build."""
        if self._thread.ident is not None:
            self._thread.join()
        return "" if self._library is not None else self._reason

    def _make(self) -> None:
        machine = platform.machine()
        if self._choice == "auto":
            variants = [v for v in VARIANTS if machine in v.machines and v is not SCALAR]
        else:
            variants = [v for v in VARIANTS if v.name == self._choice and machine in v.machines]
        self._reason = f"there is no variant for {machine} CPUs"
        for variant in variants:
            try:
                self._library = self._find(variant)
            except (OSError, AttributeError, subprocess.SubprocessError) as error:
                self.lacks_compiler = isinstance(error, FileNotFoundError)
                self._reason = str(getattr(error, "stderr", "") or error).strip()[-300:]
            else:
                return
        _log.warning(
            "native kernels unavailable; models run several times slower in PyTorch",
            reason=self._reason,
        )

    def _find(self, variant: Variant) -> Library:
        name = file_name(variant)
        if (path := self._prebuilt / name).exists():
            return Library(path, variant.name)
        compiler = _find_compiler()
        path = self.directory / f"{_identity(compiler)}-{name}"
        if not path.exists():
            self._probe(variant, compiler)
            compile_library(variant, path, compiler)
        return Library(path, variant.name)

    def _probe(self, variant: Variant, compiler: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            probe = str(Path(temporary) / "probe.so")
            name = f'-DSEMANTIC_VARIANT="{variant.name}"'
            _run(*compiler, *_FLAGS, name, str(_SOURCE / _SUPPORT), "-shared", "-o", probe)
            if not ctypes.CDLL(probe).semantic_supported():
                raise OSError(f"this CPU does not support the variant {variant.name}")


def _find_compiler() -> list[str]:
    """Return the machine's C compiler, else that of the package ziglang.

    Raises:
        FileNotFoundError: there is none.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is not None:
        return compiler
    if importlib.util.find_spec(_ZIG) is not None:
        return [sys.executable, "-m", _ZIG, "cc"]
    raise FileNotFoundError(
        f"no C compiler ({compiler[0]}): install gcc, clang, or the Python package {_ZIG}"
    )


def _identity(compiler: Sequence[str]) -> str:
    command = [*compiler, "--version"]
    # The user's compiler.
    said = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return hashlib.sha256(f"{sys.platform} {command} {said.stdout}".encode()).hexdigest()[:8]
