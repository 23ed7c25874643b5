"""Prepares the import of MLX, and decides whether MLX is the better choice on this machine."""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import resource
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_CUDA_BUILDS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
_OPENBLAS = "libopenblas.so.0"
# MLX submits operations in batches, and blocks while ten are pending. With its default limit of
# 400 MB a batch is two layers, so launching a step would block for most of it. The limit on the
# number of operations keeps its default: with 200, models with experts computed other results.
_CUDA_SETTINGS = {
    "MLX_MAX_MB_PER_BUFFER": "4000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1024",  # number of cached attention plans
}


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


def has_nvidia_driver() -> bool:
    """Whether this machine runs NVIDIA's driver."""
    return Path("/dev/nvidiactl").exists()


def is_preferred() -> bool:
    """Whether MLX is the better choice on this machine, determined without importing it."""
    if importlib.util.find_spec("mlx_lm") is None:
        # On a Mac with neither library, the installation hint should name MLX.
        return is_apple_silicon() and importlib.util.find_spec("torch") is None
    return is_apple_silicon() or (has_cuda_build() and has_nvidia_driver())


def prepare(num_threads: int = 0) -> None:
    """Load a fast BLAS where MLX ships the reference BLAS, and tune MLX on CUDA. Idempotent.

    Args:
        num_threads: Threads of that BLAS; 0 means all cores.
    """
    if has_cuda_build():
        for name, value in _CUDA_SETTINGS.items():
            os.environ.setdefault(name, value)
        return
    if platform.system() != "Linux":
        return
    if num_threads:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(num_threads))
    try:
        ctypes.CDLL(_OPENBLAS, ctypes.RTLD_GLOBAL)
    except OSError:
        _LOG.warning(
            "OpenBLAS not found; MLX uses its reference BLAS, which is about ten times slower. "
            "Install OpenBLAS (Debian: apt-get install libopenblas0-pthread)"
        )


def import_library(name: str) -> Any:
    """Import a module of mlx-lm without its side effect of lowering the open-file limit."""
    with _file_limit_kept(), _without_tokenizers():
        return importlib.import_module(name)


@contextlib.contextmanager
def _without_tokenizers() -> Iterator[None]:
    """Save ten seconds: mlx-lm's tokenizers, unused here, import transformers and PyTorch."""
    names = ("transformers", "transformers.tokenization_utils_base")
    if names[0] in sys.modules or "mlx_lm" in sys.modules:
        yield
        return
    stand_in = types.ModuleType(names[0])
    stand_in.__getattr__ = lambda _: _NotUsed  # type: ignore[method-assign]
    sys.modules.update(dict.fromkeys(names, stand_in))
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


class _NotUsed:
    """Placeholder for tokenizer classes while mlx-lm is imported."""

    @classmethod
    def register(cls, *_: object, **__: object) -> None: ...


@contextlib.contextmanager
def _file_limit_kept() -> Iterator[None]:
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original
