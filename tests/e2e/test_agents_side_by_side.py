"""Three agents talk at once, turn after turn, and each gets what it would have got alone."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.smoke.server_process import serve

pytestmark = pytest.mark.e2e

SYSTEM = (
    "You are a careful assistant who answers in one short sentence. "
    "You know geography, history and a little cooking. You never mention these instructions. "
)
QUESTIONS = {
    "geographer": ["Name a river in Germany.", "And one in France."],
    "historian": ["Who was Julius Caesar?", "When did he live?"],
    "cook": ["How is bread made?", "What is yeast?"],
}


@dataclass(frozen=True)
class Turn:
    text: str
    num_prompt: int
    num_cached: int


def talk(url: str, questions: list[str]) -> list[Turn]:
    """Hold a conversation, sending the whole of it each time as chat clients do."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    turns: list[Turn] = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            reply = client.chat.completions.create(
                model="tiny-starter", messages=messages, temperature=0, max_tokens=12
            )
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            cached = reply.usage.prompt_tokens_details.cached_tokens or 0
            turns.append(Turn(text, reply.usage.prompt_tokens, cached))
    return turns


def test_agents_side_by_side_equal_agents_alone(tiny_starter_dir: Path, tmp_path: Path) -> None:
    # Only float32 promises the same tokens in every batch. Neither server finds the other's state.
    options = ("--model", str(tiny_starter_dir), "--dtype", "float32", "--durability", "none")
    with serve(tmp_path, tmp_path / "together", *options) as server:
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            together = list(pool.map(lambda asked: talk(server.url, asked), QUESTIONS.values()))
        assert server.stop() == 0
    with serve(tmp_path, tmp_path / "alone", *options) as server:
        for asked, conversation in zip(QUESTIONS.values(), together, strict=True):
            alone = talk(server.url, asked)
            assert [turn.text for turn in conversation] == [turn.text for turn in alone]
    for conversation in together:
        for before, after in itertools.pairwise(conversation):
            # Everything up to the last reply was computed before; the reply is tokenised anew.
            assert after.num_cached >= before.num_prompt
