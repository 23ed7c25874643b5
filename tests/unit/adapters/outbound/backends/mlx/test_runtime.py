"""Settings of MLX that are chosen before it is imported."""

import importlib.util
import os
import resource
import subprocess
import sys

import pytest

from semantic.adapters.outbound.backends.mlx import runtime

pytestmark = pytest.mark.unit


def test_importing_the_library_keeps_the_limit_of_open_files() -> None:
    """In a process of its own: the library may be imported here already."""
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")
    code = (
        "import resource; from semantic.adapters.outbound.backends.mlx import "
        "runtime;"
        "runtime.prepare(1); runtime.import_library('mlx_lm.models.cache');"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(n) for n in resource.getrlimit(resource.RLIMIT_NOFILE)]
    assert resource.setrlimit.__name__ == "setrlimit"


@pytest.mark.parametrize(
    "system,machine,cuda,expected",
    [
        ("Darwin", "arm64", False, True),
        ("Darwin", "x86_64", False, False),
        ("Linux", "x86_64", False, False),
    ],
)
def test_mlx_is_preferred_on_these_machines(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, cuda: bool, expected: bool
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(runtime, "has_cuda_build", lambda: cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert runtime.is_preferred() == expected


def test_mlx_is_not_preferred_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    installed = {"torch"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name in installed else None
    )
    assert not runtime.is_preferred()
    installed.clear()
    assert runtime.is_preferred()


def test_a_missing_blas_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(runtime, "has_cuda_build", lambda: False)
    monkeypatch.setattr(runtime, "_OPENBLAS", "libno-such-blas.so.0")
    runtime.prepare()
    assert "OpenBLAS not found" in caplog.text


@pytest.mark.parametrize("asked,expected", [(None, "0"), ("1", "1")])
def test_tf32_is_off_before_mlx_is_imported_unless_asked_otherwise(
    asked: str | None, expected: str
) -> None:
    """In a process of its own: MLX reads it once, and may be imported here already."""
    code = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'mlx.core': print(os.environ.get('MLX_ENABLE_TF32'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import semantic.adapters.outbound.backends.mlx.backend\n"
    )
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "MLX_ENABLE_TF32"}
    if asked is not None:
        environment["MLX_ENABLE_TF32"] = asked
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == [expected]
