"""The application for Ray, as far as it goes without Ray: routing, scaling, and a replica."""

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from semantic.cluster.entrypoints.ray_app import (
    AutoscalingTargets,
    Replica,
    agent_key,
    key_of_argument,
    replicas_wanted,
)
from semantic.entrypoints.cli.app import main

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "path, headers, key",
    [
        ("/v1/agents/coder/generate", {}, "coder"),
        ("/agents/coder", {"x-agent-id": "other"}, "coder"),
        ("/v1/agents", {}, None),
        ("/v1/messages", {"X-Agent-ID": "coder", "x-claude-code-session-id": "s"}, "coder"),
        ("/v1/messages", {"x-claude-code-session-id": "s"}, "s"),
        ("/v1/chat/completions", {"x-session-affinity": "s", "accept": "*/*"}, "s"),
        ("/v1/responses", {"session_id": ""}, None),
    ],
)
def test_requests_are_of_an_agent_as_far_as_path_and_headers_say(
    path: str, headers: dict[str, str], key: str | None
) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert agent_key(path, pairs) == key
    request = SimpleNamespace(asgi_scope={"path": path, "headers": pairs})
    assert key_of_argument(pickle.dumps(request)) == key_of_argument(request) == key


class Config:
    def get_target_ongoing_requests(self) -> float:
        return 16


@dataclass
class Numbers:
    """What Ray tells a policy."""

    total_num_requests: float
    aggregated_metrics: Mapping[str, Mapping[Any, float]]
    config: AutoscalingTargets = field(default_factory=Config)


@pytest.mark.parametrize(
    "requests, pressures, wanted",
    [
        (0, {}, 0),
        (16, {}, 1),
        (17, {}, 2),
        (4, {"a": 0.7}, 1),
        (4, {"a": 0.9}, 2),
        (4, {"a": 0.9, "b": 0.9}, 3),
        (200, {"a": 0.9, "b": 0.1}, 13),
    ],
)
def test_replicas_follow_requests_and_memory(
    requests: float, pressures: dict[str, float], wanted: int
) -> None:
    metrics = {"memory_pressure": pressures} if pressures else {}
    assert replicas_wanted(Numbers(requests, metrics))[0] == wanted


async def test_replicas_of_one_machine_have_a_directory_each(tmp_path: Path) -> None:
    options = {"home": str(tmp_path), "backend": "fake"}
    one, two = Replica(options), Replica(options)
    app = one.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        await asyncio.wait_for(one.check_health(), 60)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            reply = await http.get("/health/ready")
        assert reply.status_code == 200
        assert reply.headers["x-served-by"].endswith(f"/{os.getpid()}")
        assert 0 <= (await one.record_autoscaling_stats())["memory_pressure"] <= 1
    with pytest.raises(RuntimeError, match="stopped"):
        await one.check_health()
    two.server.memory.close(10)
    assert sorted(path.name for path in (tmp_path / "replicas").iterdir()) == ["0", "1"]


_WITHOUT_EXTRA = """
import sys
sys.modules.update(dict.fromkeys(("ray", "psycopg", "psycopg_pool", "obstore")))  # not installed
from semantic.adapters.config.sources import load_settings
from semantic.entrypoints.bootstrap import bootstrap
from semantic.entrypoints.cli.app import main
from semantic.entrypoints.server import create_app
home, config = sys.argv[1:]
server = bootstrap(load_settings({"home": home, "backend": "fake"}))
create_app(server)
server.memory.close(10)
shared = ["--home", home, "--backend", "fake", "--config", config]
print(main(["serve", *shared]), main(["cluster", *shared]))
"""


def test_one_machine_needs_nothing_of_a_cluster(tmp_path: Path) -> None:
    config = tmp_path / "shared.toml"
    config.write_text(
        'store = "shared"\ndatabase_url = "postgresql://db"\nobjects_url = "s3://b"\n'
    )
    command = [sys.executable, "-c", _WITHOUT_EXTRA, str(tmp_path / "home"), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)  # noqa: S603
    assert done.stdout == "2 2\n"
    for module in ("obstore", "ray"):
        assert f"needs {module}; install it with: " in done.stderr
    assert done.stderr.count("'semantic-server[cluster]'") == 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "store = shared"),
        (["--replicas", "3", "--max-replicas", "2"], "max_replicas"),
        (["--replica-gpus", "-1"], "replica_gpus"),
    ],
)
def test_settings_that_will_not_do_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *arguments]) == 2
    assert words in capsys.readouterr().err
