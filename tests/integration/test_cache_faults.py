"""Servers answer correctly on cache directories that are damaged, full or too small."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.errors import CachePersistenceError, InvalidRequestError
from semantic.domain.events import MissReason
from semantic.entrypoints.bootstrap import bootstrap
from semantic.entrypoints.cli.app import main
from semantic.entrypoints.server import create_app
from semantic.ports.storage import PutAgent
from tests.chaos.kills import logged_conversations
from tests.chaos.mounts import fill_up, resize, small_disk
from tests.chaos.talk import Message, ask
from tests.http_server import RunningServer, make_settings, run_server
from tests.unit.adapters.outbound.ledger.ledger_values import agent_of
from tests.waiting import await_that

pytestmark = pytest.mark.integration

SYSTEM = "You are the agent whose memory is tried. " * 12
QUESTIONS = ("What was lost?", "What is left?", "What comes next?")
LENGTH = 40
Conversation = list[Message]


def begin() -> Conversation:
    return [{"role": "system", "content": SYSTEM}]


def talk(running: RunningServer, said: Conversation, question: str, agent: str = "tried") -> int:
    """Have a turn; returns how many tokens of the prompt were not computed."""
    said.append({"role": "user", "content": question})
    body = {"model": running.model, "messages": said, "max_tokens": LENGTH, "temperature": 0}
    with running.client() as http:
        reply = http.post("/v1/chat/completions", json=body, headers={"x-agent-id": agent})
        reply.raise_for_status()
    said.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = make_settings(tmp_path_factory.mktemp("reference"), durability="none")
    with run_server(settings) as running:
        yield running


def assert_right(reference: RunningServer, said: Conversation) -> None:
    """Every reply is what a server says that keeps nothing."""
    with reference.client() as http:
        for index, message in enumerate(said):
            if message["role"] == "assistant":
                assert message["content"] == ask(http, reference.model, said[:index], LENGTH)


def store_of(running: RunningServer) -> Any:
    return running.server.memory.cache.store


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Conversation]:
    """A directory that a server left, and what its only agent had said."""
    said = begin()
    with run_server(make_settings(tmp_path)) as running:
        for question in QUESTIONS[:2]:
            talk(running, said, question)
    return tmp_path, said


def block_files(home: Path) -> list[Path]:
    return sorted((home / "cache" / "blocks").rglob("*.safetensors"))


# -- files ------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_bad_block_file_is_a_miss_that_is_counted(
    damage: Callable[[Path], None],
    kept: tuple[Path, Conversation],
    reference: RunningServer,
) -> None:
    home, said = kept
    files = block_files(home)
    damage(files[len(files) // 2])
    with run_server(make_settings(home)) as running:
        talk(running, said, QUESTIONS[2])
        await_that(lambda: store_of(running).counts.corrupt >= 1)
        store_of(running).check_integrity()
        agents = running.server.memory.agents
        (latest, *_) = agents.turns(agents.recent()[0])
        assert latest.miss is not None
        # Evicted if it was found out before the request.
        assert latest.miss.reason in (MissReason.DAMAGED, MissReason.EVICTED)
    assert_right(reference, said)
    with run_server(make_settings(home)) as running:
        num_cached = talk(running, said, "And now?")
        assert store_of(running).counts.corrupt == 0
        assert num_cached > len(SYSTEM)  # made anew, and kept
    assert_right(reference, said)


def test_a_bad_file_that_is_read_or_verified_goes_to_quarantine_until_gc(
    kept: tuple[Path, Conversation],
) -> None:
    home, said = kept
    files = block_files(home)
    flip(files[0])
    quarantine = home / "cache" / "quarantine"
    with run_server(make_settings(home)) as running, running.client() as http:
        assert http.post("/v1/cache/verify").status_code == 200
        await_that(lambda: quarantine.is_dir() and len(list(quarantine.iterdir())) == 1)
        assert not files[0].exists()
        assert http.post("/v1/cache/gc").status_code == 200
        assert len(list(quarantine.iterdir())) == 1  # it is not old enough
        assert http.post("/v1/cache/gc", json={"orphan_age_s": 0}).json()["freed_bytes"] > 0
        assert list(quarantine.iterdir()) == []
        talk(running, said, QUESTIONS[2])


# -- directories of other users ----------------------------------------------------------------


def test_a_start_in_another_users_directory_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    (project / "blocks").mkdir(parents=True)
    (project / "blocks" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidRequestError, match=r"is not a Semantic cache.*--cache-dir"):
        bootstrap(make_settings(tmp_path / "home", cache_dir=project))
    for action in ("verify", "gc", "stats"):
        assert main(["cache", action, "--cache-dir", str(project)]) == 2
        assert "is not a Semantic cache" in capsys.readouterr().err
    assert [path.name for path in sorted(project.rglob("*"))] == ["blocks", "notes.txt"]
    assert (project / "blocks" / "notes.txt").read_text() == "mine"


# -- the ledger -------------------------------------------------------------------------------


def test_a_lost_ledger_is_restored_and_its_index_rebuilt(
    kept: tuple[Path, Conversation], reference: RunningServer
) -> None:
    home, said = kept
    (home / "cache" / "ledger.db").write_bytes(b"no ledger at all" * 1000)
    with run_server(make_settings(home)) as running, running.client() as http:
        assert "ledger.db was damaged" in http.get("/health").json()["problem"]
        agents = running.server.memory.agents
        (agent,) = agents.agents("local")
        logged = [message.text for turn in agents.turns(agent)[::-1] for message in turn.messages]
        assert logged == [message["content"] for message in said]
        # The head of the conversation comes from the files, whose index was lost.
        assert talk(running, said, QUESTIONS[2]) > len(SYSTEM)
    assert_right(reference, said)


def test_a_ledger_lost_with_its_backups_and_its_mark_is_reported(
    kept: tuple[Path, Conversation],
) -> None:
    home, _ = kept
    for path in (home / "cache").glob("ledger.*"):
        path.unlink()
    with (
        capture_logs() as logged,
        run_server(make_settings(home)) as running,
        running.client() as http,
    ):
        assert http.get("/v1/agents").json()["data"] == []
        assert "all earlier agents and turns are lost" in http.get("/health").json()["problem"]
    warnings = [str(line.get("problem")) for line in logged if line["log_level"] == "warning"]
    assert any("all earlier agents and turns are lost" in warning for warning in warnings)


def spoil_turn(home: Path, number: int) -> str:
    """Change a letter of what was said in a turn, in the ledger alone; returns the turn's id."""
    with contextlib.closing(sqlite3.connect(home / "cache" / "ledger.db")) as ledger, ledger:
        rows = ledger.execute("SELECT id, body FROM turns ORDER BY created_at").fetchall()
        turn_id, body = rows[number]
        changed = body.replace("What", "Then")
        assert changed != body
        ledger.execute("UPDATE turns SET body = ? WHERE id = ?", (changed, turn_id))
    return str(turn_id)


