"""Prompts computed while tools run: in every protocol, on the fake model and on torch."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from semantic.ports.telemetry import EngineCounts
from tests.http_server import RunningServer, make_settings, run_server
from tests.waiting import await_that

pytestmark = pytest.mark.integration

SCHEMA: Any = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["a.txt"]}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
RESULT = "It rains, and it rains a lot. " * 12
EPHEMERAL = {"X-Agent-Ephemeral": "true"}
CHANGED = RESULT[:100] + "Now the sun shines."


@dataclass
class Answer:
    """A reply: its text, its calls' ids, and its tokens."""

    text: str
    calls: list[str]
    num_prompt: int
    num_cached: int
    num_reply: int


class Chat:
    """A client of Chat Completions."""

    path = "/v1/chat/completions"
    tools: ClassVar[Any] = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    forced: ClassVar[Any] = {"type": "function", "function": {"name": "read"}}
    free: ClassVar[Any] = "none"

    def __init__(self, http: httpx.Client, name: str, **headers: str) -> None:
        self._http, self._headers = http, headers
        self.history: list[Any] = [{"role": "user", "content": f"{name}: what does the file say?"}]

    def post(self, *, is_call: bool, **more: Any) -> Any:
        body = {
            "model": "claude",
            "temperature": 0,
            "tools": self.tools,
            "tool_choice": self.forced if is_call else self.free,
            **more,
        }
        answer = self._http.post(self.path, json=body, headers=self._headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, *, is_call: bool) -> Answer:
        reply = self.post(is_call=is_call, messages=self.history, max_tokens=100 if is_call else 16)
        message = reply["choices"][0]["message"]
        self.history.append(message)
        calls = [call["id"] for call in message.get("tool_calls") or ()]
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(
            message["content"] or "",
            calls,
            usage["prompt_tokens"],
            cached,
            usage["completion_tokens"],
        )

    def tell(self, answer: Answer, text: str) -> None:
        for call in answer.calls:
            self.history.append({"role": "tool", "tool_call_id": call, "content": text})


class Messages(Chat):
    """A client of Anthropic's Messages."""

    path = "/v1/messages"
    tools: ClassVar[Any] = [
        {"name": "read", "description": "Reads a file.", "input_schema": SCHEMA, "strict": True}
    ]
    forced: ClassVar[Any] = {"type": "tool", "name": "read"}
    free: ClassVar[Any] = {"type": "none"}

    def ask(self, *, is_call: bool) -> Answer:
        reply = self.post(is_call=is_call, messages=self.history, max_tokens=100 if is_call else 16)
        self.history.append({"role": "assistant", "content": reply["content"]})
        calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
        text = "".join(block.get("text", "") for block in reply["content"])
        usage = reply["usage"]
        cached = usage["cache_read_input_tokens"]
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        num_prompt = sum(usage[part] for part in parts)
        return Answer(text, calls, num_prompt, cached, usage["output_tokens"])

    def tell(self, answer: Answer, text: str) -> None:
        results = [{"type": "tool_result", "tool_use_id": c, "content": text} for c in answer.calls]
        self.history.append({"role": "user", "content": results})


