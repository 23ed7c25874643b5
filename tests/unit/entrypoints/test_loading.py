"""Which backend runs a model, and what is refused before anything is loaded."""

from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.loading import ModelLoader, choose_backend
from semantic.ports.telemetry import NoTelemetry
from tests.http_server import make_settings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_cuda_without_mlx_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(runtime, "is_preferred", lambda: False)
    settings = make_settings(tmp_path, backend=backend, device="cuda")
    assert choose_backend(settings) == "torch"
    with pytest.raises(InvalidRequestError, match=r"runs on the CPU.*'semantic-server\[cuda\]'"):
        ModelLoader(settings, "torch", "raw", NoTelemetry())