def logged(http: httpx.Client, agent: str) -> list[str]:
    turns = http.get(f"/v1/agents/{agent}/turns").raise_for_status().json()["data"]
    found = [message["content"] for turn in turns[::-1] for message in turn["messages"]]
    return ["".join(part["text"] for part in parts) for parts in found]


def test_a_damaged_turn_is_restored_at_start_and_never_reaches_the_backup(
    kept: tuple[Path, Conversation], reference: RunningServer
) -> None:
    home, said = kept
    turn_id = spoil_turn(home, 0)
    for is_first in (True, False):
        settings = make_settings(home, upkeep_interval_s=0.05)
        with run_server(settings) as running, running.client() as http:
            problem = http.get("/health").json()["problem"]
            assert (f"turn {turn_id} of agent tried" in problem) is is_first
            assert ("restored it from the backup" in problem) is is_first
            assert logged(http, "tried") == [message["content"] for message in said]
            talk(running, said, QUESTIONS[2])
    assert_right(reference, said)


def test_a_damaged_turn_without_a_copy_is_named_and_other_agents_go_on(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        said, others = begin(), begin()
        for question in QUESTIONS[:2]:
            talk(running, said, question)
            talk(running, others, question, agent="other")
        await_that(lambda: len(logged(http, "other")) == len(others))
        assert running.server.memory.disk is not None
        assert running.server.memory.disk.flush(60)
        turn_id = spoil_turn(tmp_path, 0)
        ask_more = {"messages": [{"role": "user", "content": "And?"}], "max_tokens": 4}
        for refused in (
            http.get("/v1/agents/tried/turns"),
            http.post("/v1/agents/tried/generate", json=ask_more),
        ):
            message = refused.json()["error"]["message"]
            assert f"turn {turn_id} of agent tried does not match its checksum" in message
            assert str(tmp_path) not in refused.text
        assert turn_id in http.get("/health").json()["problem"]
        assert logged(http, "other") == [message["content"] for message in others]
        http.post("/v1/agents/other/generate", json=ask_more).raise_for_status()


def test_a_ledger_locked_by_another_program_is_refused_and_the_directory_released(
    kept: tuple[Path, Conversation],
) -> None:
    home, _ = kept
    with contextlib.closing(sqlite3.connect(home / "cache" / "ledger.db")) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CachePersistenceError, match="another program has locked"):
            bootstrap(make_settings(home))
    with run_server(make_settings(home)) as running:
        assert len(running.server.memory.agents.agents("local")) == 1


