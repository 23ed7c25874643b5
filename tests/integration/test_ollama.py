"""Ollama's API over HTTP: what its clients probe, send, parse and rely on."""

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from semantic.ports.inbound import ModelState
from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.pictures import base64_of, picture
from tests.waiting import await_that

pytestmark = pytest.mark.integration


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


PORT = _free_port()
# The server's own port counts as Ollama's, too.
SETTINGS = {"ollama": True, "ollama_port": PORT, "port": PORT}
HI = [{"role": "user", "content": "hi"}]
SHORT = {"num_predict": 4, "temperature": 0}


def chat(http: httpx.Client, messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": messages, "stream": False, "options": SHORT, **fields}
    made: dict[str, Any] = http.post("/api/chat", json=body).raise_for_status().json()
    return made


def lines_of(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", path, json={"model": "fake", **body}) as stream:
        assert stream.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in stream.iter_lines()]


def error_of(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()
    assert list(body) == ["error"], body
    return answer.status_code, body["error"]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[RunningServer, httpx.Client]]:
    """A server whose models a test may load, unload and swap."""
    settings = make_settings(tmp_path, swap_on_request=True, min_residence_s=0)
    with run_server(settings) as made, made.client() as http:
        yield made, http


# -- probes and models ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags", "/api/ps"])
def test_probes_are_answered(http: httpx.Client, path: str) -> None:
    assert http.head(path).status_code == http.get(path).status_code == 200


def test_a_program_is_told_that_ollama_is_running(http: httpx.Client) -> None:
    for accept in ("*/*", "application/json", "text/plain"):
        assert http.get("/", headers={"accept": accept}).text == "Ollama is running"
    assert "<html" in http.get("/", headers={"accept": "text/html,*/*"}).text


DETAILS = {
    "type": "object",
    "required": ["format", "family", "parameter_size", "quantization_level"],
    "additionalProperties": {"type": ["string", "array", "integer"]},
}
ZED = {
    "tags": {
        "type": "object",
        "required": ["models"],
        "properties": {
            "models": {
                "items": {
                    "required": ["name", "modified_at", "size", "digest", "details"],
                    "properties": {
                        "name": {"type": "string"},
                        "modified_at": {"type": "string", "pattern": r"^\d{4}-.*T.*Z$"},
                        "size": {"type": "integer", "minimum": 0},
                        "digest": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                        "details": DETAILS,
                    },
                }
            }
        },
    },
    "line": {
        "type": "object",
        "required": ["model", "created_at", "message", "done"],
        "properties": {
            "message": {
                "required": ["role", "content"],
                "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
            },
            "done": {"type": "boolean"},
            "prompt_eval_count": {"type": "integer", "minimum": 0},
            "eval_count": {"type": "integer", "minimum": 0},
        },
    },
}


def test_zed_can_parse_models_and_every_line(http: httpx.Client) -> None:
    """Zed refuses a list in which one field is missing, and a line without a role."""
    jsonschema_rs.validate(ZED["tags"], http.get("/api/tags").json())
    for line in lines_of(http, "/api/chat", messages=HI, options=SHORT):
        jsonschema_rs.validate(ZED["line"], line)


def test_copilot_finds_a_model_and_talks_to_it(http: httpx.Client) -> None:
    """VS Code's requests in their order; it compares versions number by number."""
    version = [int(part) for part in http.get("/api/version").json()["version"].split(".")]
    assert version >= [0, 6, 4]
    (model,) = http.get("/api/tags").json()["models"]
    shown = http.post("/api/show", json={"model": model["model"]}).json()
    info = shown["model_info"]
    assert "tools" in shown["capabilities"]
    assert info["general.basename"]
    context = info[f"{info['general.architecture']}.context_length"]
    assert context == http.get("/api/ps").json()["models"][0]["context_length"] > 4096
    said = {"model": model["model"], "messages": HI, "max_tokens": 2, "stream": True}
    answer = http.post("/v1/chat/completions", json=said)
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("name", ["fake", "fake:latest", "FAKE", "Fake:latest"])
def test_a_name_may_have_a_tag_and_any_case_and_comes_back(http: httpx.Client, name: str) -> None:
    assert chat(http, HI, model=name)["model"] == name
    assert http.post("/api/show", json={"name": name}).status_code == 200


def test_openai_routes_know_the_tag_too(openai_client: openai.OpenAI) -> None:
    said: Any = {"messages": HI, "max_tokens": 2}
    made = openai_client.chat.completions.create(model="fake:latest", **said)
    assert made.model == "fake"


@pytest.mark.parametrize(
    "path, fields",
    [
        ("chat", {"messages": HI}),
        ("chat", {}),
        ("generate", {"prompt": "hi"}),
        ("generate", {"keep_alive": 0}),
        ("show", {}),
        ("embed", {"input": "hi"}),
        ("embeddings", {"prompt": "hi"}),
    ],
)
def test_an_unknown_model_is_refused_in_ollamas_words(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    answer = http.post(f"/api/{path}", json={"model": "x", **fields})
    assert error_of(answer) == (404, "model 'x' not found")
    half = json.dumps({"model": "\ud800", **fields})  # JSON can say it, UTF-8 cannot
    answer = http.post(f"/api/{path}", content=half, headers={"content-type": "application/json"})
    assert error_of(answer) == (404, "model '\\ud800' not found")


def test_only_models_that_requests_may_name_are_listed(
    http: httpx.Client, own: tuple[RunningServer, httpx.Client]
) -> None:
    def names(http: httpx.Client) -> list[str]:
        return [model["name"] for model in http.get("/api/tags").json()["models"]]

    assert names(http) == ["fake"]
    assert names(own[1]) == ["fake", "fake-2"]
    status, error = error_of(http.post("/api/chat", json={"model": "fake-2", "messages": HI}))
    assert status == 404
    assert "swap_on_request" in error
    assert chat(own[1], HI, model="fake-2")["done"]


def test_models_are_pulled_and_deleted(http: httpx.Client) -> None:
    assert lines_of(http, "/api/pull")[-1] == {"status": "success"}
    assert http.post("/api/pull", json={"model": "fake", "stream": False}).json() == {
        "status": "success"
    }
    status, error = error_of(http.post("/api/pull", json={"model": "org/x"}))
    assert status == 404
    assert "no model 'org/x'" in error
    for model, status, words in (
        ("fake", 409, "serves"),
        ("fake-2", 400, "no files"),
        ("x", 404, ""),
    ):
        refused = http.request("DELETE", "/api/delete", json={"model": model})
        assert error_of(refused)[0] == status
        assert words in error_of(refused)[1]
    for path in ("create", "copy", "push", "blobs/sha256:0"):
        assert error_of(http.post(f"/api/{path}", json={}))[0] == 501


# -- replies --------------------------------------------------------------------------------------


def test_a_stream_and_a_whole_reply_are_the_same(http: httpx.Client) -> None:
    whole = chat(http, HI)
    *pieces, last = lines_of(http, "/api/chat", messages=HI, options=SHORT)
    assert whole["message"] == {
        "role": "assistant",
        "content": "".join(piece["message"]["content"] for piece in pieces),
    }
    assert not any(piece["done"] for piece in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 4)
    durations = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert 0 < sum(last[name] for name in durations) <= last["total_duration"]
    assert last["prompt_eval_count"] == whole["prompt_eval_count"] > last["cached_tokens"] > 0


def test_a_conversation_changes_protocols_and_reuses_its_prefix(
    http: httpx.Client, openai_client: openai.OpenAI
) -> None:
    said: list[Any] = [{"role": "user", "content": "Tell me about rivers."}]
    first = chat(http, said)
    said += [first["message"], {"role": "user", "content": "And lakes?"}]
    options: Any = {"model": "fake", "max_tokens": 4, "temperature": 0}
    second: Any = openai_client.chat.completions.create(messages=said, **options)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first["prompt_eval_count"] + first["eval_count"] - 1
    said += [
        {"role": "assistant", "content": second.choices[0].message.content},
        {"role": "user", "content": "And seas?"},
    ]
    third = chat(http, said)
    assert third["cached_tokens"] >= second.usage.total_tokens - 1
    agents = http.get("/v1/agents").json()["data"]
    assert 3 in [agent["turns"] for agent in agents]


def test_text_is_generated_and_continued_by_its_context(http: httpx.Client) -> None:
    def generate(**body: Any) -> dict[str, Any]:
        usual = {"model": "fake", "stream": False, "options": SHORT, "system": "Be brief."}
        made: dict[str, Any] = http.post("/api/generate", json={**usual, **body}).json()
        return made

    first = generate(prompt="Name a river.")
    second = generate(prompt="Another.", context=first["context"])
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": first["response"]},
        {"role": "user", "content": "Another."},
    ]
    assert second["response"] == chat(http, said)["message"]["content"]
    assert second["cached_tokens"] >= first["prompt_eval_count"] + first["eval_count"] - 1
    for unknown in ([1, 2, 3], [1, 2, 3, 4]):
        answer = http.post(
            "/api/generate", json={"model": "fake", "prompt": "x", "context": unknown}
        )
        status, error = error_of(answer)
        assert (status, error.startswith("context: ")) == (400, True)


def test_a_raw_prompt_has_no_template(http: httpx.Client, openai_client: openai.OpenAI) -> None:
    *pieces, last = lines_of(http, "/api/generate", prompt="abc", raw=True, options=SHORT)
    usual: Any = {"model": "fake", "max_tokens": 4, "temperature": 0}
    expected = openai_client.completions.create(prompt="abc", **usual).choices[0].text
    assert "".join(piece["response"] for piece in pieces) == expected
    assert (last["prompt_eval_count"], "context" in last) == (3, False)


def test_a_format_constrains_the_reply(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    options = {"temperature": 0, "num_predict": 200}
    made = chat(http, HI, format=schema, options=options)
    assert json.loads(made["message"]["content"]) == {"n": 7}
    assert chat(http, HI, format="")["done"]


def test_log_probabilities_come_with_their_piece(http: httpx.Client) -> None:
    made = chat(http, HI, logprobs=True, top_logprobs=2)
    scored = made["logprobs"]
    assert len(scored) == 4
    assert all(len(token["top_logprobs"]) == 2 for token in scored)
    assert "".join(token["token"] for token in scored) == made["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"options": None, "keep_alive": None, "format": None, "tools": None, "think": False},
        {"options": {"stop": None, "seed": -1, "num_ctx": 4096.0, "num_predict": 2, "mirostat": 1}},
        {"options": {"num_predict": 2, "stop": ["", "x"]}, "keep_alive": "-1"},
        {"options": {"num_predict": -2, "stop": "a"}, "keep_alive": "5m", "unknown": 1},
    ],
)
def test_what_clients_send_by_habit_is_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert chat(http, HI, **fields)["done"]


@pytest.mark.parametrize(
    "path, fields, names",
    [
        ("chat", {"messages": HI, "think": True}, '"fake" does not support thinking'),
        ("chat", {"messages": HI, "think": "some"}, "think"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "images": [base64_of(picture())]}]},
            "messages[0].images[0]: ",
        ),
        ("chat", {"messages": HI, "format": "xml"}, "format"),
        ("chat", {"messages": HI, "keep_alive": "soon"}, "keep_alive"),
        ("chat", {"messages": HI, "options": {"temperature": -1}}, "temperature"),
        ("chat", {"messages": HI, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("chat", {"messages": HI, "options": {"num_ctx": "many"}}, "options.num_ctx"),
        ("chat", {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ("chat", {"messages": HI, "model": ""}, "model is required"),
        ("generate", {"prompt": "x", "images": [base64_of(picture())]}, "images[0]: "),
        ("generate", {"prompt": "x", "suffix": "y"}, "cannot fill in the middle"),
        ("generate", {"prompt": "x", "template": "y"}, "template"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "raw"),
        ("embed", {"input": {"a": 1}}, "input"),
        ("embed", {"input": "x" * 200_000, "truncate": False}, "input"),
        ("embed", {"input": "x", "dimensions": 17}, "dimensions"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_is_a_text_that_names_the_field(
    http: httpx.Client, path: str, fields: dict[str, Any], names: str
) -> None:
    status, error = error_of(http.post(f"/api/{path}", json={"model": "fake", **fields}))
    assert status == 400
    assert names in error


def test_texts_are_embedded(http: httpx.Client) -> None:
    body = {"model": "fake", "input": ["hello", "a longer text"]}
    made = http.post("/api/embed", json=body).json()
    assert (made["model"], made["prompt_eval_count"]) == ("fake", 5 + 13)
    assert [math.hypot(*vector) for vector in made["embeddings"]] == pytest.approx([1, 1])
    old = http.post("/api/embeddings", json={"model": "fake", "prompt": "hello"}).json()
    assert old["embedding"] == pytest.approx(made["embeddings"][0])
    cut = http.post("/api/embed", json={**body, "dimensions": 4}).json()["embeddings"]
    assert [len(vector) for vector in cut] == [4, 4]
    assert http.post("/api/embed", json={"model": "fake", "input": ""}).json()["embeddings"] == []
    too_long = {"model": "fake", "input": "x" * 200_000}
    assert http.post("/api/embed", json=too_long).json()["prompt_eval_count"] == 131_072


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_bodies_are_json_whatever_their_type(http: httpx.Client, kind: str | None) -> None:
    """`curl -d` sends a form's type, and Ollama's documentation sets no other."""
    body = json.dumps({"model": "fake", "messages": HI, "stream": False, "options": SHORT})
    headers = {"content-type": kind} if kind else {}
    assert http.post("/api/chat", content=body, headers=headers).json()["done"]
    foreign = {**headers, "origin": "https://evil.example"}
    assert http.post("/api/chat", content=body, headers=foreign).status_code == 403
    assert error_of(http.post("/api/chat", content="{", headers=headers))[0] == 400


# -- context, loading, keys, origins --------------------------------------------------------------


def test_the_oldest_turns_are_dropped_beyond_num_ctx(http: httpx.Client) -> None:
    """The system prompt and the last turn stay, and *explain* says what was dropped."""
    agent = {"x-agent-id": "long"}
    said = [{"role": "system", "content": "Be brief."}]
    for number in range(12):
        said += [
            {"role": "user", "content": f"{number} " + "word " * 20},
            {"role": "assistant", "content": "yes"},
        ]
    said.append({"role": "user", "content": "the end"})
    body = {
        "model": "fake",
        "messages": said,
        "stream": False,
        "options": {**SHORT, "num_ctx": 900},
    }
    made = http.post("/api/chat", json=body, headers=agent).json()
    assert 300 < made["prompt_eval_count"] <= 900
    explained = http.get("/v1/agents/long/explain").json()
    (turn,) = http.get("/v1/agents/long/turns").json()["data"]
    dropped = turn["dropped_messages"]
    assert f"{dropped} of the oldest messages were dropped" in explained["summary"]
    assert dropped % 2 == 0
    kept = [said[0], *said[1 + dropped :]]
    assert chat(http, kept)["message"] == made["message"]
    refused = http.post("/api/chat", json={**body, "truncate": False})
    assert "900 tokens" in error_of(refused)[1]
    one = {**body, "messages": [{"role": "user", "content": "x" * 1000}]}
    assert error_of(http.post("/api/chat", json=one))[0] == 400


def test_what_is_dropped_stays_the_same_for_some_turns(http: httpx.Client) -> None:
    said = [{"role": "user", "content": "word " * 60}]
    cached, made = [], {}
    for number in range(12):
        made = chat(http, said, options={**SHORT, "num_ctx": 1500})
        cached.append(made["cached_tokens"] / made["prompt_eval_count"])
        said += [made["message"], {"role": "user", "content": f"{number} " + "word " * 20}]
    assert made["prompt_eval_count"] < 1500 < sum(len(message["content"]) for message in said)
    assert sum(share > 0.5 for share in cached[1:]) >= 8, cached


def test_models_are_loaded_and_unloaded(own: tuple[RunningServer, httpx.Client]) -> None:
    running, http = own
    device = running.server.device

    def loaded() -> list[str]:
        return [model["name"] for model in http.get("/api/ps").json()["models"]]

    unload = {"model": "fake", "keep_alive": 0}
    gone = http.post("/api/generate", json=unload).json()
    assert (gone["response"], gone["done"], gone["done_reason"]) == ("", True, "unload")
    assert (loaded(), device.state) == ([], ModelState.UNLOADED)
    back = http.post("/api/chat", json={"model": "fake", "keep_alive": "1h"}).json()
    assert (back["message"]["content"], back["done_reason"]) == ("", "load")
    assert loaded() == ["fake"]
    (running_model,) = http.get("/api/ps").json()["models"]
    assert running_model["expires_at"] < "2100"
    assert chat(http, HI, keep_alive=-1)["done"]
    (kept,) = http.get("/api/ps").json()["models"]
    assert kept["expires_at"] > "2100"
    assert http.post("/api/generate", json={"model": "fake-2"}).json()["done_reason"] == "load"
    assert loaded() == ["fake-2"]
    assert chat(http, HI, model="fake-2", keep_alive="0s")["done"]
    await_that(lambda: device.state is ModelState.UNLOADED)
    assert chat(http, HI, model="fake-2")["done"]


def test_keys_apply_and_only_an_admin_unloads(tmp_path: Path) -> None:
    keys = give_keys(tmp_path, "a", "admin")
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        assert http.get("/").text == "Ollama is running"
        assert error_of(http.get("/api/tags"))[0] == 401
        asked = {"authorization": f"Bearer {keys['a']}"}
        assert http.get("/api/tags", headers=asked).status_code == 200
        unload = {"model": "fake", "keep_alive": 0}
        assert http.post("/api/chat", json=unload, headers=asked).status_code == 403
        for method, path, model in (("POST", "pull", "x"), ("DELETE", "delete", "fake-2")):
            refused = http.request(method, f"/api/{path}", json={"model": model}, headers=asked)
            assert error_of(refused)[0] == 403
        said = {**unload, "messages": HI, "stream": False}
        assert http.post("/api/chat", json=said, headers=asked).json()["done"]
        admin = {"authorization": f"Bearer {keys['admin']}"}
        assert running.server.device.state is ModelState.READY
        assert http.post("/api/chat", json=unload, headers=admin).json()["done_reason"] == "unload"


APPS = ("app://obsidian.md", "vscode-webview://x", "chrome-extension://abc", "tauri://localhost")


@pytest.mark.parametrize("origin", APPS)
def test_apps_may_use_inference_on_ollamas_port_only(
    http: httpx.Client, own: tuple[RunningServer, httpx.Client], origin: str
) -> None:
    headers = {"origin": origin}
    body = {"model": "fake", "messages": HI, "stream": False, "options": SHORT}
    answer = http.post("/api/chat", json=body, headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    asked = {**headers, "access-control-request-method": "POST"}
    preflight = http.options("/api/chat", headers=asked)
    assert preflight.headers["access-control-allow-origin"] == origin
    for path in ("/v1/cache/gc", "/api/pull", "/v1/agents/import"):
        assert http.post(path, json={}, headers=headers).status_code == 403
    assert own[1].post("/api/chat", json=body, headers=headers).status_code == 403


def test_web_pages_may_not(http: httpx.Client) -> None:
    headers = {"origin": "https://app.evil.example"}
    answer = http.post("/api/chat", json={"model": "fake", "messages": HI}, headers=headers)
    assert error_of(answer)[0] == 403
