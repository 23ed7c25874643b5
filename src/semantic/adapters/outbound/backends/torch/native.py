"""The C library of decode steps: built by this machine's compiler, kept, and called.

`native.c` is one file that takes two seconds to compile. That happens once, in the background while
torch is imported, and what comes of it stays in the home directory, named after source, compiler
and CPU. Without a compiler, or on a CPU it is not written for, models run as they would without it.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

_SOURCE = Path(__file__).with_name("native.c")
_MACHINES = ("aarch64", "arm64")
_FLAGS = ("-O3", "-mcpu=native", "-shared", "-fPIC", "-pthread")
_BUILD_CPU_S = 120  # of the compiler's own time: a starved machine may take an hour for two seconds
FULL = 0  # a matrix of float32; otherwise its kind is its bits

_log = structlog.get_logger()


class Matrix(ctypes.Structure):
    """`Matrix` of the C source."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("unit", ctypes.c_float),
    )


class Layer(ctypes.Structure):
    """`Layer` of the C source."""

    _fields_ = (
        ("norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("inputs", Matrix * 3),
        ("output", Matrix),
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("num_inputs", ctypes.c_int32),
        ("window", ctypes.c_int32),
    )


class Model(ctypes.Structure):
    """`Model` of the C source."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("head", Matrix),
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "inner")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
    )


class Library:
    """The functions of the library; addresses are those of arrays that the caller keeps."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            OSError: it cannot be loaded.
        """
        loaded = ctypes.CDLL(str(path))
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._step, self._linear = loaded.semantic_step, loaded.semantic_linear
        self._pack = loaded.semantic_pack
        self._step.argtypes = (pointer, pointer, integer, pointer, pointer, pointer)
        self._step.argtypes += (integer, pointer, pointer, integer)
        self._linear.argtypes = (pointer, pointer, integer, pointer, integer)
        self._pack.argtypes = (pointer, pointer, pointer, *(integer,) * 4, ctypes.c_float)
        self._pack.argtypes += (pointer, integer)
        self._pack.restype = None

    def step(self, model: Model, rows: int, num_rows: int, *rest: int) -> None:
        """Run a model over rows.

        Raises:
            MemoryError: there is not enough for it.
        """
        if self._step(ctypes.byref(model), rows, num_rows, *rest):
            raise MemoryError("no memory for a decode step")

    def linear(self, matrix: Matrix, x: int, num_rows: int, out: int, num_threads: int) -> None:
        """Multiply rows with a matrix.

        Raises:
            MemoryError: there is not enough for it.
        """
        if self._linear(ctypes.byref(matrix), x, num_rows, out, num_threads):
            raise MemoryError("no memory for a linear")

    def pack(self, addresses: Sequence[int], sizes: Sequence[int], unit: float, out: int) -> None:
        """Lay integers, scales and biases of a matrix as the kernels read them.

        Args:
            addresses: Of the integers, the scales and the biases.
            sizes: Rows, columns, columns of a group, bits of an integer.
            unit: What scales and biases are stored as multiples of.
            out: Room for the result.
        """
        self._pack(*addresses, *sizes, unit, out, os.cpu_count() or 1)


class NativeBuild:
    """A library that is being made ready."""

    def __init__(self, directory: Path) -> None:
        """Begin, unless this CPU is not one of those it is for.

        Args:
            directory: Where libraries are kept.
        """
        self.directory = directory
        self._library: Library | None = None
        self._thread = threading.Thread(target=self._make, name="native-build", daemon=True)
        if platform.machine() in _MACHINES:
            self._thread.start()

    def library(self) -> Library | None:
        """The library, when it is ready; None where there is none."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._library

    def _make(self) -> None:
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            _log.info("no C compiler: decode steps run operation by operation, which is slower")
            return
        try:
            path = self.directory / f"step-{_digest(compiler)}.so"
            if not path.exists():
                _compile(compiler, path)
            self._library = Library(path)
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", "") or error).strip()[-300:]
            _log.warning("decode steps run operation by operation, which is slower", reason=said)


def _digest(compiler: str) -> str:
    """Names what a library depends on."""
    about = [_SOURCE.read_bytes(), compiler.encode(), repr(_FLAGS).encode()]
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8")
        about += [
            line.encode() for line in re.findall(r"^(?:Features|CPU part).*$", text, re.M)[:2]
        ]
    return hashlib.sha256(b"\0".join(about)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE), "-lm"]
        limited = ["/bin/sh", "-c", f'ulimit -t {_BUILD_CPU_S}; exec "$@"', "sh", *command]
        # A fixed command over our own source.
        subprocess.run(limited, check=True, capture_output=True, text=True)  # noqa: S603
        made.replace(path)
