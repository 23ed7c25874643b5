"""A home that is started again in another number format: what is kept, and what is reported."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from semantic.domain.blocks import BlockName, BlockOrigin
from semantic.entrypoints.cli.app import main
from semantic.entrypoints.loading import compute_basis, stored_dtypes
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = [
    pytest.mark.integration,
    # torch says so once in a process, where a processor has no bfloat16.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

OTHER = {"float32": "bfloat16", "bfloat16": "float32"}


def compute_of(running: RunningServer) -> dict[str, Any]:
    with running.client() as http:
        found: dict[str, Any] = http.get("/health").json()["compute"]
    return found


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = http.post(path, json=body).raise_for_status().json()
    return made


def say(http: httpx.Client, agent: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "temperature": 1, "seed": 7, "max_tokens": 12}
    return post(http, f"/v1/agents/{agent}/generate", body)


def get(http: httpx.Client, path: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(path).raise_for_status().json()
    return found


def reused(reply: dict[str, Any]) -> int:
    return sum(reply["reuse"][tier] for tier in ("hot", "pool", "disk"))


# -- the choice --------------------------------------------------------------------------------


def test_a_measured_dtype_is_chosen_once(tiny_starter_dir: Path, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, backend="torch", model=str(tiny_starter_dir), threads=1)
    with run_server(settings) as running:
        first = compute_of(running)
    file = tmp_path / "models" / "compute.json"
    (record,) = json.loads(file.read_text())["models"].values()
    assert record["compute"] == first

    # What a start under other load would have measured.
    record["compute"]["dtype"] = OTHER[first["dtype"]]
    content = json.loads(file.read_text())
    content["models"] = dict.fromkeys(content["models"], record)
    file.write_text(json.dumps(content))
    with run_server(settings) as running:
        again = compute_of(running)
    assert again["dtype"] == OTHER[first["dtype"]]
    assert again["reason"] == f"{first['reason']}, at an earlier start"


def test_the_setting_goes_first_and_ends_an_earlier_choice(
    tiny_starter_dir: Path, tmp_path: Path
) -> None:
    model = {"backend": "torch", "model": str(tiny_starter_dir), "threads": 1}
    for dtype in ("float32", "bfloat16"):
        with run_server(make_settings(tmp_path, dtype=dtype, **model)) as running:
            assert compute_of(running)["dtype"] == dtype
    with run_server(make_settings(tmp_path, dtype="auto", **model)) as running:
        assert "measured" in compute_of(running)["reason"]


def test_a_choice_of_one_backend_is_not_used_by_another(tmp_path: Path) -> None:
    torch, mlx = (compute_basis(make_settings(tmp_path, backend=name)) for name in ("torch", "mlx"))
    assert torch["dtype"] == mlx["dtype"]
    assert torch != mlx


def test_stored_dtypes_are_those_torch_wrote_for_the_model() -> None:
    root = BlockName(bytes(32))
    origins = [
        BlockOrigin(root, "ours", "torch.v1.bfloat16.grouped", "q8g64", 40),
        BlockOrigin(root, "other", "torch.v1.float16", "raw", 30),
        BlockOrigin(root, "ours", "mlx.v1.float16", "raw", 20),
        BlockOrigin(root, "ours", "torch.v1.float32.shards2", "raw", 10),
        BlockOrigin(root, "ours", "odd", "raw", 5),
    ]
    assert stored_dtypes(origins, "ours") == ("bfloat16", "float32")


# -- another format ----------------------------------------------------------------------------

TALK = ("Tell me of the rivers and the town. " * 40, "And of the hills?", "Go on.")
CHANGED = "KV cache was written in bfloat16; the model now runs in float32."


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    main(["doctor", "--json", *arguments])
    findings = json.loads(capsys.readouterr().out)
    found: dict[str, Any] = next(one for one in findings if one["what"] == "KV cache")
    return found


def test_the_report_on_state_in_another_dtype_is_true(
    tiny_starter_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, model = tmp_path / "home", str(tiny_starter_dir)
    usual = {"backend": "torch", "model": model, "threads": 1}
    asked = ("--home", str(home), "--model", model, "--backend", "torch")
    with (
        run_server(make_settings(home, dtype="bfloat16", **usual)) as running,
        running.client() as http,
    ):
        post(http, "/v1/agents", {"id": "ann"})
        say(http, "ann", TALK[0])
        assert get(http, "/health")["note"] == ""
        kept = get(http, "/v1/agents/ann")["state"]
        assert kept["reusable_tokens"] == kept["tokens"] > 256
    monkeypatch.setenv("SEMANTIC_DTYPE", "float32")
    found = doctor(capsys, *asked)
    assert (found["level"], found["advice"]) == ("note", "to use it, start with --dtype bfloat16")
    assert found["found"].startswith(CHANGED)
    monkeypatch.setenv("SEMANTIC_DTYPE", "bfloat16")
    assert doctor(capsys, *asked)["level"] == "ok"
    monkeypatch.delenv("SEMANTIC_DTYPE")

    with (
        capture_logs() as logged,
        run_server(make_settings(home, dtype="float32", **usual)) as running,
        running.client() as http,
    ):
        (line,) = [entry["event"] for entry in logged if "Recomputing" in entry["event"]]
        assert line.startswith(CHANGED)
        assert get(http, "/health")["note"].startswith(CHANGED)
        assert get(http, "/health")["status"] == "ok"
        state = get(http, "/v1/agents/ann")["state"]
        assert (state["tier"], state["reusable_tokens"], state["note"]) == ("cold", 0, CHANGED)
        assert get(http, "/v1/cache")["agents"] == {"hot": 0, "warm": 0, "cold": 1}
        told = get(http, "/v1/agents/ann/explain")
        assert told["next"] == state
        assert (
            f"computes most of its prompt again and reuses 0 tokens. {CHANGED}" in told["summary"]
        )
        capsys.readouterr()
        assert main(["agents", "show", "ann", "--server", running.url]) == 0
        assert CHANGED in " ".join(capsys.readouterr().out.split())

        reply = say(http, "ann", TALK[1])
        assert reused(reply) == state["reusable_tokens"]
        told = get(http, "/v1/agents/ann/explain")
        assert (told["note"], told["diverged"]) == (CHANGED, None)
        assert told["miss"]["reason"] == "format_changed"
        assert told["miss"]["missed_tokens"] == state["tokens"] + 1  # and the last one of the reply
        assert CHANGED in told["summary"]
        assert told["next"]["note"] == ""

        following = told["next"]
        assert following["tier"] == "hot"
        restored = say(http, "ann", TALK[2])
        assert reused(restored) == following["reusable_tokens"] > 256
        post(http, "/v1/agents/ann/evict", {"to": "cold"})
        post(http, "/v1/agents/ann/rewind", {"turn_id": reply["turn_id"]})
        computed = say(http, "ann", TALK[2])
        assert (reused(computed), computed["text"]) == (0, restored["text"])
