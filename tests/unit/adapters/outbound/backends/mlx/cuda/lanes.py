"""Runs the source of the kernel for quantised weights on a CPU, lane by lane."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

_HEADERS = Path(__file__).parent
_NAN = 0x7FFF  # in both formats of 16 bits
# What the header defines instead, and how a kernel begins.
_PRODUCT = r"template <typename T>\n__device__ inline void multiply\(.*?\n}\n"
_COPIES = (
    r"template <int COUNT>\n__device__ inline void copy_ahead.*?(?=template <int COUNT>\n__dev)"
)
_REPLACED = (
    (_PRODUCT, ""),
    (_COPIES, ""),
    (r"typedef long long Int64;\n#define int64_t Int64\n", ""),
    (r"__shared__", "static thread_local"),
    (r'extern "C" __global__ void (__launch_bounds__\([^)]*\))? \w+', "static void kernel"),
)


def build(stem: Path, source: str, *options: str) -> ctypes.CDLL:
    """Compile C++ to a library beside its source, and load it."""
    path, library = stem.with_suffix(".cpp"), stem.with_suffix(".so")
    path.write_text(source)
    _compile(path, library, *options, "-shared")
    return ctypes.CDLL(str(library))


def _compile(source: Path, made: Path, *options: str) -> None:
    usual = ["-std=c++17", "-O1", "-w", "-fPIC", "-pthread", f"-I{_HEADERS}"]
    subprocess.run(["g++", *usual, *options, str(source), "-o", str(made)], check=True)  # noqa: S603, S607 - the tests' own source


class EmulatedLanes:
    """Replaces the compiler and the device."""

    def __init__(self, directory: Path, include_paths: Sequence[str]) -> None:
        self._directory = directory
        self._includes = [f"-I{path}" for path in include_paths]
        self._libraries: dict[str, Any] = {}
        # CUDA's headers take three times as long as a kernel. The compiler looks beside its source.
        header = _HEADERS / "lanes.h"
        made = directory / f"{header.name}.gch"
        _compile(header, made, *self._includes, "-xc++-header")

    @staticmethod
    def are_possible(include_paths: Sequence[str]) -> bool:
        return bool(include_paths) and shutil.which("g++") is not None

    def compile_source(self, name: str, source: str) -> bytes:
        """Compile a kernel for this CPU."""
        for pattern, replacement in _REPLACED:
            source = re.sub(pattern, replacement, source, flags=re.DOTALL)
        found = re.search(r"static void kernel\((.*?)\) {", source, re.DOTALL)
        assert found is not None
        given = [parameter.rsplit(maxsplit=1) for parameter in found[1].split(", ")]
        lines = ['#include "lanes.h"', source]
        lines += [
            f"static {kind.replace('const int', 'int')} given_{name};" for kind, name in given
        ]
        names = ", ".join(f"given_{name}" for _, name in given)
        lines += [f"static void entry() {{ kernel({names}); end_lane(); }}"]
        lines += ['extern "C" void run(int num_blocks, int num_threads, void** p, int* n) {']
        lines += [
            f"given_{name} = *n++;" if "*" not in kind else f"given_{name} = ({kind})*p++;"
            for kind, name in given
        ]
        lines += ["for (int b = 0; b < num_blocks; b++)"]
        lines += ["    run_block(entry, b, num_blocks, num_threads); }"]
        self._libraries[name] = build(self._directory / name, "\n".join(lines), *self._includes)
        return b""

    def run(
        self,
        *,
        name: str,
        inputs: Sequence[Any],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[Any],
        scalars: Sequence[int],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        **_: Any,
    ) -> list[Any]:
        """Run a kernel; what it does not write is no number."""
        held = [_aligned(array) for array in inputs]
        out = np.full(output_shapes[0], _NAN, np.uint16)
        places = [array.ctypes.data for array in (*held, out)]
        self._libraries[name].run(
            grid[0] // threadgroup[0],
            threadgroup[0],
            (ctypes.c_void_p * len(places))(*places),
            (ctypes.c_int * len(scalars))(*scalars),
        )
        return [mx.array(out).view(output_dtypes[0])]


def _aligned(array: Any) -> Any:
    """Copy an array to an address that 16 divides, as on a device."""
    is_packed = array.dtype in (mx.uint8, mx.uint32)
    source = np.array(array if is_packed else array.view(mx.uint16))
    memory = np.zeros(source.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    found = memory[start : start + source.nbytes].view(source.dtype)
    found[:] = source.reshape(-1)
    return found
