"""The commands that speak to a running server."""

import io
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import typer

from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.app import app, main
from semantic.entrypoints.cli.launch import (
    CLIENTS,
    INSTALL,
    PROMPT_TOKENS,
    Target,
    require_context,
)
from tests.smoke.server_process import serve

pytestmark = pytest.mark.integration

Run = Callable[..., str]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("server")
    with serve(place / "home", place / "log", "--backend", "fake") as server:
        yield server.url


@pytest.fixture
def run(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    """Run a command that succeeds, in an empty directory, and return what it printed."""
    monkeypatch.setenv("SEMANTIC_URL", url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, status: int = 0, given: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        assert main(list(arguments)) == status, capfd.readouterr().err
        captured = capfd.readouterr()
        return captured.out if captured.out.strip() else captured.err

    return call


def asked(run: Run, *arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_an_agent_lives_at_the_command_line(run: Run) -> None:
    greedy = ("--max-tokens", "8", "--temperature", "0")
    reply = run("chat", "ann", "-m", "Hello.", *greedy).strip()
    assert reply
    first = asked(run, "agents", "show", "ann")
    assert (first["turns"], first["explanation"]["turn_id"]) == (1, first["head"])
    assert asked(run, "chat", "ann", "-m", "More.", "--max-tokens", "8")["usage"]["cached_tokens"]

    assert run("agents", "fork", "ann", "ben", "cid").split() == ["ben", "cid"]
    assert "is at turn 1" in run("agents", "rewind", "ben")
    assert asked(run, "agents", "show", "ben")["head"] == first["head"]
    assert "before the first" in run("agents", "rewind", "cid", "2")
    assert "cannot rewind 2 turns: ben has 1 turn" in run("agents", "rewind", "ben", "2", status=2)

    run("chat", "ben", "-m", "Another way.", "--max-tokens", "8")
    graph = run("agents", "log", "ann", "--graph")
    assert [line.count(" (ben) Another way.") for line in graph.splitlines()].count(1) == 1
    assert " (ann) More." in graph
    assert len(asked(run, "agents", "log", "ann", "--graph")["turns"]) == 3
    assert "> More." in run("agents", "log", "ann")
    compared = run("agents", "compare", "ann", "ben")
    assert "1 turn in common" in compared
    assert "turn 2\nann\nMore." in compared
    assert "ben\nAnother way." in compared

    assert "of the latest prompt's" in run("agents", "explain", "ann").casefold()
    assert (
        asked(run, "agents", "explain", "ben", "--turn", first["head"])["turn_id"] == first["head"]
    )
    printed = run("agents", "print", "ann").split("\n")
    assert [line for line in printed if line in ("user", "assistant")] == ["user", "assistant"] * 2
    assert [line for line in printed if line in ("Hello.", "More.")] == ["Hello.", "More."]
    assert "Hello." not in run("agents", "print", "ann", "-n", "1")

    assert {"ann", "ben", "cid"} <= {one["id"] for one in asked(run, "agents", "ls")}
    assert asked(run, "agents", "list") == asked(run, "agents", "ls")
    table = run("agents", "ls", "--prefix", "a").splitlines()
    assert [line.split()[0] for line in table] == ["agent", "ann"]


def test_an_agent_is_pinned_and_renamed(run: Run) -> None:
    reply = asked(run, "chat", "kim", "-m", "Hi.", "--max-tokens", "4", "--system", "Be brief.")
    assert run("agents", "pin", "kim") == "kim is pinned\n"
    assert run("agents", "rename", "kim", "lee") == "kim is now lee\n"
    lee = asked(run, "agents", "show", "lee")
    assert (lee["head"], lee["settings"]["pin"]) == (reply["turn_id"], True)
    assert lee["settings"]["system"] == "Be brief."
    assert asked(run, "chat", "lee", "-m", "More.", "--max-tokens", "4")["usage"]["cached_tokens"]
    assert "no agent 'kim'" in run("agents", "show", "kim", status=2)
    assert "already exists" in run("agents", "rename", "lee", "lee", status=2)
    assert run("agents", "pin", "lee", "--off") == "lee is not pinned\n"


def test_a_graph_nests_what_follows_a_turn_with_siblings(run: Run) -> None:
    """Three turns in a line, and a fork of the first: the third is not beside the fork."""
    brief = ("--max-tokens", "2")
    for message in ("one", "two", "three"):
        run("chat", "mia", "-m", message, *brief)
    run("agents", "fork", "mia", "noa")
    run("agents", "rewind", "noa", "2")
    run("chat", "noa", "-m", "other", *brief)
    graph = [line for line in run("agents", "log", "mia", "--graph").splitlines() if "→" in line]
    depth = {line.split(" →")[0].split()[-1]: line.index("─") for line in graph}
    assert list(depth) == ["one", "two", "three", "other"]
    assert depth["one"] < depth["two"] == depth["other"] < depth["three"]


def test_a_graph_nests_what_follows_a_root_that_is_a_head(run: Run) -> None:
    run("chat", "root", "-m", "one", "--max-tokens", "2")
    run("agents", "fork", "root", "fork")
    for message in ("two", "three"):
        run("chat", "fork", "-m", message, "--max-tokens", "2")
    graph = [line for line in run("agents", "log", "root", "--graph").splitlines() if "→" in line]
    depth = {line.split(" →")[0].split()[-1]: line.index("─") for line in graph}
    assert depth["one"] < depth["two"] == depth["three"]


def test_a_conversation_with_commands(run: Run) -> None:
    commands = ("/model", "/model claude-x", "/model gpt?x", "/nonsense", "/help", "/quit")
    given = "\n".join(("Hi.\n\n/fork dora2\nAgain.\n/log\n/rewind\n/explain", *commands, ""))
    said = run("chat", "dora", "--max-tokens", "4", "--system", "Be brief.", given=given)
    for words in (
        "now talking to dora2",
        "Again.",
        "rewound to turn 1",
        "of the latest prompt's",
        "uses the served model",
        "uses claude-x",
        "model 'gpt?x' not found; the server has: fake",
        "unknown command /nonsense",
        "/fork [NAME]",
    ):
        assert words.casefold() in said.casefold()
    dora2 = asked(run, "agents", "show", "dora2")
    assert (dora2["turns"], dora2["settings"]["model"]) == (1, "claude-x")
    words = "already exists with another system prompt"
    assert words in run("chat", "dora", "--system", "Be long.", "-m", "x", status=2)
    assert "needs --message" in run("chat", "dora", "--json", status=2)


def test_a_chat_has_messages_of_several_lines_and_options(run: Run) -> None:
    given = (
        "/set\n/set max_tokens 3\n/set seed x\n/set colour 1\n/system\n/system Be kind.\n"
        '"""first\n  second"""\n"""third"""\nfourth \\\nfifth\n/retry\n/set max_tokens\n/bye\n'
    )
    said = run("chat", "olga", given=given)
    for words in (
        "max_tokens          3",
        "seed needs an integer, not 'x'",
        "unknown option 'colour'",
        "no system prompt",
        "system prompt: Be kind.",
    ):
        assert words in said
    assert said.split("max_tokens")[-1].split()[0] == "default"
    turns = asked(run, "agents", "log", "olga")
    asked_for = [t["messages"][-2]["content"][0]["text"] for t in reversed(turns)]
    assert asked_for == ["first\n  second", "third", "fourth \nfifth"]
    assert all(turn["usage"]["completion_tokens"] <= 3 for turn in turns)
    assert asked(run, "agents", "show", "olga")["settings"]["system"] == "Be kind."
    assert "has no message to send again" in run("chat", "paul", given="/retry\n")


@pytest.mark.parametrize("message", ["", " \n"])
def test_an_empty_message_is_refused(run: Run, message: str) -> None:
    assert "--message is empty" in run("chat", "quinn", "-m", message, status=2)
    assert "no agent 'quinn'" in run("agents", "show", "quinn", status=2)


def test_an_agent_goes_through_a_file(run: Run, tmp_path: Path) -> None:
    run("chat", "eve", "-m", "Remember this.", "--max-tokens", "4")
    (tmp_path / "eve.tar.part").write_text("mine")
    assert run("agents", "export", "eve").startswith("eve.tar: ")
    assert "--force" in run("agents", "export", "eve", status=2)
    assert "state imported" in run("agents", "import", "eve.tar", "--id", "eve2")
    found = asked(run, "agents", "import", "eve.tar", "--id", "eve3", "--messages-only")
    assert found["import_state"] == "recomputed"
    assert run("agents", "rm", "eve2", "eve3", "-y").splitlines() == [
        "deleted eve2",
        "deleted eve3",
    ]
    assert "no agent 'eve2'" in run("agents", "rm", "eve2", "-y", status=2)
    assert "no agent 'gone'" in run("agents", "export", "gone", status=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["eve.tar", "eve.tar.part"]
    assert (tmp_path / "eve.tar.part").read_text() == "mine"


def test_foreign_text_neither_commands_the_terminal_nor_is_markup(run: Run, url: str) -> None:
    hostile = "[/INST] [bold]b[/bold] \x1b[2J\x9b2J\x07"
    settings = {"system": hostile, "labels": {"note": hostile}}
    httpx.post(f"{url}/v1/agents", json={"id": "mallory", **settings}).raise_for_status()
    printed = [
        run("chat", "mallory", "-m", hostile, "--max-tokens", "4"),
        run("chat", "mallory", "--max-tokens", "4", given=f"{hostile}\n/log\n/explain\n/quit\n"),
        run("agents", "show", "mallory"),
        run("agents", "log", "mallory"),
        run("agents", "log", "mallory", "--graph"),
        run("agents", "show", "mallory", "--json"),
        run("chat", "mallory", "-m", hostile, "--json", "--max-tokens", "4"),
        run("models", "swap", f"no/{hostile}", status=2),
        run("top", "--once"),
    ]
    for text in printed:
        assert text.replace("\n", "").isprintable(), ascii(text)
    for text in printed[2:5]:
        assert "[/INST] [bold]b[/bold] [2J2J" in text.replace("\\x1b", "").replace("\\x9b", "")


def test_delete_asks_for_confirmation(run: Run) -> None:
    run("chat", "flo", "-m", "Hi.", "--max-tokens", "2")
    for answer in ("n\n", ""):
        assert "nothing deleted" in run("agents", "rm", "flo", given=answer, status=2)
    assert asked(run, "agents", "show", "flo")["turns"] == 1
    refusal = run("agents", "export", "flo", "flo/x.tar", status=2)
    assert re.search(r"flo/x\.tar\.\w+: No such file", refusal)


def test_models_are_listed_and_swapped(run: Run) -> None:
    listed = {model["id"]: model["state"] for model in asked(run, "models", "ls")}
    assert listed["fake"] == "loaded"
    other = next(name for name in listed if name != "fake")
    assert asked(run, "models", "swap", other)["id"] == other
    assert other in run("models", "ls")
    assert run("models", "swap", "fake", "--drain", "1") == "fake: ready\n"
    assert "nowhere" in run("models", "swap", "nowhere", status=2)


def test_a_model_is_unloaded_until_the_next_request(run: Run) -> None:
    assert "fake-2 is not loaded; fake is" in run("stop", "fake-2", status=2)
    assert run("stop", "fake") == "unloaded fake; the next request loads it again\n"
    assert "no model is loaded" in run("stop", status=2)
    run("chat", "rosa", "-m", "Hi.", "--max-tokens", "2")
    assert asked(run, "ps")["health"]["state"] == "ready"
    assert asked(run, "models", "list")[0]["state"] == "loaded"


def test_a_model_is_fetched_without_a_server(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "home" / "models" / "mine"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    assert run("models", "pull", "mine", "--home", str(tmp_path / "home")) == f"{place}: 2 B\n"
    assert "no model 'nope'" in run("models", "pull", "nope", status=2)


def test_top_shows_budgets_and_agents(run: Run) -> None:
    run("chat", "gus", "-m", "Hi.", "--max-tokens", "2")
    seen = run("top", "--once")
    assert "fake on fake: ready" in seen
    assert "gus" in seen
    assert asked(run, "top")["cache"]["memory"]["budget"] == 4096 * 2**20


# Commands in the order in which they can follow each other, on two agents and an empty cache.
JSON_COMMANDS = {
    "chat": ("jo", "-m", "Hello.", "--max-tokens", "4"),
    "agents ls": (),
    "agents show": ("jo",),
    "agents log": ("jo",),
    "agents explain": ("jo",),
    "agents print": ("jo",),
    "agents pin": ("jo",),
    "agents fork": ("jo", "jo2"),
    "agents compare": ("jo", "jo2"),
    "agents rewind": ("jo2", "1"),
    "agents rename": ("jo2", "jo4"),
    "agents export": ("jo",),
    "agents import": ("jo.tar", "--id", "jo3"),
    "agents rm": ("jo4", "jo3", "-y"),
    "models ls": (),
    "models swap": ("fake",),
    "models recommend": ("--home", "home"),
    "models pull": ("mine", "--home", "home"),
    "models show": ("whole", "--home", "home"),
    "models rm": ("whole", "--home", "home", "-y"),
    "ps": (),
    "stop": (),
    "top": (),
    "bench": ("--tokens", "300", "--rounds", "1"),
    "doctor": ("--home", "home", "--port", "0", "--native", "off"),
    "cache stats": ("--home", "home"),
    "cache verify": ("--home", "home"),
    "cache gc": ("--home", "home"),
    "cache export-key": ("--home", "home"),
    "keys add": ("--home", "home"),
    "keys ls": ("--home", "home"),
    "keys revoke": ("--home", "home"),
}
# A server's log, and another program's screen.
WITHOUT_DATA = {"serve", "shard", "cluster", "launch", "mcp"}


def make_whole_model(directory: Path) -> None:
    directory.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 64, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(bytes(100))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def test_a_model_is_deleted_only_on_request(run: Run, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    make_whole_model(place := tmp_path / "home" / "models" / "whole")
    assert "nothing deleted" in run("models", "rm", "whole", *home, status=2)
    assert "there are: " in run("models", "rm", "other", *home, status=2)
    assert "64" in run("models", "show", "whole", *home)
    assert run("models", "rm", "whole", "-y", *home).startswith("deleted whole: ")
    assert not place.exists()


def test_models_are_recommended_for_this_machine(run: Run, tmp_path: Path) -> None:
    shown = run("models", "recommend", "--home", str(tmp_path))
    assert "qwen3-4b" in shown
    assert "tokens/s" in shown


def test_every_command_that_prints_data_prints_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "home" / "cache" / "blocks").mkdir(parents=True)
    (tmp_path / "home" / "cache" / "semantic-cache").touch()
    model = tmp_path / "home" / "models" / "mine"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    make_whole_model(model.with_name("whole"))
    commands = {*leaves(typer.main.get_command(app))} - WITHOUT_DATA
    # Packs, services and compaction have tests of their own.
    others = ("pack ", "service ", "agents compact")
    commands = {one for one in commands if not one.startswith(others)}
    assert JSON_COMMANDS.keys() == commands
    found: dict[str, Any] = {}
    for name, arguments in JSON_COMMANDS.items():
        more = (found["keys add"]["id"],) if name == "keys revoke" else ()
        found[name] = asked(run, *name.split(), *arguments, *more)
    assert found["agents export"]["file"] == "jo.tar"
    assert found["agents rm"] == {"deleted": ["jo4", "jo3"]}
    assert found["models pull"]["bytes"] == 2
    assert found["models show"]["weights"] == "BF16"
    assert found["models rm"]["freed_bytes"] > 100
    assert not model.with_name("whole").exists()
    assert sum(one["is_best"] for one in found["models recommend"]) <= 1
    assert found["ps"]["health"]["model"] == "fake"
    assert (found["cache stats"]["agents"], found["cache verify"]["bad"]) == (0, [])
    assert found["cache gc"]["deleted_files"] == 0
    assert [key["id"] for key in found["keys ls"]["keys"]] == [found["keys add"]["id"]]
    assert found["keys add"]["key"] not in json.dumps(found["keys ls"])
    assert asked(run, "keys", "list", "--home", "home")["keys"][0]["revoked"] is not None
    assert list(found["bench"]["first_token_s"]) == ["computed", "disk", "memory", "hot"]
    assert 0 <= 300 - found["bench"]["prompt_tokens"] < 10  # tokens of the fake model are bytes
    assert all(seconds > 0 for seconds in found["bench"]["first_token_s"].values())
    assert "tokens/s" in run("bench", *JSON_COMMANDS["bench"])
    assert not [one for one in asked(run, "agents", "ls") if one["id"].startswith("bench-")]


def leaves(command: Any, *path: str) -> Iterator[str]:
    """The names of all commands but aliases."""
    if not hasattr(command, "commands") and not command.hidden:
        yield " ".join(path)
    for name, one in getattr(command, "commands", {}).items():
        yield from leaves(one, *path, name)


def test_doctor_looks_at_everything(run: Run, url: str, tmp_path: Path) -> None:
    port = url.rpartition(":")[2]
    found = asked(run, "doctor", "--home", str(tmp_path), "--port", port, "--native", "off")
    by_name = {one["what"]: one for one in found}
    names = {"Python", "torch", "mlx", "processor", "memory", "disk", "port", "model", "clients"}
    assert names <= by_name.keys()
    assert by_name["port"]["found"].endswith(": fake, ready")
    if (kernels := by_name.get("CPU kernels")) is not None:  # not where mlx runs models
        assert "several times slower: the setting native is off" in kernels["found"]
    assert not [one for one in found if one["level"] == "bad"]


def test_doctor_does_not_advise_a_compiler_where_it_would_not_help(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    found = asked(run, "doctor", "--home", str(tmp_path), "--port", "0", "--backend", "torch")
    (kernels,) = (one for one in found if one["what"] == "CPU kernels")
    assert "there is no variant for riscv64 CPUs" in kernels["found"]
    assert kernels["advice"] == ""


def test_doctor_advises_mlx_for_a_gpu_that_nothing_uses(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(runtime, "has_cuda_build", lambda: False)
    found = asked(run, "doctor", "--home", str(tmp_path), "--port", "0", "--native", "off")
    (gpu,) = (one for one in found if one["what"] == "NVIDIA GPU")
    assert "'semantic-server[cuda]'" in gpu["advice"]


def test_doctor_reports_problems(run: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        run("doctor", "--home", str(tmp_path), "--port", port, "--native", "off", status=1)


def test_every_client_that_can_be_launched_can_be_installed() -> None:
    assert CLIENTS.keys() == INSTALL.keys() == PROMPT_TOKENS.keys()


@pytest.mark.parametrize("client", list(CLIENTS))
def test_a_launched_client_gets_the_servers_address(run: Run, url: str, client: str) -> None:
    plan = run("launch", client, "--dry-run", "--", "-p", "hi")
    assert json.loads(plan)["command"][-2:] == ["-p", "hi"]
    assert url in plan
    assert "fake" in plan


@pytest.mark.parametrize("client", list(CLIENTS))
def test_a_client_whose_prompt_does_not_fit_is_not_launched(client: str) -> None:
    needed = PROMPT_TOKENS[client] + 1_000
    require_context(client, Target("", "", "small", needed), [])
    with pytest.raises(InvalidRequestError) as refused:
        require_context(client, Target("", "", "small", needed - 1), [])
    for words in (f"at least {needed:,} tokens", "semantic models recommend", "--force"):
        assert words in refused.value.message


def test_a_client_that_sends_less_is_launched() -> None:
    small = Target("", "", "smollm2-135m-instruct", 8_192)
    with pytest.raises(InvalidRequestError, match="or send less: semantic launch claude -- --bare"):
        require_context("claude", small, ["-p", "hi"])
    require_context("claude", small, ["--bare", "-p", "hi"])


def test_a_launched_client_gets_files_and_arguments_and_its_exit_status_is_returned(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for `pi`, which prints what it was given."""
    program = tmp_path / "bin" / "pi"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\ncat "$PI_CODING_AGENT_DIR/models.json"\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    printed = run("launch", "pi", "--key", "secret", "--", "-p", "hi", status=7)
    said, config = printed.splitlines()
    assert said.startswith("--provider semantic --model fake --session-dir ")
    assert said.endswith("/.pi/agent/sessions -p hi")  # its own, where --continue finds sessions
    (model,) = json.loads(config)["providers"]["semantic"]["models"]
    assert (model["contextWindow"], model["maxTokens"]) == (131_072, 32_768)
    assert json.loads(config)["providers"]["semantic"]["apiKey"] == "secret"


def test_commands_report_missing_clients_servers_and_wrong_arguments_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "unknown client 'vi'" in run("launch", "vi", status=2)
    monkeypatch.setenv("PATH", "")
    assert "is not installed: npm install" in run("launch", "codex", status=2)
    words = "no server answers at http://127.0.0.1:1; start one with `semantic serve`"
    for command in (["agents", "ls"], ["top"], ["chat", "-m", "x"], ["bench"], ["launch", "pi"]):
        message = run(*command, "--server", "http://127.0.0.1:1/v1", status=2)
        assert words in message
        assert message.count("\n") == 1
    for given in (["a/b"], [""], [".."]):
        assert "an agent id must be 1 to 128" in run("agents", "show", *given, status=2)
        assert "an agent id must be 1 to 128" in run("agents", "rm", "-y", *given, status=2)
        assert "an agent id must be 1 to 128" in run("chat", "-m", "x", *given, status=2)
    assert "--key: a key consists of" in run("agents", "ls", "--key", "naïve", status=2)
    for address in ("http://127.0.0.1:many", "ftp://127.0.0.1", "http://[::1"):
        assert "is not an address" in run("agents", "ls", "--server", address, status=2)


def test_an_address_may_be_typed_without_http(run: Run, url: str) -> None:
    assert "fake" in run("models", "ls", "--server", url.removeprefix("http://"))
    wrong = run("models", "ls", "--server", url.replace("http:", "https:"), status=2)
    assert "does not use HTTPS" in wrong


@pytest.mark.parametrize(
    "env,sent",
    [
        ({"SEMANTIC_CLIENT_KEY": "mine", "SEMANTIC_API_KEY": "the server's"}, "mine"),
        ({"SEMANTIC_API_KEY": "the server's"}, "the server's"),
        ({}, "none"),
    ],
    ids=["client", "server", "neither"],
)
def test_a_client_has_a_key_of_its_own(
    run: Run, env: dict[str, str], sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert json.loads(run("launch", "qwen", "--dry-run"))["env"]["OPENAI_API_KEY"] == sent
