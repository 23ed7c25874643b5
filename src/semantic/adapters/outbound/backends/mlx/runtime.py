"""What must happen before MLX is imported, and where it is the better choice."""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_CUDA_BUILDS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
_OPENBLAS = "libopenblas.so.0"


def is_apple_silicon() -> bool:
    """Whether MLX runs on Metal here."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def has_cuda_build() -> bool:
    """Whether one of MLX's CUDA builds is installed."""
    for name in _CUDA_BUILDS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return True
    return False


def is_preferred() -> bool:
    """Whether MLX is the better choice on this machine, judged without importing it."""
    if importlib.util.find_spec("mlx_lm") is None:
        # On a Mac without either, the hint to install should name MLX.
        return is_apple_silicon() and importlib.util.find_spec("torch") is None
    return is_apple_silicon() or (has_cuda_build() and Path("/dev/nvidiactl").exists())


def prepare(num_threads: int = 0) -> None:
    """Make float32 mean float32, and load a fast BLAS where MLX brings the reference one.

    On CUDA MLX multiplies float32 in TF32 unless told otherwise, with ten bits of mantissa: a reply
    then depends on who else is in its batch. Other formats are not affected. Idempotent.

    Args:
        num_threads: Threads of that BLAS; 0 takes all cores.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "1024")  # lengths of attention, in plans
    if platform.system() != "Linux" or has_cuda_build():
        return
    if num_threads:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(num_threads))
    try:
        ctypes.CDLL(_OPENBLAS, ctypes.RTLD_GLOBAL)
    except OSError:
        _LOG.warning(
            "MLX finds only the reference BLAS, which is some ten times slower; "
            "install OpenBLAS (Debian: apt-get install libopenblas0-pthread)"
        )


def import_library(name: str) -> Any:
    """Import a module of mlx-lm; left to itself it lowers the limit of open files for good."""
    with _file_limit_kept():
        return importlib.import_module(name)


@contextlib.contextmanager
def _file_limit_kept() -> Iterator[None]:
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original
