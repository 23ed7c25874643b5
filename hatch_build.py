"""Builds wheels: one for any system, and one for each platform with the native library inside.

A plain build (`pip wheel .`, an sdist, an editable install) makes a wheel for any system, which
compiles the library on the user's machine if that has a compiler. `make wheels` runs this file: it
compiles the library for each platform with the C compiler of the package `ziglang`, which targets
all of them from one machine, and builds a wheel around the result. The library has no Python ABI,
so one wheel serves all versions of Python: `py3-none-<platform>`.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
PREBUILT = "semantic/adapters/outbound/backends/torch/native/prebuilt"
# The tag of a wheel, the machine as Python names it, and ziglang's target.
PLATFORMS = {
    "manylinux_2_17_x86_64": ("x86_64", "x86_64-linux-gnu.2.17"),
    "manylinux_2_17_aarch64": ("aarch64", "aarch64-linux-gnu.2.17"),
    "musllinux_1_2_x86_64": ("x86_64", "x86_64-linux-musl"),
    "musllinux_1_2_aarch64": ("aarch64", "aarch64-linux-musl"),
    "macosx_11_0_arm64": ("arm64", "aarch64-macos.11.0"),
}


class PlatformWheel(BuildHookInterface[Any]):
    """Adds the libraries of SEMANTIC_WHEEL_PLATFORM to the wheel, and the platform to its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change nothing unless a platform is named.

        Raises:
            FileNotFoundError: its libraries are not compiled.
        """
        platform = os.environ.get("SEMANTIC_WHEEL_PLATFORM")
        if not platform or version == "editable":
            return
        libraries = sorted(_directory(platform).glob("*.so"))
        if not libraries:
            raise FileNotFoundError(f"no libraries in {_directory(platform)}: run `make wheels`")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"].update({str(x): f"{PREBUILT}/{x.name}" for x in libraries})


def _directory(platform: str) -> Path:
    return ROOT / "build" / "native" / platform


def main() -> int:
    """Compile the libraries and build the wheels of some platforms; 0 if all were built."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", default=str(ROOT / "dist"), help="where the wheels go")
    parser.add_argument("platforms", nargs="*", help=f"of {', '.join(PLATFORMS)}; default: all")
    options = parser.parse_args()
    for platform in options.platforms or PLATFORMS:
        sys.stdout.write(f"==> {platform}\n")
        sys.stdout.flush()
        _compile(platform)
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", options.out]
        environment = {**os.environ, "SEMANTIC_WHEEL_PLATFORM": platform}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)  # noqa: S603 - our own
    return 0


def _compile(platform: str) -> None:
    from semantic.adapters.outbound.backends.torch.native.variants import (  # noqa: PLC0415
        SCALAR,
        VARIANTS,
        compile_library,
        file_name,
    )

    machine, target = PLATFORMS[platform]
    directory = _directory(platform)
    wanted = {
        directory / file_name(variant): variant
        for variant in VARIANTS
        if variant is not SCALAR and machine in variant.machines
    }
    for stale in set(directory.glob("*.so")) - wanted.keys():
        stale.unlink()
    for path, variant in wanted.items():
        if not path.exists():
            compiler = (sys.executable, "-m", "ziglang", "cc", "-target", target)
            compile_library(variant, path, compiler)


if __name__ == "__main__":
    sys.exit(main())
