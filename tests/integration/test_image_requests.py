"""Images over a socket: what models get of them, in every protocol."""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw, ImageFont

from semantic.adapters.images.ocr import is_ocr_installed
from semantic.entrypoints.cli.app import main
from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.pictures import (
    anthropic_image,
    base64_of,
    data_uri,
    openai_image,
    picture,
    responses_image,
)

pytestmark = pytest.mark.integration

SETTINGS = {"model": "fake-vision", "default_max_tokens": 8}
RECORDING = Path(__file__).parents[1] / "recordings" / "claude_code_image.json"
LOOK: dict[str, Any] = {"type": "text", "text": "Look:"}


def bodies(data: bytes) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same conversation in each protocol."""
    image = {"role": "user", "content": "Look:", "images": [base64_of(data)]}
    item = [{"type": "input_text", "text": "Look:"}, responses_image(data)]
    greedy = {"temperature": 0}
    return {
        "openai": ("/v1/chat/completions",
                   {"messages": [said(LOOK, openai_image(data))], **greedy}),
        "anthropic": ("/v1/messages", {"messages": [said(LOOK, anthropic_image(data))],
                      "max_tokens": 8, **greedy}),
        "responses": ("/v1/responses", {"input": [said(*item)], **greedy}),
        "ollama": ("/api/chat", {"model": "fake-vision", "messages": [image], "stream": False,
                   "options": greedy}),
    }  # fmt: skip


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def num_prompt(answer: dict[str, Any]) -> int:
    usage: dict[str, Any] = answer.get("usage") or {}
    counted = (
        usage.get("prompt_tokens"),
        usage.get("input_tokens"),
        answer.get("prompt_eval_count"),
    )
    cached = (usage.get("cache_read_input_tokens") or 0) + (
        usage.get("cache_creation_input_tokens") or 0
    )
    return int(next(count for count in counted if count is not None) + cached)


def test_every_protocol_gives_the_model_the_same_prompt(http: httpx.Client) -> None:
    answers = {}
    for name, (path, body) in bodies(picture((200, 150))).items():
        answer = http.post(path, json=body)
        assert answer.status_code == 200, (name, answer.text)
        answers[name] = num_prompt(answer.json())
    assert len(set(answers.values())) == 1, answers


def test_tokens_are_counted_as_the_model_sees_them(http: httpx.Client) -> None:
    small, large = picture((90, 90)), picture((250, 250))
    counts = []
    for data in (small, large):
        path, body = bodies(data)["anthropic"]
        answer = http.post(path, json=body).json()
        del body["max_tokens"]
        counted = http.post(f"{path}/count_tokens", json=body).json()["input_tokens"]
        _, body = bodies(data)["responses"]
        again = http.post("/v1/responses/input_tokens", json=body).json()["input_tokens"]
        assert num_prompt(answer) == counted == again
        counts.append(counted)
    assert counts[0] < counts[1]


def test_what_a_model_gets_of_images_is_listed(http: httpx.Client) -> None:
    listed = {model["id"]: model["images"] for model in http.get("/v1/models").json()["data"]}
    assert listed["fake-vision"] == "vision"
    assert listed["fake"] is None  # not loaded
    assert http.get("/health").json()["images"] == "vision"
    shown = http.post("/api/show", json={"model": "fake-vision"}).json()
    assert "vision" in shown["capabilities"]


def test_an_agent_sees_an_image_of_an_earlier_turn(http: httpx.Client) -> None:
    http.post("/v1/agents", json={"id": "looker"})
    image = {"type": "image", "source": data_uri(picture((120, 100)))}
    path, limit = "/v1/agents/looker/generate", {"max_tokens": 4, "temperature": 0}
    first = http.post(path, json={"messages": [said(LOOK, image)], **limit}).json()
    second = http.post(path, json={"message": "And now?", **limit}).json()
    assert second["usage"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 10
    turns = http.get("/v1/agents/looker/turns").json()["data"]
    shown = turns[1]["messages"][0]["content"][1]
    assert (shown["type"], shown["width"], shown["height"]) == ("image", 120, 100)


# -- models that accept only text ------------------------------------------------------------


@pytest.fixture(scope="module")
def text_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = make_settings(tmp_path_factory.mktemp("text"), default_max_tokens=8)
    with run_server(settings) as server:
        yield server


@pytest.mark.parametrize("name", ["openai", "anthropic", "responses", "ollama"])
def test_a_model_of_text_refuses_images_by_name(text_only: RunningServer, name: str) -> None:
    path, body = bodies(picture())[name]
    with text_only.client() as http:
        answer = http.post(path, json=body | ({"model": "fake"} if name == "ollama" else {}))
        assert http.get("/health").json()["images"] == "none"
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "model fake does not accept images" in message
    if name == "openai":
        assert error["param"] == "messages[0].content[1].image_url"


def screenshot(*lines: str) -> bytes:
    image = Image.new("RGB", (480, 60 + 50 * len(lines)), "white")
    font = ImageFont.load_default(26)
    for number, line in enumerate(lines):
        ImageDraw.Draw(image).text((30, 30 + 50 * number), line, fill="black", font=font)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.skipif(not is_ocr_installed(), reason="the extra ocr is not installed")
def test_a_model_of_text_gets_the_recognised_text(tmp_path: Path) -> None:
    shot = screenshot("Error 42: file not found", "Save")
    expected = (
        "[An image of 480x160 pixels, which you cannot see. Text recognised in it by OCR, with "
        "possible errors:]\nError 42: file not found\nSave\n[end of the recognised text]"
    )
    with run_server(make_settings(tmp_path, ocr="auto")) as server, server.client() as http:
        assert http.get("/health").json()["images"] == "ocr"
        path = "/v1/messages/count_tokens"
        seen = http.post(path, json={"messages": [said(LOOK, anthropic_image(shot))]})
        written = {"type": "text", "text": expected}
        same = http.post(path, json={"messages": [said(LOOK, written)]})
        assert seen.json() == same.json()
        chat = {"max_tokens": 6, "temperature": 0}
        replies = [
            http.post("/v1/chat/completions", json={"messages": [said(LOOK, part)], **chat}).json()
            for part in (openai_image(shot), written)
        ]
    assert replies[0]["choices"][0]["message"] == replies[1]["choices"][0]["message"]
    assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


# -- what clients send and see ----------------------------------------------------------------


def test_claude_code_shows_a_picture_that_it_read(http: httpx.Client) -> None:
    """Its tool Read returns a PNG file as an image inside the tool's result."""
    recorded = json.loads(RECORDING.read_text())
    body = recorded["body"] | {"model": "fake-vision", "stream": False, "max_tokens": 4}
    body.pop("thinking", None)
    answer = http.post("/v1/messages?beta=true", json=body, headers=recorded["headers"])
    assert answer.status_code == 200, answer.text
    block = body["messages"][-1]["content"][0]
    assert block["type"] == "tool_result"
    (image,) = [part for part in block["content"] if part["type"] == "image"]
    block["content"].remove(image)
    shorter = http.post("/v1/messages?beta=true", json=body, headers=recorded["headers"]).json()
    assert num_prompt(answer.json()) > num_prompt(shorter) + 8