class Responses(Chat):
    """A client of Responses that refers to the previous response."""

    path = "/v1/responses"
    tools: ClassVar[Any] = [{"type": "function", **FUNCTION, "strict": True}]
    forced: ClassVar[Any] = {"type": "function", "name": "read"}
    before: str | None = None

    def ask(self, *, is_call: bool) -> Answer:
        limit = 100 if is_call else 16
        reply = self.post(
            is_call=is_call,
            input=self.history,
            previous_response_id=self.before,
            max_output_tokens=limit,
        )
        self.before, self.history = reply["id"], []
        calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
        contents = [item.get("content") or () for item in reply["output"]]
        text = "".join(part["text"] for content in contents for part in content)
        usage = reply["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Answer(text, calls, usage["input_tokens"], cached, usage["output_tokens"])

    def tell(self, answer: Answer, text: str) -> None:
        self.history += [
            {"type": "function_call_output", "call_id": call, "output": text}
            for call in answer.calls
        ]


PROTOCOLS = (Chat, Messages, Responses)


@pytest.fixture(scope="module", params=["fake", "torch"])
def running(
    request: pytest.FixtureRequest, tiny_starter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    model = "fake" if request.param == "fake" else str(tiny_starter_dir)
    given = {"backend": request.param, "model": model}
    with run_server(make_settings(tmp_path_factory.mktemp("home"), **given)) as made:
        yield made


def counts(running: RunningServer) -> EngineCounts:
    return running.server.metrics.counts.engine


def converse(
    client: Chat, result: str, pause: Callable[[int], None] = lambda _: None
) -> list[Answer]:
    """Two turns that read the same file, and the answer; `pause` is called with their numbers."""
    answers = [client.ask(is_call=True)]
    for number, text in enumerate((RESULT, result)):
        pause(number)
        client.tell(answers[-1], text)
        answers.append(client.ask(is_call=number == 0))
    return answers


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("result", [RESULT, CHANGED], ids=["same", "changed"])
def test_a_turn_after_a_tool_is_computed_while_the_tool_runs(
    running: RunningServer, protocol: type[Chat], result: str
) -> None:
    name = f"{protocol.__name__}-{len(result)}"
    now = counts(running)
    before = replace(now)
    with running.client() as http:
        # Every turn fresh: these requests leave nothing behind, and nothing is computed ahead.
        fresh = converse(Chat(http, name, **EPHEMERAL), result)
        whole = fresh if result == RESULT else converse(Chat(http, name, **EPHEMERAL), RESULT)
        assert now.ahead_tokens == before.ahead_tokens
        # After the first call the header is certain, after the second one the result is predicted.
        num_certain = fresh[1].num_prompt + fresh[1].num_reply - 1
        least = [before.ahead_tokens + 1, whole[2].num_prompt - 1 - num_certain]

        def pause(number: int) -> None:
            await_that(lambda: now.ahead_tokens >= least[number])
            least[1] += now.ahead_tokens

        headers = {} if protocol is Responses else {"X-Agent-ID": name}
        answers = converse(protocol(http, name, **headers), result, pause)
        if protocol is not Responses:
            explained = http.get(f"/v1/agents/{name}/explain").json()["summary"]
            assert "while the agent's tools ran" in explained
    assert [a.text for a in answers] == [a.text for a in fresh]
    assert [a.num_prompt for a in answers] == [a.num_prompt for a in fresh]
    gained = [
        turn.num_cached - (last.num_prompt + last.num_reply - 1)
        for last, turn in itertools.pairwise(answers)
    ]
    assert gained[0] > 0
    assert gained[1] > (100 if running.server.backend_name == "fake" else 20)
    num_ahead = now.ahead_tokens - before.ahead_tokens
    assert now.used_ahead_tokens - before.used_ahead_tokens == sum(gained)
    assert now.wasted_ahead_tokens - before.wasted_ahead_tokens == num_ahead - sum(gained)
    if result == RESULT:
        assert answers[2].num_cached == answers[2].num_prompt - 1
        assert num_ahead == sum(gained)
    else:
        assert num_ahead > sum(gained)


def test_ephemeral_requests_start_none_and_metrics_show_the_rest(running: RunningServer) -> None:
    now, found = counts(running), [counts(running).ahead_tokens]
    with running.client() as http:
        for name in ("first", "other"):
            Chat(http, name, **EPHEMERAL).ask(is_call=True)
            # What follows this call is computed, and nothing else.
            Chat(http, name).ask(is_call=True)
            await_that(lambda: now.ahead_tokens > found[-1])
            found.append(now.ahead_tokens)
        shown = http.get("/metrics").text
    assert found[1] - found[0] == found[2] - found[1]
    assert f"semantic_tokens_ahead_total {now.ahead_tokens:.1f}" in shown
    assert f"semantic_tokens_ahead_used_total {now.used_ahead_tokens:.1f}" in shown
    assert f"semantic_tokens_ahead_wasted_total {now.wasted_ahead_tokens:.1f}" in shown
