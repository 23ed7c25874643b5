"""Volatile prompts of a real client: found, repaired by rules, and never repaired without them.

`tests/recordings/claude_code.json` has the requests of one conversation of three turns with Claude
Code 2.1.326 (`claude --bare -p …`, then `--continue`) in time zones with different dates: the last
line of its system prompt shows the date.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.entrypoints.cli.app import main
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

Json = dict[str, Any]
RECORDING = Path(__file__).resolve().parents[1] / "recordings" / "claude_code.json"
RECORDED: list[Json] = json.loads(RECORDING.read_text("utf-8"))
DAYS = [request["body"]["system"][-1]["text"].rpartition(" ")[2] for request in RECORDED]
RULES = 'enable = ["%s"]\n'


@dataclass(frozen=True)
class Turn:
    """An answered request."""

    header: str | None
    text: str
    prompt: int
    reused: int
    reply: int

    @property
    def total(self) -> int:
        return self.prompt + self.reply


class Replayed:
    """The recorded conversation with the replies that the server really gives."""

    def __init__(self) -> None:
        self._replies: list[list[Json]] = []

    def next(self, http: httpx.Client, **more: Any) -> Turn:
        recorded = RECORDED[len(self._replies)]
        given = iter(self._replies)
        messages = [
            {**message, "content": next(given)} if message["role"] == "assistant" else message
            for message in recorded["body"]["messages"]
        ]
        body = {**recorded["body"], "messages": messages, "stream": False, "max_tokens": 6}
        body = {**body, "temperature": 0, "model": "", **more}
        answer = http.post("/v1/messages", json=body, headers=recorded["headers"])
        found = answer.raise_for_status().json()
        self._replies.append(found["content"])
        usage = found["usage"]
        reused = usage["cache_read_input_tokens"]
        computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        text = "".join(block.get("text", "") for block in found["content"])
        header = answer.headers.get("x-prompt-repaired")
        return Turn(header, text, reused + computed, reused, usage["output_tokens"])


@pytest.fixture
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start a server in a home; it stops when another one starts there."""
    chosen: Json = {}
    if getattr(request, "param", "fake") == "torch":
        chosen = {"backend": "torch", "model": str(request.getfixturevalue("tiny_starter_dir"))}
    running: dict[str, ExitStack] = {}

    def start(home: str, rules: str = "") -> RunningServer:
        if home in running:
            running.pop(home).close()
        more: Json = {}
        if rules:
            more["repairs"] = tmp_path / f"{home}.toml"
            more["repairs"].write_text(rules)
        stack = running[home] = ExitStack()
        return stack.enter_context(run_server(make_settings(tmp_path / home, **chosen, **more)))

    yield start
    for stack in running.values():
        stack.close()


def agents_of(running: RunningServer) -> list[str]:
    """The agents, the latest first; lists leave out those with one turn and no name."""
    return [agent.id for agent in running.server.memory.agents.agents("local")]


@pytest.mark.parametrize(
    "serve, rule",
    [("fake", "date-freeze"), ("fake", "date-to-end"), ("torch", "date-to-end")],
    indirect=["serve"],
)
def test_a_repaired_conversation_reuses_everything_and_also_after_a_restart(
    serve: Callable[..., RunningServer], rule: str
) -> None:
    """Its last reply is that of the same prompt computed fresh."""
    replayed, turns, running = Replayed(), [], serve("home", RULES % rule)
    for number in range(len(RECORDED)):
        if number == 2:
            running = serve("home", RULES % rule)
        with running.client() as http:
            turns.append(replayed.next(http))
            (agent,) = agents_of(running)
            why = http.get(f"/v1/agents/{agent}/explain").json()
            logged = http.get(f"/v1/agents/{agent}/turns").json()["data"][0]
            found = http.get(f"/v1/agents/{agent}/volatile").json()
        is_changed = rule == "date-to-end" or DAYS[number] != DAYS[0]
        names = [rule] if is_changed else []
        assert turns[-1].header == (rule if is_changed else None)
        assert why["repairs"] == logged["repairs"] == names
        assert (f"rules changed the prompt: {rule}" in why["summary"]) is is_changed
        assert found["spans"] == []
    # All of the last prompt and its reply but the token that was sampled last.
    for before, after in itertools.pairwise(turns):
        assert after.reused == before.total - 1
    (known,) = running.server.memory.agents.agents("local")
    assert known.num_turns == len(RECORDED)
    last = turns[-1]
    tokens = running.server.memory.agents.tokens(known)[: last.prompt]
    with serve("other").client() as http:
        body = {"prompt": tokens, "max_tokens": 6, "temperature": 0}
        fresh = http.post("/v1/completions", json=body).raise_for_status().json()
    assert fresh["choices"][0]["text"] == last.text


def test_rules_that_are_off_change_nothing(serve: Callable[..., RunningServer]) -> None:
    """Without rules every turn computes what follows the date again, and the report says so."""
    off = '[[rule]]\nname = "x"\nplace = "user"\npattern = "."\naction = "drop"\n'
    seen = []
    for home, rules in (("plain", ""), ("off", off)):
        running, replayed = serve(home, rules), Replayed()
        with running.client() as http:
            turns = [replayed.next(http) for _ in RECORDED]
            report = http.get(f"/v1/agents/{agents_of(running)[0]}/volatile").json()
        agents = running.server.memory.agents
        prompts = [agents.tokens(agent) for agent in agents.agents("local")]
        seen.append((turns, prompts, report["spans"]))
    assert seen[0] == seen[1]
    turns, _, (dates,) = seen[0]
    assert {turn.header for turn in turns} == {None}
    assert dates["kind"] == "date"
    assert (dates["place"], dates["changes"], dates["volatile"]) == ("system", 2, True)
    assert dates["remedy"] == {"rule": "date-freeze", "text": 'enable = ["date-freeze"]'}
    lost = sum(before.total - 1 - after.reused for before, after in itertools.pairwise(turns))
    assert dates["recomputed_tokens"] == lost + 2, (turns, dates)


