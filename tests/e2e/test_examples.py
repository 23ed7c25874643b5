"""The examples run as they are written; where the starter model would be slow, on the fake one."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    importlib.import_module(f"examples.{name}").main()


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = make_settings(tmp_path_factory.mktemp("home"), log_level="warning")
    with run_server(settings) as server:
        yield server


def test_every_example_is_tried() -> None:
    named = {path.stem for path in EXAMPLES.glob("*.py")} - {"client"}

    assert named == {"basic", "many_agents", "persistence", "best_of_n", "custom_model"}


def test_the_first_example_on_the_starter_model(
    starter_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(starter_home, backend="torch", log_level="warning")
    with run_server(settings) as server:
        monkeypatch.setenv("SEMANTIC_URL", server.url)
        run("basic", monkeypatch=monkeypatch)

    said = capsys.readouterr().out
    assert "Paris" in said
    assert "turns: 2" in said
    assert "after the rewind: 1 turn" in said


@pytest.mark.parametrize(
    "name, expected",
    [
        ("many_agents", "4 agents answered together"),
        ("best_of_n", "the best one continues"),
    ],
)
def test_examples_with_many_agents(
    fake: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    expected: str,
) -> None:
    monkeypatch.setenv("SEMANTIC_URL", fake.url)

    run(name, monkeypatch=monkeypatch)

    assert expected in capsys.readouterr().out
    assert fake.server.memory.agents.agents("local") == []


def test_the_example_that_restarts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("persistence", "--backend", "fake", monkeypatch=monkeypatch)

    reused, _, total, *_ = capsys.readouterr().out.split("reused ")[1].split()
    assert 300 < int(reused) < int(total)


def test_the_example_with_a_model_of_ones_own(
    starter_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMANTIC_HOME", str(starter_home))
    run("custom_model", monkeypatch=monkeypatch)

    said = capsys.readouterr().out
    assert "serving: my-tiny-llama with a context of 2048" in said
    assert "reused: 0" not in said
