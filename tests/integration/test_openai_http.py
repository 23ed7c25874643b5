"""The OpenAI endpoints over a socket, on the fake backend."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from semantic.adapters.inbound.openai.requests import ChatCompletionRequest
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = make_settings(
        tmp_path_factory.mktemp("home"), max_body_mb=0.1, default_max_tokens=20
    )
    with run_server(settings) as server:
        yield server


@pytest.fixture
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{running.url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


def body(**changes: Any) -> dict[str, Any]:
    base = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    return {**base, **changes}


def post(running: RunningServer, payload: Any, **headers: str) -> httpx.Response:
    with running.client() as http:
        headers = {"content-type": "application/json", **headers}
        return http.post("/v1/chat/completions", content=json.dumps(payload), headers=headers)


def test_whole_and_streamed_replies_agree(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(
        model="fake", messages=messages, temperature=0, max_tokens=12
    )
    stream = client.chat.completions.create(
        model="fake",
        messages=messages,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    # The stream came second and found everything but the last token computed.
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(model="fake", messages=messages, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_seed_and_logprobs(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]
    replies = [
        client.chat.completions.create(
            model="fake", messages=messages, seed=7, logprobs=True, top_logprobs=3, max_tokens=6
        )
        for _ in range(2)
    ]
    first, second = (r.choices[0] for r in replies)
    assert first.message.content == second.message.content
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    scored = first.logprobs.content
    assert "".join(token.token for token in scored) == first.message.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in scored)


def test_stop_strings_are_not_shown(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "stop me"}]
    free = client.chat.completions.create(
        model="fake",
        messages=messages,
        temperature=0,
        max_tokens=20,
        extra_body={"ignore_eos": True},
    )
    text = free.choices[0].message.content or ""
    stopped = client.chat.completions.create(
        model="fake",
        messages=messages,
        temperature=0,
        max_tokens=20,
        stop=text[5:8],
        extra_body={"ignore_eos": True},
    )
    assert stopped.choices[0].message.content == text[: text.index(text[5:8])]
    assert stopped.choices[0].finish_reason == "stop"


def test_models(client: openai.OpenAI, running: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("gpt-9")
    with running.client() as http:
        assert http.get("/v1/models").json()["data"][0]["max_context"] > 0


def test_health(running: RunningServer) -> None:
    with running.client() as http:
        for path in ("/health", "/health/live", "/health/ready", "/health/startup"):
            answer = http.get(path)
            assert answer.status_code == 200
            assert answer.json()["state"] == "ready"
            probe = http.head(path)
            assert (probe.status_code, probe.content) == (200, b"")
            assert probe.headers["content-length"] == answer.headers["content-length"]


MANY_WORDS = {f"word {index}": 1 for index in range(1025)}
BAD_REQUESTS: list[tuple[str, Any, int, str | None, str]] = [
    ("unknown model", body(model="gpt-9"), 404, "model", "fake"),
    ("empty messages", body(messages=[]), 400, "messages", "at least 1"),
    ("no messages", {"model": "fake"}, 400, "messages", "required"),
    ("messages of a wrong type", body(messages="hi"), 400, "messages", "list"),
    (
        "an unknown role",
        body(messages=[{"role": "king", "content": "x"}]),
        400,
        "messages[0].role",
        "'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
    ("no content", body(messages=[{"role": "user"}]), 400, "messages[0].content", "required"),
    ("temperature of a wrong type", body(temperature="hot"), 400, "temperature", "number"),
    ("temperature out of range", body(temperature=-1), 400, "temperature", "between"),
    ("top_p out of range", body(top_p=2), 400, "top_p", "between"),
    ("max_tokens of zero", body(max_tokens=0), 400, "max_tokens", "at least 1"),
    ("max_tokens below", body(max_tokens=-2), 400, "max_tokens", "greater than or equal to -1"),
    (
        "max_completion_tokens of zero",
        body(max_completion_tokens=0),
        400,
        "max_completion_tokens",
        "at least 1",
    ),
    ("too many logprobs", body(logprobs=True, top_logprobs=99), 400, "top_logprobs", "20"),
    ("an empty stop string", body(stop=""), 400, "stop", "empty"),
    ("no reply", body(n=0), 400, "n", "greater than or equal to 1"),
    ("too many replies", body(n=129), 400, "n", "less than or equal to 128"),
    (
        "too many biases",
        body(logit_bias=dict.fromkeys(range(1025), 1)),
        400,
        "logit_bias",
        "at most 1024",
    ),
    ("a bias for a word", body(logit_bias={"word": 1}), 400, "logit_bias", "integer"),
    ("too many biases for words", body(logit_bias=MANY_WORDS), 400, "logit_bias", "at most 1024"),
    ("too many stop tokens", body(stop_token_ids=[7] * 1025), 400, "stop_token_ids", "1024"),
    ("too many stop strings", body(stop=["x"] * 17), 400, "stop", "at most 16"),
    ("far too many stop strings", body(stop=[5] * 1025), 400, "stop", "at most 1024"),
    ("too many tools", body(tools=[5] * 1025), 400, "tools", "at most 1024"),
    (
        "too many parts",
        body(messages=[{"role": "user", "content": [5] * 5000}, {"content": [5] * 5001}]),
        400,
        "messages",
        "at most 10000 parts",
    ),
    ("an overlong session", body(session_id="x" * 513), 400, "session_id", "512"),
    (
        "half a surrogate pair",
        body(messages=[{"role": "user", "content": "\ud800"}]),
        400,
        "messages",
        "surrogate",
    ),
    (
        "an unknown part",
        body(messages=[{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]),
        400,
        "messages[0].content[0].type",
        "'text', 'image_url' or 'refusal'",
    ),
    (
        "a part without its text",
        body(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        400,
        "messages[0].content[0].text",
        "required",
    ),
    (
        "a part that is none, after a good one",
        body(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, 5]}]),
        400,
        "messages[0].content[1]",
        "object",
    ),
    ("a stop of a wrong type", body(stop=["x", 1]), 400, "stop[1]", "string"),
    (
        "an image",
        body(
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}
            ]
        ),
        400,
        "messages[0].content[0]",
        "images",
    ),
    ("a body that is no object", [1, 2], 400, None, "object"),
]


@pytest.mark.parametrize(
    "payload,status,param,words",
    [case[1:] for case in BAD_REQUESTS],
    ids=[c[0] for c in BAD_REQUESTS],
)
def test_bad_requests_name_the_field(
    running: RunningServer, payload: Any, status: int, param: str | None, words: str
) -> None:
    answer = post(running, payload)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


@pytest.mark.parametrize(
    "field,value",
    [
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("max_tokens", 3.0),
        ("temperature", "1"),
        ("temperature", True),
        ("stream", "yes"),
        ("stream", 1),
        ("ignore_eos", "true"),
        ("n", "1"),
        ("seed", "7"),
        ("logit_bias", {"5": "1"}),
    ],
)
def test_types_are_not_coerced(running: RunningServer, field: str, value: Any) -> None:
    answer = post(running, body(**{field: value}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_json_types_are_accepted(running: RunningServer) -> None:
    given = body(temperature=1, top_p=1.0, seed=7, n=1, stop_token_ids=[5], logit_bias={"123": -1})
    assert post(running, given).status_code == 200


def test_null_is_accepted_wherever_a_field_may_be_left_out(running: RunningServer) -> None:
    fields = ChatCompletionRequest.model_fields.items()
    nulls = {name: None for name, field in fields if not field.is_required()}
    assert {"ignore_eos", "stream", "logit_bias", "stop", "tools"} < nulls.keys()
    assert post(running, body(**nulls)).status_code == 200
    usage = post(running, body(stream=True, stream_options={"include_usage": None}))
    assert usage.status_code == 200


def test_too_many_messages_are_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}] * 10_001
    with run_server(make_settings(tmp_path)) as running:
        answer = post(running, body(messages=messages))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert "at most 10000" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "payload,status",
    [
        (body(stop=["\ud800"]), 200),
        (body(session_id="\ud800"), 400),
        (body(model="\ud800"), 404),
        (body(messages=[{"role": "\ud800", "content": "x"}]), 400),
        (body(messages=[{"role": "user", "content": [{"type": "\ud800"}]}]), 400),
        (body(logit_bias={"\ud800": 1}), 400),
        (body(**{"\ud800": 1}), 200),
    ],
)
def test_half_a_surrogate_pair_is_nowhere_a_defect(
    running: RunningServer, payload: Any, status: int
) -> None:
    assert post(running, payload).status_code == status


@pytest.mark.parametrize("agent_id", ["", "x" * 129, "a b", "a/b", b"\xed\xa0\x80"])
def test_an_agent_id_is_checked(running: RunningServer, agent_id: Any) -> None:
    assert post(running, body(), **{"X-Agent-ID": "coder.1_a-b"}).status_code == 200
    answer = post(running, body(), **{"X-Agent-ID": agent_id})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Agent-ID"


def test_an_overlong_prompt_is_refused_with_the_limit(tmp_path: Path) -> None:
    with run_server(make_settings(tmp_path)) as running:
        answer = post(running, body(messages=[{"role": "user", "content": "x" * 200_000}]))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "131072" in error["message"]


def test_invalid_json(running: RunningServer) -> None:
    with running.client() as http:
        answer = http.post(
            "/v1/chat/completions",
            content='{"model":',
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [b'{"model": "\xff"}', b"[" * 50_000, b'{"seed": ' + b"9" * 5000 + b"}"],
    ids=["bad UTF-8", "too deep", "a huge number"],
)
def test_a_body_that_cannot_be_parsed_is_refused(running: RunningServer, content: bytes) -> None:
    with running.client() as http:
        answer = http.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "the body is not valid JSON"
    assert error["code"] == "invalid_request"


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type_is_refused(running: RunningServer, content_type: str) -> None:
    with running.client() as http:
        answer = http.post(
            "/v1/chat/completions",
            content=json.dumps(body()),
            headers={"content-type": content_type} if content_type else {},
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "send content-type: application/json."


def test_an_oversized_body_is_refused_declared_or_streamed(running: RunningServer) -> None:
    big = json.dumps(body(messages=[{"role": "user", "content": "x" * 200_000}])).encode()
    with running.client() as http:
        declared = http.post("/v1/chat/completions", content=big)
        streamed = http.post("/v1/chat/completions", content=iter([big[:100_000], big[100_000:]]))
    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert "max_body_mb" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]", "[::1]:80"])
def test_local_hosts_are_answered(running: RunningServer, host: str) -> None:
    with running.client() as http:
        assert http.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1:80:80", "[::1", "::1", "[::2]"]
)
def test_other_hosts_are_refused(running: RunningServer, host: str) -> None:
    with running.client() as http:
        answer = http.get("/v1/models", headers={"host": host})
    assert answer.status_code == 400
    assert "--allow-remote" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"].startswith("req_")


def test_any_host_is_answered_where_remote_clients_are_allowed(tmp_path: Path) -> None:
    with (
        run_server(make_settings(tmp_path, allow_remote=True)) as running,
        running.client() as http,
    ):
        for host in ("evil.example", "[::1", "a b"):
            answer = http.get("/v1/nothing", headers={"host": host})
            assert answer.status_code == 404


def test_unknown_paths_and_methods_answer_in_shape(running: RunningServer) -> None:
    with running.client() as http:
        missing, wrong = http.get("/v1/nothing"), http.get("/v1/chat/completions")
    assert missing.status_code == 404
    assert "GET /v1/nothing" in missing.json()["error"]["message"]
    assert wrong.status_code == 405
    assert missing.headers["x-request-id"].startswith("req_")


def test_unknown_fields_are_ignored(running: RunningServer) -> None:
    assert post(running, body(store=True, metadata={"a": "b"}, future_field=1)).status_code == 200


def test_a_client_that_leaves_cancels_its_work(running: RunningServer) -> None:
    device = running.server.device
    for stream in (True, False):
        payload = body(stream=stream, max_tokens=100_000, ignore_eos=True)
        with running.client() as http:
            if stream:
                with http.stream("POST", "/v1/chat/completions", json=payload) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post("/v1/chat/completions", json=payload, timeout=0.3)
        for _ in range(200):
            if device.num_live == 0:
                break
            threading.Event().wait(0.02)
        assert device.num_live == 0


def test_requests_while_loading_and_after_a_failed_load_say_so(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, backend="torch", model="no/such/model")
    with run_server(settings) as running:
        with running.client() as http:
            assert http.get("/health/live").status_code == 503
            ready = http.get("/health/ready")
        answer = post(running, body(model="model"))
    assert ready.status_code == 503
    assert "there is no model" in ready.json()["detail"]
    assert answer.status_code == 503
    assert "no/such/model" in answer.json()["error"]["message"]
