"""Tiny models that take images, behind a server with their published chat templates."""

import shutil
import struct
from pathlib import Path

import pytest

from tests.attack.images import png_chunk
from tests.contract.seeing_library import inputs_of, library_reply
from tests.contract.seeing_models import picture, seeing_model
from tests.http_server import make_settings, run_server
from tests.pictures import anthropic_image, openai_image
from tests.pictures import picture as plain_picture

pytestmark = pytest.mark.integration

SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for content in message.content %}{% if content.type == 'image' or 'image' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{%- for message in messages -%}{{ '<start_of_turn>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
)
TEXTS = {
    "smolvlm": (SMOLVLM, "<|im_start|>User: See {} now<end_of_utterance>\nAssistant:"),
    "qwen3_vl": (QWEN, "<|im_start|>user\nSee {} now<|im_end|>\n<|im_start|>assistant\n"),
    "gemma3": (GEMMA, "<start_of_turn>user\nSee{}now<end_of_turn>\n<start_of_turn>model\n"),
}
NUM_REPLY = 6
AFTER = [{"type": "text", "text": " now"}]
GREEDY = {"temperature": 0, "max_tokens": NUM_REPLY}
# Files, and whether the model's own preprocessing gets them.
HEADER = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 65_000, 65_000, 8, 2, 0, 0, 0))
HOSTILE = (
    (plain_picture((200, 1)), True),
    (plain_picture((1, 1), form="GIF"), True),
    (plain_picture() + b"PK\3\4<script>", True),
    (plain_picture((200, 100), form="JPEG")[:-90], False),
    (b"\x89PNG\r\n\x1a\n" + HEADER, False),
    (plain_picture((1, 100_000)), False),
    (b"<svg onload='alert(1)'/>", False),
    (b"%PDF-1.4\n" + plain_picture(), False),
)


@pytest.mark.parametrize("family", TEXTS)
def test_a_server_answers_about_a_picture_as_transformers_does(
    family: str, tmp_path: Path, native_directory: Path
) -> None:
    (tmp_path / "native").symlink_to(native_directory)
    model, (template, text) = seeing_model(family), TEXTS[family]
    shutil.copytree(model.directory, tmp_path / "models" / family)
    (tmp_path / "models" / family / "chat_template.jinja").write_text(template)
    data = picture(40, 30)
    settings = make_settings(tmp_path, backend="torch", dtype="float32", model=family, threads=1)
    with run_server(settings) as running, running.client() as http:
        content = [{"type": "text", "text": "See "}, openai_image(data), *AFTER]
        body = {"messages": [{"role": "user", "content": content}], **GREEDY, "logprobs": True}
        path, answers = "/v1/chat/completions", []
        answers.append(http.post(path, json=body).raise_for_status())
        for file, is_read in HOSTILE:
            content = [openai_image(file), *AFTER]
            other = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            status = http.post(path, json=other).status_code
            assert status == (200 if is_read else 400), file[:20]
        answers.append(http.post(path, json=body).raise_for_status())
        content = [{"type": "text", "text": "See "}, anthropic_image(data), *AFTER]
        body = {"model": family, "messages": [{"role": "user", "content": content}]}
        counted = http.post("/v1/messages/count_tokens", json=body).raise_for_status().json()

    first, second = (answer.json() for answer in answers)
    expected = library_reply(model, text, [data], NUM_REPLY)
    for answer in (first, second):
        tokens = [bytes(t["bytes"] or ()) for t in answer["choices"][0]["logprobs"]["content"]]
        assert tokens == [model.tokenizer.token_bytes(token) for token in expected]
    num_prompt = inputs_of(model, text, [data])["input_ids"].shape[1]
    assert first["usage"]["prompt_tokens"] == counted["input_tokens"] == num_prompt
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == num_prompt - 1
