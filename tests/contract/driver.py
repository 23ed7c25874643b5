"""Drives a backend step by step, as an engine does, and keeps its answers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from semantic.domain.images.spans import ImageSpan, spans_within
from semantic.domain.sampling import SamplingParams, TokenLogprob
from semantic.domain.spec import LayerKind
from semantic.ports.backend import (
    LAST_SAMPLED,
    Chunk,
    Draw,
    KVPayload,
    ModelBackendPort,
    Row,
    RowFailed,
    Sampled,
    SequenceId,
    Step,
)
from semantic.ports.text import TokenizerPort

GREEDY = SamplingParams(temperature=0)
NUM_REPLY = 6

Saved: TypeAlias = tuple[KVPayload, ...]  # a block: one payload for each kind of layers


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that every model knows."""
    ids: list[int] = np.random.default_rng(seed).integers(96, size=num_tokens).tolist()
    return ids


@dataclass(slots=True)
class Run:
    """An open sequence.

    Attributes:
        tokens: Those it was given, and after `num_prompt` those it sampled.
        num_held: How many of them the backend has computed.
        images: Those in the prompt.
    """

    backend: ModelBackendPort
    seq: SequenceId
    tokens: list[int]
    num_prompt: int
    params: SamplingParams = GREEDY
    num_held: int = 0
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)

    @property
    def reply(self) -> list[int]:
        """What was sampled."""
        return self.tokens[self.num_prompt :]

    def chunk(self, size: int | None = None, *, allowed: bytes | None = None) -> Chunk:
        """The next tokens, at most `size`; a token is drawn after the last one there is."""
        left = self.tokens[self.num_held :]
        tokens = left if size is None else left[:size]
        draw = Draw(self.params, self.num_prompt, allowed) if len(tokens) == len(left) else None
        images = spans_within(self.images, self.num_held, self.num_held + len(tokens))
        return Chunk(self.seq, self.num_held, tuple(tokens), draw, images=images)

    def chunk_of_last(self, *, allowed: bytes | None = None) -> Chunk:
        """The token sampled last, by reference."""
        draw = Draw(self.params, self.num_prompt, allowed)
        return Chunk(self.seq, self.num_held, LAST_SAMPLED, draw)

    def take(self, chunk: Chunk, row: Row) -> None:
        """Keep a row's answer."""
        self.num_held += chunk.num_tokens
        if chunk.draw is not None:
            self.tokens.append(sampled(row).token)

    def compute(self, end: int) -> None:
        """Compute up to `end`, which is before the last token."""
        advance([self], [end - self.num_held])
        assert self.num_held == end

    def seal(self, *ends: int) -> list[Saved]:
        """Compute up to each end and save what was added there."""
        parts = []
        for end in ends:
            start = self.num_held
            self.compute(end)
            parts.append(save(self.backend, self.seq, start, end))
        return parts

    def load(self, blocks: Sequence[Saved], end: int | None = None) -> None:
        """Restore up to the end of the blocks, or less far."""
        end = blocks[-1][0].end if end is None else end
        self.backend.load(self.seq, needed(self, blocks, end), end)
        self.num_held = end

    def finish(self, num_reply: int = NUM_REPLY) -> list[int]:
        """Go on alone until the reply is long enough."""
        finish([self], num_reply)
        return self.reply

    def say(self, tokenizer: TokenizerPort, max_tokens: int = 40) -> str:
        """Go on alone until the reply ends; returns its text."""
        while not tokenizer.eos_ids.intersection(self.reply) and len(self.reply) < max_tokens:
            advance([self])
        said = (token for token in self.reply if token not in tokenizer.eos_ids)
        return b"".join(map(tokenizer.token_bytes, said)).decode()


def begin(
    backend: ModelBackendPort,
    seq: int,
    tokens: Sequence[int],
    params: SamplingParams = GREEDY,
    images: tuple[ImageSpan, ...] = (),
) -> Run:
    """Open a sequence with a prompt."""
    run = Run(backend, SequenceId(seq), [*tokens], len(tokens), params, images=images)
    backend.open_sequence(run.seq, run.tokens, images)
    return run


def step(backend: ModelBackendPort, *chunks: Chunk) -> tuple[Row, ...]:
    """Run one step to its end."""
    rows = backend.collect(backend.launch(Step(chunks))).rows
    assert [row.seq for row in rows] == [chunk.seq for chunk in chunks]
    return rows


def sampled(row: Row) -> Sampled:
    """The row, which has a token."""
    assert isinstance(row, Sampled), row
    return row


