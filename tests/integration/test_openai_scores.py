"""Log-probabilities of a prompt: `echo` with `logprobs`, as evaluation harnesses send them."""

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.integration

PROMPT = "Aé🙂 prompt of some length, which the server has computed before."


def _complete(http: httpx.Client, **fields: Any) -> list[Any]:
    body = {"model": "fake", "temperature": 0, "max_tokens": 0, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices: list[Any] = answer.json()["choices"]
    return choices


def _streamed(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "temperature": 0, "stream": True, **fields}
    lines = http.post("/v1/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    joined: dict[str, Any] = {
        key: [item for choice in choices for item in choice["logprobs"][key]]
        for key in choices[0]["logprobs"]
    }
    return {"text": "".join(choice["text"] for choice in choices), "logprobs": joined}


def test_a_prompts_scores_are_those_of_the_reply_that_wrote_it(http: httpx.Client) -> None:
    asked: Any = {"logprobs": 2, "max_tokens": 8, "ignore_eos": True}
    (reply,) = _complete(http, prompt=PROMPT, **asked)
    whole = PROMPT + reply["text"]
    (echo,) = _complete(http, prompt=whole, echo=True, logprobs=2)
    assert echo["text"] == whole
    assert echo["finish_reason"] == "length"
    scores = echo["logprobs"]
    assert [len(values) for values in scores.values()] == [len(whole.encode())] * 4
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["tokens"][0] == "A"
    # A character of several tokens stands where its first one does.
    assert scores["text_offset"][:8] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert scores["text_offset"][-8:] == list(range(len(PROMPT), len(whole)))
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert scores[key][-8:] == reply["logprobs"][key]


def test_every_form_of_a_prompt_whole_and_streamed(http: httpx.Client) -> None:
    asked: Any = {"echo": True, "logprobs": 1, "max_tokens": 1}
    ids = list(PROMPT.encode())
    (by_text,) = _complete(http, prompt=PROMPT, **asked)
    (by_ids,) = _complete(http, prompt=ids, **asked)
    several = _complete(http, prompt=[ids[:9], ids], **asked)
    texts = _complete(http, prompt=["x", PROMPT], **asked)
    assert by_text["logprobs"] == by_ids["logprobs"] == several[1]["logprobs"]
    assert by_text == {**texts[1], "index": 0}
    assert several[0]["logprobs"]["token_logprobs"][:9] == by_ids["logprobs"]["token_logprobs"][:9]
    assert texts[0]["logprobs"]["tokens"][0] == "x"
    assert len(by_text["logprobs"]["tokens"]) == len(ids) + 1  # and the token that was generated
    streamed = _streamed(http, prompt=PROMPT, **asked)
    assert streamed == {key: by_text[key] for key in streamed}


def test_the_end_token_counts_as_the_token_that_was_generated(http: httpx.Client) -> None:
    """Harnesses leave out the last entry."""
    asked: Any = {"echo": True, "logprobs": 0, "max_tokens": 1, "logit_bias": {"256": 100}}
    (choice,) = _complete(http, prompt="<|start|>hi", **asked)
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == "<|start|>hi"
    assert choice["logprobs"]["tokens"] == ["<|start|>", "h", "i", "<|end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 9, 10, 11]
    assert [list(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [
        [],
        ["h"],
        ["i"],
        ["<|end|>"],
    ]


def test_no_reply_is_generated_if_none_is_wanted(http: httpx.Client) -> None:
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 0}
    for _ in range(2):
        answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0] == {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": "length",
        }
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens"] == len(PROMPT.encode())
