"""Sends a trace to a real server over HTTP, and reads the trace back from the ledger it wrote.

The server runs the fake model, whose tokens are the bytes of the text.
It answers with a few tokens of its own, which the next prompt of the conversation contains.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.common import serving
from experiments.retention.traces import GRAIN, TraceTurn
from semantic.adapters.outbound.backends.fake import END_TOKEN
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.agents import Turn

BYTES_PER_TOKEN = 4  # of the fake model's KV cache
_REPLY_TOKENS = 4
_PLAIN = {"max_idle": "0", "draft_tokens": "0"}  # a turn starts from blocks, and from nothing else


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a server reported about a trace.

    Attributes:
        computed: Tokens of prompts that were not in its cache.
    """

    prompts: int
    computed: int


class _Conversations:
    """Converts prompts of grains to messages, with the replies that the server gave."""

    def __init__(self) -> None:
        self._ends: dict[int, list[dict[str, str]]] = {}

    def messages(self, turn: TraceTurn) -> list[dict[str, str]]:
        """Continue the longest conversation that the prompt begins with, or start one."""
        for position in range(len(turn.prompt), turn.num_head, -1):
            known = self._ends.get(turn.prompt[position - 1])
            if known is not None:
                return [*known, {"role": "user", "content": _text(turn.prompt[position:])}]
        head, rest = turn.prompt[: turn.num_head], turn.prompt[turn.num_head :]
        return [
            {"role": "system", "content": _text(head)},
            {"role": "user", "content": _text(rest)},
        ]

    def answered(self, turn: TraceTurn, messages: list[dict[str, str]], reply: str) -> None:
        last = (*turn.prompt, *turn.reply)[-1]
        self._ends[last] = [*messages, {"role": "assistant", "content": reply}]


def _text(grains: Sequence[int]) -> str:
    return "".join(f"{grain:0{GRAIN}d}" for grain in grains)


def replay(turns: Sequence[TraceTurn], port: int, speed: float = 0.0) -> Replayed:
    """Send turns one after another, at `speed` times their pace; 0 sends them at once."""
    known, prompts, computed = _Conversations(), 0, 0
    started = time.monotonic()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=600) as http:
        for turn in turns:
            if speed:
                due = started + (turn.at - turns[0].at) / speed
                time.sleep(max(0.0, due - time.monotonic()))
            messages = known.messages(turn)
            body = {"model": "any", "messages": messages, "temperature": 0}
            sent = http.post(
                "/chat/completions",
                json={**body, "max_tokens": _REPLY_TOKENS},
                headers={"X-Agent-ID": turn.agent},
            )
            sent.raise_for_status()
            answer = sent.json()
            usage = answer["usage"]
            prompts += usage["prompt_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            computed += usage["prompt_tokens"] - cached
            known.answered(turn, messages, answer["choices"][0]["message"]["content"] or "")
    return Replayed(prompts, computed)


def measure(
    turns: Sequence[TraceTurn],
    budget_mb: int,
    settings: Mapping[str, str] | None = None,
    speed: float = 0.0,
) -> Replayed:
    """Replay a trace on a server that keeps blocks in memory only, within a budget."""
    limits = {"durability": "none", "memory_budget_mb": str(budget_mb), **_PLAIN}
    with (
        tempfile.TemporaryDirectory() as home,
        serving(
            "--backend", "fake", "--home", home, settings={**limits, **(settings or {})}
        ) as port,
    ):
        return replay(turns, port, speed)


def record(turns: Sequence[TraceTurn], home: Path) -> list[TraceTurn]:
    """Replay a trace on a server with room for everything, and return what its ledger holds."""
    with serving("--backend", "fake", "--home", str(home), settings=_PLAIN) as port:
        replay(turns, port)
    return recorded(home / "cache")


def recorded(directory: Path) -> list[TraceTurn]:
    """Return the turns in a ledger as a trace of single tokens."""
    ledger = SqliteLedger(directory)
    found: list[TraceTurn] = []
    try:
        for agent in ledger.load().agents:
            if agent.head is not None:
                turns = ledger.turns(agent.tenant, agent.head, limit=agent.num_turns)
                found += _with_prompts(turns[::-1])
    finally:
        ledger.close()
    return sorted(found, key=lambda turn: turn.at)


def _with_prompts(turns: Sequence[Turn]) -> list[TraceTurn]:
    """Join the tokens that turns added to whole prompts."""
    tokens: tuple[int, ...] = ()
    made = []
    for turn in turns:
        tokens = turn.tokens if turn.holds_all_tokens else (*tokens, *turn.tokens)
        end = turn.usage.prompt_tokens
        num_head = tokens.index(END_TOKEN) + 1 if END_TOKEN in tokens else 0
        made.append(TraceTurn(turn.created_at, turn.agent_id, tokens[:end], tokens[end:], num_head))
    return made
