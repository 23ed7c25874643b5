"""Builds and runs llama.cpp's server for comparisons.

`make peer` builds it from the source inside llama-cpp-python's package on PyPI, which takes some
fifteen minutes on two cores, and keeps the binary in the user's cache, by version and kind of CPU.
Prebuilt wheels target any CPU: on ARM they reach half the speed, which would be unfair.

    python -m benchmarks.peer        # build it unless it exists, and print its path

It says which version that is, and whether PyPI has a newer one. In November 2026, no other package
that PyPI, Debian or npm offered had newer source: node-llama-cpp 3.22.1 has llama.cpp v0.5.0, which
is older than this.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

VERSION = "0.3.36"  # of llama-cpp-python, which names the source
COMMIT = "0c1e57098"  # of llama.cpp, by the package's changelog
_TOOLS = ("cmake", "ninja")
_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "GGML_NATIVE=ON",
    "BUILD_SHARED_LIBS=OFF",
    "LLAMA_BUILD_SERVER=ON",
    *(f"LLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP", "UI")),
    "LLAMA_USE_PREBUILT_UI=OFF",
    "LLAMA_OPENSSL=OFF",
)
_START_S = 120


def peer_path() -> Path:
    """Return the path of the binary, which may not be built yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "semantic" / "peer" / f"llama-server-{VERSION}-{_cpu()}"


def peer_version() -> str:
    """Name the version in words."""
    return f"llama.cpp {COMMIT}, from llama-cpp-python {VERSION}"


def newest_version() -> str:
    """Return the newest version of llama-cpp-python on the package index; "" if unknown."""
    command = [sys.executable, "-m", "pip", "index", "versions", "llama-cpp-python"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    found = re.match(r"llama-cpp-python \((.+?)\)", asked.stdout)
    return found[1] if found else ""


def _cpu() -> str:
    """Return what the compiler depends on: the architecture and the CPU's features."""
    about = platform.processor()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8")
        about = "".join(re.findall(r"^(?:flags|Features|CPU part)\s*:.*$", text, re.M)[:2])
    return f"{platform.machine()}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"


def build() -> Path:
    """Build the peer unless it exists; returns its path."""
    path = peer_path()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="semantic-peer-") as temporary:
        directory = Path(temporary)
        tools = _make_tools(directory / "tools")
        source = _fetch_source(directory, tools)
        _run(
            tools / "cmake",
            "-G",
            "Ninja",
            "-S",
            source,
            "-B",
            directory / "build",
            *(f"-D{option}" for option in _OPTIONS),
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        )
        _run(tools / "cmake", "--build", directory / "build", "--target", "llama-server")
        made = path.with_suffix(".new")
        shutil.copy2(directory / "build" / "bin" / "llama-server", made)
        made.replace(path)
    return path


def _make_tools(directory: Path) -> Path:
    venv.create(directory, with_pip=True)
    _run(directory / "bin" / "python", "-m", "pip", "install", "--quiet", *_TOOLS)
    return directory / "bin"


def _fetch_source(directory: Path, tools: Path) -> Path:
    package = f"llama-cpp-python=={VERSION}"
    _run(
        tools / "python",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        "--dest",
        directory,
        package,
    )
    (archive,) = directory.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(directory, filter="data")
    (source,) = directory.glob("llama_cpp_python-*/vendor/llama.cpp")
    return source


def _run(*command: str | Path) -> None:
    print("==>", *command, file=sys.stderr, flush=True)
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)  # noqa: S603 - our own


# -- running it -----------------------------------------------------------------------------------


@contextlib.contextmanager
def peer_serving(
    model: Path, *, streams: int = 8, context: int = 8192, more: tuple[str, ...] = ()
) -> Iterator[int]:
    """Run the peer on a free port; yields the port when ready. `context` is tokens per stream."""
    path = peer_path()
    if not path.exists():
        raise FileNotFoundError(f"llama.cpp's server is not built: run `make peer` ({path})")
    port = _free_port()
    command = [path, "--model", model, "--host", "127.0.0.1", "--port", port]
    command += ["--parallel", streams, "--ctx-size", streams * context]
    # As who serves agents would: what a conversation shares with a slot's is kept, also shifted.
    command += ["--cache-reuse", 256, "--log-disable", "--no-warmup", *more]
    with subprocess.Popen(list(map(str, command)), stdout=sys.stderr) as process:  # noqa: S603 - ours
        try:
            _await(process, port)
            yield port
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        time.sleep(0.05)
    raise RuntimeError(f"llama.cpp's server did not start; its exit status: {process.poll()}")


if __name__ == "__main__":
    print(f"==> {peer_version()}; newest: {newest_version() or 'unknown'}", file=sys.stderr)
    print(build())
