"""Custom kernels, compiled by NVRTC and run by MLX.

MLX would compile them itself, one at a time and two seconds each in every process, because it puts
its own headers before each of them. With only the headers of CUDA's number formats, compiling takes
a tenth of a second. MLX passes arrays and a few integers to a compiled kernel: array shapes that a
kernel needs are among the integers, and all arrays are contiguous.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array

_LOG = logging.getLogger(__name__)

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")  # MLX has loaded one of them
_FORMATS = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.int64: "long long",
    mx.uint8: "unsigned char",
    mx.uint16: "unsigned short",
}

_BEGINNING = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef long long Int64;
#define int64_t Int64
"""

# Multiplies a 16x16 tile by a 16x8 tile and adds the product to a 16x8 tile.
HEADER = """
template <typename A, typename B> struct IsSame { static constexpr bool value = false; };
template <typename A> struct IsSame<A, A> { static constexpr bool value = true; };

template <typename T>
__device__ inline void multiply(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    if constexpr (IsSame<T, __nv_bfloat16>::value) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}
"""


@dataclass
class Compiled:
    """Number of kernels that this process has compiled, and the time in seconds."""

    count: int = 0
    seconds: float = 0.0


COMPILED = Compiled()


def report_compiled() -> None:
    """Log how many kernels were compiled while a model was loaded."""
    if COMPILED.count:
        _LOG.info("compiled %d kernels in %.1f s", COMPILED.count, COMPILED.seconds)


@dataclass(frozen=True)
class Kernel:
    """A kernel that is compiled at its first call.

    Attributes:
        source: Body of the function.
        header: Source before the function.
        numbers: Names of the integer arguments, which come last.
        is_copying: Whether arrays that are not contiguous are copied first.
        bounds: Threads of a block, and how many blocks must fit on a multiprocessor; the compiler
            chooses the number of registers by it.
        shared_bytes: Shared memory of a block in addition to what the source declares.
    """

    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    source: str
    header: str = ""
    numbers: Sequence[str] = ()
    is_copying: bool = True
    bounds: tuple[int, int] | None = None
    shared_bytes: int = 0
    _binaries: dict[tuple[Any, ...], tuple[str, bytes]] = field(default_factory=dict, repr=False)

    def __call__(
        self,
        *,
        inputs: Sequence[Array],
        template: Mapping[str, Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        numbers: Sequence[int] = (),
        stream: Any = None,
    ) -> list[Array]:
        """Run the kernel, lazily. `grid` is the total number of threads, not of blocks.

        `template`, the number formats and integers to insert into the source, must determine the
        arrays' number formats.
        """
        shapes, made_formats = zip(*outputs, strict=True)
        key = tuple(template.values())
        if key not in self._binaries:
            formats = [array.dtype for array in inputs]
            self._binaries[key] = self._compile(template, formats, made_formats)
        name, binary = self._binaries[key]
        made: list[Array] = mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=binary,
            inputs=inputs,
            output_shapes=shapes,
            output_dtypes=made_formats,
            scalars=numbers,
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self.shared_bytes,
            ensure_row_contiguous=self.is_copying,
            stream=stream,
        )
        return made

    def _compile(
        self, template: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> tuple[str, bytes]:
        given = [f"const {_FORMATS[d]}* {n}" for n, d in zip(self.inputs, inputs, strict=True)]
        given += [f"{_FORMATS[d]}* {n}" for n, d in zip(self.outputs, outputs, strict=True)]
        given += [f"const int {name}" for name in self.numbers]
        constants = "".join(
            f"constexpr int {name} = {value};\n"
            if isinstance(value, int)
            else f"using {name} = {_FORMATS[value]};\n"
            for name, value in template.items()
        )
        body = f"({', '.join(given)}) {{\n{constants}{self.source}\n}}\n"
        text = _BEGINNING + self.header + body
        name = f"{self.name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        bounds = "" if self.bounds is None else "__launch_bounds__({}, {})".format(*self.bounds)
        whole = f'{_BEGINNING}{self.header}extern "C" __global__ void {bounds} {name}{body}'
        return name, compile_source(name, whole)


def compile_source(name: str, source: str, architecture: str = "") -> bytes:
    """Compile for an architecture such as sm_90; by default for that of the device.

    Raises:
        RuntimeError: the compiler rejects the source, or is not available.
    """
    started = time.perf_counter()
    library, program = _compiler(), ctypes.c_void_p()
    if library is None:
        raise RuntimeError("NVRTC, the CUDA compiler library, was not found")
    library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None
    )
    try:
        architecture = architecture or mx.device_info()["architecture"]
        options = [f"--gpu-architecture={architecture}", "--std=c++17"]
        options += [f"--include-path={path}" for path in include_paths()]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise RuntimeError(f"compiling kernel {name} failed: {log.decode(errors='replace')}")
        binary = _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    COMPILED.count += 1
    COMPILED.seconds += time.perf_counter() - started
    return binary


def _read(size_of: Any, copy: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    copy(program, buffer)
    return buffer.raw


@functools.cache
def can_compile() -> bool:
    """Whether kernels can be compiled; otherwise only MLX's own kernels are used."""
    source = f'{_BEGINNING}extern "C" __global__ void probe(float* out) {{ out[0] = 1; }}'
    try:
        compile_source("probe", source)
    except RuntimeError as error:
        _LOG.warning("custom kernels disabled: %s", error)
        return False
    return True


@functools.cache
def _compiler() -> ctypes.CDLL | None:
    installed = [path for name in _LIBRARIES for path in _packages().glob(f"*/lib/{name}")]
    for path in _packages().glob("*/lib/libnvrtc-builtins.so.*"):
        # NVRTC 13.0 opens this library by its name, and does not look beside itself.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path))
    for name in (*_LIBRARIES, *map(str, installed)):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def include_paths() -> list[str]:
    """Return directories with CUDA's headers: of a toolkit, or of pip packages beside MLX."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    paths = [Path(home) / "include" for home in (*homes, "/usr/local/cuda") if home]
    paths += sorted(_packages().glob("*/include"))
    return [str(path) for path in paths if (path / "cuda_fp16.h").exists()]


def _packages() -> Path:
    return Path(mx.__file__).parent.parent / "nvidia"
