"""Compaction over HTTP: a summary on the warm cache, and a branch that is computed beforehand."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from semantic.adapters.inbound.responses.items import encode_summary
from semantic.application.requests.compaction.clients import CLIENTS, ClientCompaction
from semantic.domain.chat import ChatRequest, Message, Role, ToolUsePart
from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.unit.application.device_rig import hold
from tests.waiting import await_that

pytestmark = pytest.mark.integration

TOPICS = ("foxes", "hens", "rivers", "bread")
TEXT = "Tell me in one sentence what matters about {}. Facts only, please, and keep it short."
SAMPLED = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
# The fake model ends its replies by chance, and more often at a high temperature.
SUMMARY: dict[str, dict[str, Any]] = {
    "fake": {"temperature": 4, "seed": 5, "max_tokens": 4096},
    "torch": {"temperature": 0, "max_tokens": 400, "instructions": "Summarise in one sentence."},
}


@pytest.fixture(scope="module", params=["fake", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def home(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if backend == "torch":
        starter: Path = request.getfixturevalue("starter_home")
        for part in ("models", "native"):
            (tmp_path / part).symlink_to(starter / part)
    return tmp_path


def ask(http: httpx.Client, agent: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"message": text, **SAMPLED, **more}
    return dict(http.post(f"/v1/agents/{agent}/generate", json=body).raise_for_status().json())


def talk(http: httpx.Client, name: str, **settings: Any) -> dict[str, Any]:
    """Make an agent that has had a turn about each topic."""
    body = {"id": name, "system": "You are a careful writer. " * 12, **settings}
    http.post("/v1/agents", json=body).raise_for_status()
    for topic in TOPICS:
        ask(http, name, TEXT.format(topic))
    return shown(http, name)


def shown(http: httpx.Client, name: str) -> dict[str, Any]:
    found = http.get(f"/v1/agents/{name}").raise_for_status().json()
    return {key: found[key] for key in ("head", "turns", "tokens", "history", "settings")}


def compact(http: httpx.Client, name: str, backend: str = "fake", **body: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/agents/{name}/compact", json=SUMMARY[backend] | body)
    return dict(answer.raise_for_status().json())


def messages_of(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    """The whole conversation of an agent whose latest turn begins anew."""
    (turn,) = http.get(f"/v1/agents/{name}/turns", params={"limit": 1}).json()["data"]
    assert turn["starts_anew"]
    return [
        {"role": said["role"], "content": "".join(part["text"] for part in said["content"])}
        for said in turn["messages"]
    ]


def fresh_reply(http: httpx.Client, messages: list[dict[str, Any]]) -> str:
    """The reply to a conversation of which nothing is cached: tenants share no blocks."""
    body = {"model": "", "messages": messages, **SAMPLED}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return str(answer["choices"][0]["message"]["content"])


def test_the_branch_replies_as_if_computed_fresh(backend: str, home: Path) -> None:
    keys = give_keys(home, "ann", "bob")
    ann, bob = ({"authorization": f"Bearer {keys[name]}"} for name in ("ann", "bob"))
    settings = make_settings(home, backend=backend)
    with run_server(settings) as running, running.client(headers=ann) as http:
        before = talk(http, "writer")
        made = compact(http, "writer", backend, id="short", keep_turns=1)

        assert shown(http, "writer") == before
        assert made["parent"] == "writer"
        assert (made["summarised_messages"], made["kept_messages"]) == (6, 2)
        assert made["tokens_before"] == before["tokens"]
        assert made["tokens_after"] == made["agent"]["tokens"]
        # The summary is written on the conversation's own KV cache.
        assert made["reuse"]["computed"] < made["usage"]["prompt_tokens"] / 2
        branch = shown(http, "short")
        assert (branch["turns"], branch["history"][1:]) == (before["turns"] + 1, before["history"])
        said = messages_of(http, "short")
        assert [one["role"] for one in said] == ["system", "user", "user", "assistant"]
        assert said[1]["content"].endswith(made["summary"])
        why = http.get("/v1/agents/short/explain").json()
        assert "A summary replaced 6 of the oldest messages" in why["summary"]
        reply = ask(http, "short", "Go on.")
        assert reply["reuse"]["hot"] + reply["reuse"]["pool"] >= made["tokens_after"] - 1
        said.append({"role": "user", "content": "Go on."})
        with running.client(headers=bob) as other:
            assert reply["text"] == fresh_reply(other, said)


def test_a_branch_is_not_computed_again_after_a_restart(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        before = talk(http, "writer")
        made = compact(http, "writer", id="short", keep_turns=2)
        http.post("/v1/agents/short/fork", json={"ids": ["other"]}).raise_for_status()
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        reply = ask(http, "short", "Go on.")
        assert reply["reuse"]["computed"] <= reply["usage"]["prompt_tokens"] - made["tokens_after"]
        assert shown(http, "writer") == before
        http.post("/v1/agents/other/evict", json={"to": "cold"}).raise_for_status()
        computed = ask(http, "other", "Go on.")
        assert computed["text"] == reply["text"]


# -- refusals -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server(make_settings(tmp_path_factory.mktemp("home"))) as running:
        yield running


@pytest.fixture(scope="module")
def talker(running: RunningServer) -> dict[str, Any]:
    with running.client() as http:
        return talk(http, "talker")


@pytest.mark.parametrize(
    "name, body, status, param, message",
    [
        ("talker", {"keep_turns": 4}, 400, "keep_turns", "too short to compact: it has 4 replies"),
        ("talker", {"max_tokens": 3}, 400, "max_tokens", "cut off after 3 tokens"),
        ("talker", {"id": "talker"}, 409, "id", "already exists"),
        ("talker", {"keep": 1}, 400, "keep", "unknown field"),
        ("nobody", {}, 404, None, "no agent 'nobody'"),
    ],
)
def test_a_refusal_names_its_reason_and_changes_nothing(
    running: RunningServer,
    talker: dict[str, Any],
    name: str,
    body: dict[str, Any],
    status: int,
    param: str | None,
    message: str,
) -> None:
    with running.client() as http:
        answer = http.post(f"/v1/agents/{name}/compact", json=SUMMARY["fake"] | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param)
        assert message in error["message"]
        assert shown(http, "talker") == talker
        assert http.get("/v1/agents", params={"prefix": "talker-"}).json()["data"] == []


def test_an_agent_that_changes_meanwhile_is_not_compacted(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        before = talk(http, "a")
        may_go_on = hold(running.server.device)
        with ThreadPoolExecutor() as threads:
            body = SUMMARY["fake"] | {"id": "b"}
            pending = threads.submit(http.post, "/v1/agents/a/compact", json=body)
            await_that(lambda: running.server.device.num_live)
            http.post("/v1/agents/a/rewind", json={"turn_id": before["history"][1]})
            may_go_on.set()
            answer = pending.result()
        assert answer.status_code == 409
        assert http.get("/v1/agents/b").status_code == 404
        assert ask(http, "a", "Still there?")["text"]


# -- Responses ------------------------------------------------------------------------------------


@pytest.fixture
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_response_is_compacted_and_continued(
    running: RunningServer, client: openai.OpenAI
) -> None:
    given: Any = {"model": "fake", "instructions": "You are a careful writer. " * 12}
    first = client.responses.create(
        input=TEXT.format("foxes"), max_output_tokens=16, temperature=0, **given
    )
    extra = {"temperature": 4, "seed": 5, "max_output_tokens": 4096}
    made = client.responses.compact(
        previous_response_id=first.id, input=TEXT.format("hens"), extra_body=extra, **given
    )
    assert (made.object, made.id[:5]) == ("response.compaction", "resp_")
    *users, item = made.output
    assert [user.content[0].text for user in users] == [  # type: ignore[union-attr,index]
        TEXT.format("foxes"),
        TEXT.format("hens"),
    ]
    assert (item.type, item.id[:4]) == ("compaction", "cmp_")  # type: ignore[index]
    assert made.usage.input_tokens_details.cached_tokens > 300
    await_that(lambda: not running.server.inference.num_background)
    kept: Any = made.to_dict(warnings=False)["output"]
    told: Any = [*kept, {"role": "user", "content": "Go on."}]
    after = client.responses.create(input=told, max_output_tokens=16, temperature=0, **given)
    assert after.usage is not None
    # All but the new message was computed while the client was not waiting.
    new = after.usage.input_tokens - after.usage.input_tokens_details.cached_tokens
    assert new < 40
    again = client.responses.compact(input=told, extra_body=extra, **given)
    assert [one.type for one in again.output] == ["message", "message", "message", "compaction"]


@pytest.mark.parametrize("content", ["x", encode_summary("a")[2:], ""])
def test_a_foreign_compaction_item_is_refused(client: openai.OpenAI, content: str) -> None:
    item: Any = {"type": "compaction", "encrypted_content": content}
    with pytest.raises(openai.BadRequestError, match="did not write") as caught:
        client.responses.create(model="fake", input=[item])
    assert caught.value.param == "input[0].encrypted_content"


# -- clients that compact by themselves, as they were recorded ------------------------------------

READ = {"name": "Read", "description": "Reads a file. " * 20, "input_schema": {"type": "object"}}
END = [" "]  # ends the replies of the fake model


def cached(usage: dict[str, Any]) -> tuple[int, int]:
    """Reused and computed tokens of a prompt."""
    if "input_tokens_details" in usage:
        reused = usage["input_tokens_details"]["cached_tokens"]
        return reused, usage["input_tokens"] - reused
    computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    return usage["cache_read_input_tokens"], computed


@pytest.mark.parametrize("keeps_reply", [False, True])
def test_claude_code_compacts_on_its_cache_and_continues_from_a_computed_prompt(
    running: RunningServer, keeps_reply: bool
) -> None:
    system = [{"type": "text", "text": "You are an agent. " * 30}]
    head: dict[str, Any] = {
        "max_tokens": 3000,
        "stop_sequences": END,
        "system": system,
        "tools": [READ],
    }
    head |= {"metadata": {"user_id": json.dumps({"session_id": "claude-1"})}}
    head |= {"temperature": 0}  # a random summary may be empty, and an empty one is none

    def send(messages: list[Any]) -> tuple[str, tuple[int, int]]:
        answer = http.post("/v1/messages", json=head | {"messages": messages})
        body = answer.raise_for_status().json()
        return "".join(part["text"] for part in body["content"]), cached(body["usage"])

    with running.client() as http:
        reminder = {"type": "text", "text": "<system-reminder>\nBe kind.\n</system-reminder>\n"}
        question = {"type": "text", "text": "What is the capital of France? " * 20}
        place = {"role": "system", "content": "# Environment\nA git repository."}
        talk: list[Any] = [{"role": "user", "content": [reminder, question]}, place]
        text, _ = send(talk)
        marker = "Your task is to create a detailed summary of the conversation so far"
        order = f"CRITICAL: Respond with TEXT ONLY.\n\n{marker}, paying close attention."
        talk += [{"role": "assistant", "content": text or "x"}, {"role": "user", "content": order}]
        summary, (reused, computed) = send(talk)
        assert computed < 300
        assert reused > 1000
        await_that(lambda: not running.server.inference.num_background)
        opening = CLIENTS[0].opening.format(tools="")
        written = f"{opening}{summary.strip()}\n\nIf you need specific details, read /tmp/x."
        told = {"type": "text", "text": written}
        user = {"role": "user", "content": [reminder, told]}
        later = [user, place]
        if keeps_reply:
            reply = {"role": "assistant", "content": "Paris."}
            later = [
                {"role": "user", "content": [told]},
                reply,
                {"role": "user", "content": "And?"},
            ]
        _, (reused, computed) = send(later)
        assert reused > len(opening) + 500
        assert computed < 100  # what follows the summary


def test_codex_continues_from_a_computed_prompt_with_its_tools(running: RunningServer) -> None:
    tool = {"type": "function", "name": "shell", "description": "Runs. " * 40, "parameters": {}}
    head: dict[str, Any] = {
        "instructions": "You are a coding agent. " * 30,
        "prompt_cache_key": "codex-1",
    }
    head |= {"stop": END, "max_output_tokens": 3000, "store": False}
    # The same replies in every run: a random one may be empty, and an empty summary is none.
    head |= {"temperature": 4, "seed": 5}

    def said(text: str, role: str = "user") -> dict[str, Any]:
        return {"type": "message", "role": role, "content": text}

    def send(items: list[Any], tools: list[Any]) -> tuple[str, tuple[int, int]]:
        answer = http.post("/v1/responses", json=head | {"input": items, "tools": tools})
        body = answer.raise_for_status().json()
        texts = [part["text"] for item in body["output"] for part in item["content"]]
        return "".join(texts), cached(body["usage"])

    context = [said("<permissions>all</permissions>", "developer"), said("<environment_context>")]
    first, second = said("What is the capital of France?"), said("And of Italy?")
    with running.client() as http:
        text, _ = send([*context, first], [tool])
        order = said(f"{CLIENTS[1].marker} Create a handoff summary for another LLM.")
        summary, _ = send([*context, first, said(text or "x", "assistant"), order], [])
        await_that(lambda: not running.server.inference.num_background)
        told = said(CLIENTS[1].opening + summary)
        _, (reused, computed) = send([*context, first, told, second], [tool])
        assert computed < 60  # the user's new message
        assert reused > 1000


@pytest.mark.parametrize("client", CLIENTS, ids=["claude", "codex"])
def test_what_a_client_sends_next_follows_its_recording(client: ClientCompaction) -> None:
    def user(text: str) -> Message:
        return Message.of(Role.USER, text)

    used = [Message(Role.ASSISTANT, (ToolUsePart(n, n, {}),)) for n in ("Read", "Bash", "Read")]
    system, context = Message.of(Role.SYSTEM, "s"), user("<environment_context>")
    asked = (system, user("one"), context, user("two"), *used, user(client.marker))
    reply = Message.of(Role.ASSISTANT, "<analysis>no</analysis>\n\n<summary>\nyes\n</summary>")
    (expected,) = client.expected(ChatRequest("", asked), reply)
    told = [[message.text for message in one.messages] for one in expected]
    if client.keeps_users:
        kept = ["s", "one", "<environment_context>", "two", client.opening + reply.text]
        assert all(texts[:-1] == kept for texts in told)
    else:
        begun = client.opening.format(tools="Bash, Read") + "Summary:\nyes\n"
        assert all(texts[0] == "s" and texts[1].startswith(begun) for texts in told)
    assert len({texts[-1] for texts in told}) == len(told)
    assert client.expected(ChatRequest("", asked), Message.of(Role.ASSISTANT, "")) == []