# -- places that are of no use ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name,words",
    [
        ("", "setting cache_dir: it must name a directory"),
        ("file", "is not a directory; choose another --cache-dir"),
        ("file/below", "Not a directory; choose another --cache-dir"),
    ],
)
def test_a_place_that_cannot_be_a_directory_is_refused(
    name: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match=words):
        bootstrap(make_settings(tmp_path, cache_dir=f"{tmp_path}/{name}" if name else ""))


def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        (disk / "cache").mkdir()
        resize(disk, "ro")
        with pytest.raises(CachePersistenceError, match=r"Read-only file system.*--cache-dir"):
            bootstrap(make_settings(tmp_path, cache_dir=disk / "cache"))


# -- room -------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["sync", "write_behind"])
def test_a_full_disk_costs_no_reply_and_is_made_up_for(
    durability: str, tmp_path: Path, reference: RunningServer
) -> None:
    said = begin()
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        settings = make_settings(tmp_path, cache_dir=disk / "cache", durability=durability)
        with run_server(settings) as running, running.client() as http:
            talk(running, said, QUESTIONS[0])
            assert running.server.memory.disk is not None
            running.server.memory.disk.flush(60)
            fill_up(disk / "filler")
            for question in ("Is there room?", "Still?", "Not at all?"):
                talk(running, said, f"{question} {'No. ' * 100}")
            await_that(lambda: store_of(running).counts.unwritten > 0)
            assert "No space" in http.get("/health").json()["problem"]
            assert http.get("/health").status_code == 200
            (disk / "filler").unlink()
            talk(running, said, QUESTIONS[1])
            await_that(lambda: not http.get("/health").json()["problem"])
        assert_right(reference, said)
        assert logged_conversations(disk / "cache") == {"tried": said}
        assert main(["cache", "verify", "--cache-dir", str(disk / "cache")]) == 0


def test_a_start_on_a_full_disk_after_a_kill_serves_from_memory_until_there_is_room(
    tmp_path: Path, reference: RunningServer
) -> None:
    said = begin()
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        settings = make_settings(tmp_path, cache_dir=disk / "first", durability="sync")
        with run_server(settings) as running:
            talk(running, said, QUESTIONS[0])
            shutil.copytree(disk / "first", disk / "cache")
        fill_up(disk / "filler")
        settings = make_settings(tmp_path, cache_dir=disk / "cache", durability="sync")
        with run_server(settings) as running, running.client() as http:
            assert "the disk is full" in running.server.memory.summary
            assert "the disk is full" in http.get("/health").json()["problem"]
            assert logged(http, "tried") == [message["content"] for message in said]
            talk(running, said, QUESTIONS[1])
            (disk / "filler").unlink()
            talk(running, said, QUESTIONS[2])
            await_that(lambda: not http.get("/health").json()["problem"])
        assert_right(reference, said)
        assert logged_conversations(disk / "cache") == {"tried": said}