# -- every protocol, and the command line ---------------------------------------------------------

HEADER = "x-anthropic-billing-header: cc_version=2.1.326.a68; cch=%s;"
SYSTEM = f"{HEADER}\nYou are a coder.\n"
PROTOCOLS: dict[str, Callable[[str], Json]] = {
    "/v1/chat/completions": lambda system: {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}],
        "max_tokens": 4,
    },
    "/v1/responses": lambda system: {"instructions": system, "input": "hi"},
    "/v1/messages": lambda system: {
        "system": f"Be terse.\n{system}",  # as the first line, it is left out in any case
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
    },
    "/api/chat": lambda system: {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}],
        "stream": False,
        "options": {"num_predict": 4},
    },
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("gateway")
    rules = home / "repairs.toml"
    rules.write_text(RULES % "billing-header")
    with run_server(make_settings(home, repairs=rules)) as running:
        yield running


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_of_every_protocol_is_repaired_and_says_so(
    gateway: RunningServer, path: str, is_streamed: bool
) -> None:
    body = {"model": gateway.model, "stream": is_streamed, **PROTOCOLS[path](SYSTEM % "0a1b2")}
    body["stream"] = is_streamed
    with gateway.client() as http:
        answer = http.post(path, json=body).raise_for_status()
        assert answer.headers["x-prompt-repaired"] == "billing-header"
        other = PROTOCOLS[path]("You are a coder.\n")
        plain = http.post(path, json={"model": gateway.model, **other}).raise_for_status()
        assert "x-prompt-repaired" not in plain.headers
    agents = gateway.server.memory.agents
    tokens = {tuple(agents.tokens(agent)) for agent in agents.agents("local")}
    header = tuple(b"x-anthropic-billing-header")
    for known in tokens:
        assert all(known[at : at + len(header)] != header for at in range(len(known)))


def test_the_agent_api_is_repaired(gateway: RunningServer) -> None:
    with gateway.client() as http:
        made = {"id": "coder", "system": SYSTEM % "1"}
        http.post("/v1/agents", json=made).raise_for_status()
        cached = 0
        for number in (2, 3):
            said = {"message": "hi", "max_tokens": 4}
            answer = http.post("/v1/agents/coder/generate", json=said).raise_for_status()
            assert answer.headers["x-prompt-repaired"] == "billing-header"
            cached = answer.json()["usage"]["cached_tokens"]
            changed = {"system": SYSTEM % number}
            http.patch("/v1/agents/coder", json=changed).raise_for_status()
        assert cached > len("You are a coder.")
        counted = [
            http.post("/v1/messages/count_tokens", json=PROTOCOLS["/v1/messages"](system)).json()
            for system in (SYSTEM % "1", "You are a coder.\n")
        ]
    assert counted[0] == counted[1]


def test_an_error_names_a_tool_by_its_place_in_the_request(tmp_path: Path) -> None:
    rules = tmp_path / "repairs.toml"
    rules.write_text(RULES % "sorted-tools")
    form = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}
    forms = [("b", {"type": "object"}), ("c", {"type": "object"}), ("a", form)]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": own, "strict": name == "a"}}
        for name, own in forms
    ]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 4}
    with run_server(make_settings(tmp_path, repairs=rules)) as running, running.client() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tools[2]")


def test_doctor_examines_an_agents_prompts_with_a_server_and_without(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    home = tmp_path / "home"

    def doctor(*arguments: str, status: int = 0) -> str:
        flags = ["--home", str(home), "--backend", "fake", *arguments]
        assert main(["doctor", *flags]) == status
        printed = capfd.readouterr()
        return printed.err if status else printed.out

    assert "no cache in" in doctor("--agent", "coder", "--port", "1", status=2)
    with run_server(make_settings(home)) as running, running.client() as http:
        for day in (16, 17, 18):
            body = PROTOCOLS["/v1/chat/completions"](f"Today's date is 2026-11-{day}.\nBe terse.")
            http.post("/v1/chat/completions", json=body, headers={"x-agent-id": "coder"})
        port = running.url.rpartition(":")[2]
        capfd.readouterr()
        printed = doctor("--agent", "coder", "--port", port, "--json")
        # The server logs to the same output.
        online, _ = json.JSONDecoder().raw_decode(printed, printed.index("{"))
        assert "there is no agent 'x'" in doctor("--agent", "x", "--port", port, status=2)
    capfd.readouterr()  # the server's last lines
    offline = json.loads(doctor("--agent", "coder", "--port", "1", "--json"))
    assert offline == online
    (span,) = online["spans"]
    assert (span["kind"], span["volatile"], span["changes"]) == ("date", True, 2)
    text = doctor("--agent", "coder", "--port", "1")
    assert "date in system: volatile, changed in 2 of 2 comparisons" in text
    assert "- 2026-11-17" in text
    assert "+ 2026-11-18" in text
    assert 'enable = ["date-freeze"]' in text
    assert "0 tenants have an agent 'x'" in doctor("--agent", "x", "--port", "1", status=2)