def result_bodies(*shown: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A tool's result, by path; `shown` are its images in each protocol."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat, block, item = ([one] if one else [] for one in shown)
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [LOOK, *block]}
    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = [{"type": "input_text", "text": "Look:"}, *item]
    return {
        "/v1/chat/completions": {"messages": [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [LOOK, *chat]},
        ]},
        "/v1/messages": {"max_tokens": 8, "messages": [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": [use]},
            said(result),
        ]},
        "/v1/responses": {"input": [
            {"role": "user", "content": "Go"},
            called,
            {"type": "function_call_output", "call_id": "c", "output": output},
        ]},
    }  # fmt: skip


def test_the_result_of_a_tool_shows_its_picture_in_every_protocol(http: httpx.Client) -> None:
    data = picture((200, 150))
    images = openai_image(data), anthropic_image(data), responses_image(data)
    with_image, without = result_bodies(*images), result_bodies({}, {}, {})
    counts = set()
    for path, body in with_image.items():
        seen, unseen = (
            num_prompt(http.post(path, json=each).raise_for_status().json())
            for each in (body, without[path])
        )
        assert seen > unseen + 8, path
        counts.add(seen)
    assert len(counts) == 1


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1:1/a.png", "ftp://a/b"])
def test_urls_are_refused_by_field(http: httpx.Client, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = http.post("/v1/chat/completions", json={"messages": [said(LOOK, part)]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].image_url"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_belong_into_messages_of_the_user(http: httpx.Client, role: str) -> None:
    messages = [{"role": role, "content": [LOOK, openai_image(picture())]}, said(LOOK)]
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert f"images are not allowed in {role} messages" in answer.json()["error"]["message"]


def test_a_stored_image_is_served_to_its_tenant_alone(tmp_path: Path) -> None:
    keys = give_keys(tmp_path, "ann", "bob")
    data = picture((50, 40), form="GIF")
    settings = make_settings(tmp_path, model="fake-vision", default_max_tokens=4)
    with run_server(settings) as server, server.client() as http:
        ann, bob = ({"authorization": f"Bearer {keys[name]}"} for name in ("ann", "bob"))
        http.post("/v1/agents", json={"id": "a"}, headers=ann)
        image = {"type": "image", "source": base64_of(data)}
        http.post("/v1/agents/a/generate", json={"messages": [said(LOOK, image)]}, headers=ann)
        digest = hashlib.sha256(data).hexdigest()
        served = http.get(f"/v1/images/{digest}", headers=ann)
        assert (served.content, served.headers["content-type"]) == (data, "image/gif")
        assert served.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in served.headers["content-security-policy"]
        assert http.get(f"/v1/images/{digest}", headers=bob).status_code == 404
        assert http.get(f"/v1/images/{digest}").status_code == 401
        assert http.get("/v1/images/ledger", headers=ann).status_code == 404
        named = {"type": "image", "source": f"sha256:{digest}"}
        path, body = "/v1/agents/a/generate", {"messages": [said(LOOK, named)]}
        assert http.post(path, json=body, headers=ann).status_code == 200
        http.post("/v1/agents", json={"id": "a"}, headers=bob)
        assert http.post(path, json=body, headers=bob).status_code == 400


def test_a_stored_response_is_continued_after_a_restart_without_kv_cache(tmp_path: Path) -> None:
    sent = said({"type": "input_text", "text": "Look:"}, responses_image(picture((200, 150))))
    asked = said({"type": "input_text", "text": "And now?"})
    settings = make_settings(tmp_path, **SETTINGS)
    with run_server(settings) as running, running.client() as http:
        first = http.post("/v1/responses", json={"input": [sent], "temperature": 0}).json()
    assert running.server.memory.close(60)
    shutil.rmtree(settings.effective_cache_dir / "blocks")
    with run_server(settings) as running, running.client() as http:
        stored = {"input": [asked], "previous_response_id": first["id"], "temperature": 0}
        continued = http.post("/v1/responses", json=stored).json()
        again = {"input": [sent, *first["output"], asked], "temperature": 0}
        whole = http.post("/v1/responses", json=again).json()
    assert continued["usage"]["input_tokens_details"]["cached_tokens"] == 0
    texts = [one["output"][0]["content"][0]["text"] for one in (continued, whole)]
    assert texts[0] == texts[1]


def test_the_items_of_a_response_have_its_images(http: httpx.Client) -> None:
    path, body = bodies(picture((70, 60)))["responses"]
    first = http.post(path, json=body).json()
    items = http.get(f"{path}/{first['id']}/input_items").json()["data"]
    again = http.post(path, json=body | {"input": items}).json()
    assert num_prompt(again) == num_prompt(first)
    named = [{"type": "item_reference", "id": items[0]["id"]}]
    assert num_prompt(http.post(path, json=body | {"input": named}).json()) == num_prompt(first)


def test_a_chat_at_the_terminal_sends_pictures(
    running: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMANTIC_URL", running.url)
    shot = tmp_path / "shot.png"
    shot.write_bytes(picture((70, 60)))
    assert main(["chat", "cam", "--image", str(shot), "-m", "Look:", "--max-tokens", "3"]) == 0
    typed = f"/image {shot}\n/image {shot}\nAgain:\n/retry\n/image nowhere.png\n/image\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["chat", "cam"]) == 0
    with running.client() as http:
        turns = http.get("/v1/agents/cam/turns").json()["data"]
    kinds = [[part["type"] for part in turn["messages"][0]["content"]] for turn in turns]
    assert kinds == [["image", "image", "text"], ["image", "text"]]
    assert turns[0]["messages"][0]["content"][2]["text"] == "Again:"