def test_a_full_disk_without_a_ledger_is_served_from_the_backup(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        with contextlib.closing(SqliteLedger(disk / "cache")) as ledger:
            ledger.load()
            ledger.apply([PutAgent(agent_of("kept", None))], is_synced=True)
            ledger.back_up()
        (disk / "cache" / "ledger.db").unlink()
        fill_up(disk / "filler")

        with contextlib.closing(SqliteLedger(disk / "cache")) as ledger:
            assert [agent.id for agent in ledger.load().agents] == ["kept"]
            assert "the disk is full" in ledger.problem
            (disk / "filler").unlink()
            ledger.apply([PutAgent(agent_of("new", None))], is_synced=True)
            assert ledger.problem == ""
            assert {agent.id for agent in ledger.load().agents} == {"kept", "new"}


def test_a_ledger_that_is_locked_when_there_is_room_again_is_opened_later(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        with contextlib.closing(SqliteLedger(disk / "cache")) as ledger:
            ledger.load()
            ledger.apply([PutAgent(agent_of("kept", None))], is_synced=True)
        fill_up(disk / "filler")

        with contextlib.closing(SqliteLedger(disk / "cache", timeout_s=0.01)) as ledger:
            ledger.load()
            (disk / "filler").unlink()
            change = PutAgent(agent_of("new", None))
            with contextlib.closing(sqlite3.connect(disk / "cache" / "ledger.db")) as other:
                other.execute("BEGIN EXCLUSIVE")
                with pytest.raises(CachePersistenceError):
                    ledger.apply([change], is_synced=True)
                assert [agent.id for agent in ledger.agents("local")] == ["kept"]
            ledger.apply([change], is_synced=True)
            assert {agent.id for agent in ledger.load().agents} == {"kept", "new"}


def asked(http: httpx.Client, model: str, question: str) -> dict[str, Any]:
    """Ask by every protocol, whole and as a stream; returns what each says of durability."""
    said = [{"role": "user", "content": question}]
    bodies = {
        "/v1/chat/completions": {"messages": said, "max_tokens": 4},
        "/v1/completions": {"prompt": question, "max_tokens": 4},
        "/v1/responses": {"input": question, "max_output_tokens": 4},
        "/v1/messages": {"messages": said, "max_tokens": 4},
        "/v1/agents/tried/generate": {"messages": said, "max_tokens": 4},
    }
    found: dict[str, Any] = {}
    for path, body in bodies.items():
        named = {} if "generate" in path else {"model": model}
        reply = http.post(path, json=body | named).raise_for_status()
        found[path] = reply.json().get("durable")
        stream = http.post(path, json=body | named | {"stream": True}).raise_for_status()
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line[6:7] == "{"]
        told = [event.get("response", event).get("durable") for event in events]
        found[f"{path} streamed"] = next((is_safe for is_safe in told if is_safe is not None), None)
    return found


@pytest.mark.parametrize("durability", ["sync", "write_behind"])
def test_with_sync_durability_every_reply_says_whether_its_turn_is_on_disk(
    durability: str, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        settings = make_settings(tmp_path, cache_dir=disk / "cache", durability=durability)
        with run_server(settings) as running, running.client() as http:
            http.post("/v1/agents", json={"id": "tried"}).raise_for_status()
            promised = True if durability == "sync" else None
            assert set(asked(http, running.model, "Is it safe?").values()) == {promised}
            fill_up(disk / "filler")
            broken = False if durability == "sync" else None
            replies = asked(http, running.model, f"Is it safe still? {'No. ' * 100}")
            assert set(replies.values()) == {broken}
            (disk / "filler").unlink()
            await_that(lambda: set(asked(http, running.model, "And now?").values()) == {promised})


def turn_on(http: httpx.Client, agent: str) -> str:
    """Create an agent with one turn; returns the turn's id."""
    http.post("/v1/agents", json={"id": agent}).raise_for_status()
    asked = {"messages": [{"content": f"Who is {agent}?"}], "max_tokens": 2}
    reply = http.post(f"/v1/agents/{agent}/generate", json=asked).raise_for_status()
    return str(reply.json()["turn_id"])


def change_all(http: httpx.Client, response_id: str, file: bytes) -> dict[str, httpx.Response]:
    """Make every kind of change that is no turn."""
    return {
        "create": http.post("/v1/agents", json={"id": "new"}),
        "update": http.patch("/v1/agents/kept", json={"pin": True, "labels": {"a": "b"}}),
        "fork": http.post("/v1/agents/kept/fork", json={"ids": ["fork-1", "fork-2"]}),
        "rewind": http.post("/v1/agents/back/rewind", json={"turn_id": None}),
        "delete": http.delete("/v1/agents/gone"),
        "import": http.post("/v1/agents/import", params={"id": "copy"}, content=file),
        "forget": http.delete(f"/v1/responses/{response_id}"),
    }


@pytest.mark.parametrize("durability", ["sync", "write_behind"])
def test_with_sync_durability_a_change_that_is_not_on_disk_is_not_confirmed(
    durability: str, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        settings = make_settings(tmp_path, cache_dir=disk / "cache", durability=durability)
        with run_server(settings) as running, running.client() as http:
            kept = turn_on(http, "kept")
            for name in ("back", "gone"):
                turn_on(http, name)
            asked = {"model": running.model, "input": "What is secret?", "max_output_tokens": 2}
            response = http.post("/v1/responses", json=asked).raise_for_status().json()["id"]
            file = http.get("/v1/agents/kept/export").content
            assert running.server.memory.disk is not None
            running.server.memory.disk.flush(60)
            fill_up(disk / "filler")
            answers = change_all(http, response, file)
            codes = {name: answer.status_code for name, answer in answers.items()}
            if durability == "sync":
                assert set(codes.values()) == {503}, codes
                for answer in answers.values():
                    assert answer.json()["error"]["code"] == "not_written"
                    assert "not on disk yet" in answer.json()["error"]["message"]
            else:
                assert max(codes.values()) < 300, codes
            (disk / "filler").unlink()
            await_that(lambda: not http.get("/health").json()["problem"])
        with run_server(settings) as running, running.client() as http:
            # What was made in memory was written when there was room again.
            found = {a["id"]: a for a in http.get("/v1/agents").json()["data"]}
            assert set(found) >= {"new", "kept", "fork-1", "fork-2", "back", "copy"}
            assert "gone" not in found
            settled = found["kept"]["settings"]
            assert (settled["pin"], settled["labels"]) == (True, {"a": "b"})
            assert found["fork-2"]["head"] == kept
            assert (found["back"]["head"], found["copy"]["turns"]) == (None, 1)
            assert http.get(f"/v1/responses/{response}").status_code == 404


@pytest.mark.parametrize("durability", ["sync", "write_behind"])
async def test_an_agent_that_is_created_before_a_model_is_loaded_is_kept(
    durability: str, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path, durability=durability)
    server = bootstrap(settings)  # its device is never started
    transport = httpx.ASGITransport(create_app(server))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.post("/v1/agents", json={"id": "early"})).status_code == 201
    assert server.memory.close(60)
    again = bootstrap(settings)
    assert again.memory.agents.find_agent("local", "early") is not None
    assert again.memory.close(60)


def test_a_disk_that_is_full_while_files_are_evicted(
    tmp_path: Path, reference: RunningServer
) -> None:
    said = begin()
    with small_disk(tmp_path / "disk", "size=1500k") as disk:
        # The budget is reached about when the disk is full.
        settings = make_settings(tmp_path, cache_dir=disk / "cache", disk_budget_mb=1)
        with run_server(settings) as running:
            for number in range(6):
                others = begin()
                talk(running, others, f"{number} " * 2500, agent=f"other-{number}")
                talk(running, said, f"Number {number}?")
            store_of(running).check_integrity()
        assert_right(reference, said)
        resize(disk, "size=4m")
        assert main(["cache", "verify", "--cache-dir", str(disk / "cache")]) == 0


def test_blocks_that_can_no_longer_be_written_are_reported_once(
    kept: tuple[Path, Conversation],
    reference: RunningServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    home, said = kept
    with run_server(make_settings(home)) as running, running.client() as http:
        await_that(lambda: store_of(running).counts.restored > 0)
        with small_disk(home / "cache" / "blocks", "size=1m,ro"):
            for question in ("Can you write?", "Can you still not?"):
                talk(running, said, question)
            await_that(lambda: store_of(running).counts.unwritten > 1)
            assert "Read-only" in http.get("/health").json()["problem"]
    told = [line for line in caplog.messages if "cannot write turns" in line]
    assert len(told) == 1, told
    assert_right(reference, said)