def advance(runs: Sequence[Run], sizes: Sequence[int | None] | None = None) -> None:
    """One step of all runs; each takes at most its size."""
    if not runs:
        return
    chunks = [run.chunk(size) for run, size in zip(runs, sizes or [None] * len(runs), strict=True)]
    for run, chunk, row in zip(runs, chunks, step(runs[0].backend, *chunks), strict=True):
        run.take(chunk, row)


def finish(runs: Sequence[Run], num_reply: int = NUM_REPLY) -> None:
    """Go on together; each run leaves the batch when its reply is long enough."""
    while left := [run for run in runs if len(run.reply) < num_reply]:
        advance(left)


def save(backend: ModelBackendPort, seq: SequenceId, start: int, end: int) -> Saved:
    """Snapshot every kind of layers to the end."""
    tickets = [backend.snapshot(seq, start, end, kind) for kind in backend.spec.kinds]
    return tuple(backend.payload(ticket) for ticket in tickets)


def needed(run: Run, blocks: Sequence[Saved], end: int) -> list[KVPayload]:
    """Of saved blocks, the payloads that bring a run to `end`."""
    spec = run.backend.spec
    after = {
        LayerKind.FULL: run.num_held,
        LayerKind.WINDOW: max(0, end - spec.window),
        LayerKind.STATE: end - 1,
    }
    payloads = [payload for block in blocks for payload in block]
    return [payload for payload in payloads if payload.end > after[payload.kind]]


def restored(run: Run, seq: int) -> Run:
    """Save a run as it is, close it and reopen it under another id."""
    parts = [save(run.backend, run.seq, 0, run.num_held)] if run.num_held else []
    run.backend.close_sequence(run.seq)
    again = begin(run.backend, seq, run.tokens, run.params)
    again.num_prompt = run.num_prompt
    if parts:
        again.load(parts)
    return again


def mask(*tokens: int) -> bytes:
    """The bits that allow these tokens."""
    bits = bytearray(max(tokens, default=0) // 8 + 1)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def check_batch(
    backend: ModelBackendPort, prompts: Sequence[list[int]], num_reply: int = NUM_REPLY
) -> list[list[int]]:
    """Replies side by side, which are those of each alone."""
    alone = [begin(backend, n, tokens).finish(num_reply) for n, tokens in enumerate(prompts)]
    together = [begin(backend, 1000 + n, tokens) for n, tokens in enumerate(prompts)]
    finish(together, num_reply)
    assert [run.reply for run in together] == alone
    return alone


def check_logprobs(
    backend: ModelBackendPort, tokens: list[int], expected: Any, limit: float
) -> None:
    """After chunks of all sizes, beside another sequence, within and beyond a window."""
    run, neighbour = begin(backend, 0, tokens), begin(backend, 1, prompt(100, seed=1))
    draw = Draw(replace(GREEDY, top_logprobs=20), run.num_prompt)
    ends = [end for end in (0, 1, 2, 7, 8, 21, 23, 53, 54, 60) if end <= len(tokens)]
    for start, end in itertools.pairwise(ends):
        beside = neighbour.chunk(3)
        row, other = step(backend, Chunk(run.seq, start, tuple(tokens[start:end]), draw), beside)
        neighbour.take(beside, other)
        logprob = sampled(row).logprob
        assert logprob is not None
        for token, value in logprob.top:
            assert abs(value - float(expected[end - 1][token])) < limit, (end, token)


def check_scores(backend: ModelBackendPort, tokens: list[int], expected: Any, limit: float) -> None:
    """Of all tokens but the first, in chunks of all sizes, beside another sequence."""
    run, neighbour = begin(backend, 10, tokens), begin(backend, 11, prompt(100, seed=1))
    ends = [end for end in (0, 1, 8, 21, 22, 54, 60) if end <= len(tokens)]
    for start, end in itertools.pairwise(ends):
        beside = neighbour.chunk(3)
        row, other = step(backend, scored_chunk(run, end, num_top=3), beside)
        neighbour.take(beside, other)
        run.num_held = end
        for place, score in enumerate(scores_of(row), start):
            for token, value in ((score.token, score.logprob), *score.top):
                assert abs(value - float(expected[place][token])) < limit, (place, token)
            best = max(value for _, value in score.top)
            assert abs(best - float(expected[place].max())) < limit


def scored_chunk(run: Run, end: int, num_top: int = 0) -> Chunk:
    """A run's tokens up to `end`, with the tokens after them as targets."""
    targets = tuple(run.tokens[run.num_held + 1 : end + 1])
    chunk = run.chunk(end - run.num_held)
    return replace(chunk, targets=targets, num_top=num_top)


def scores_of(row: Row) -> tuple[TokenLogprob, ...]:
    """The scores of a row that did not fail."""
    assert not isinstance(row, RowFailed), row
    return row.scores
