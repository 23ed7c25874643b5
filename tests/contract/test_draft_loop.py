"""Draft tokens that one kernel samples in a row: those of single steps, and replies stay the same.

On a GPU the kernel itself runs, elsewhere plain operations in its place.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.request import Job
from semantic.application.settings import EngineLimits
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.ports.backend import (
    LAST_SAMPLED,
    Chunk,
    Draw,
    ModelBackendPort,
    PendingTokens,
    SequenceId,
    Step,
)
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import prompt, sampled, step
from tests.contract.models import SIZES, write_model
from tests.contract.plain_kernels import PlainKernels
from tests.contract.plain_loop import PlainLoop
from tests.unit.application.engine_rig import GREEDY, ROOT, EngineRig

pytestmark = pytest.mark.contract

SEEDED = SamplingParams(temperature=0.9, seed=11)
PENALISED = replace(GREEDY, repetition_penalty=1.5)
FAMILIES = {"llama": (LlamaConfig, 64), "qwen3": (Qwen3Config, 128)}  # and head_dim


class Pair:
    """Makes backends of one model, with the kernels or plain operations in their place."""

    def __init__(self, make: Callable[[], ModelBackendPort], kernels: PlainKernels | None) -> None:
        self._make, self.kernels = make, kernels
        self._made: list[ModelBackendPort] = []

    def make(self) -> ModelBackendPort:
        self._made.append(self._make())
        return self._made[-1]

    def shutdown(self) -> None:
        for backend in self._made:
            backend.shutdown()


@pytest.fixture(params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    require_mlx()
    from semantic.adapters.outbound.backends.mlx import loading
    from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
    from semantic.adapters.outbound.backends.mlx.cuda import tuning

    kind, head_dim = FAMILIES[request.param]
    sizes: dict[str, Any] = {**SIZES, "max_position_embeddings": 4096}
    kernels = None
    if cuda.is_available():
        sizes |= {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
        sizes["head_dim"] = head_dim
    else:
        kernels = PlainKernels(monkeypatch)
        monkeypatch.setattr(loading, "_is_expanded", lambda _: False)
        tune = tuning.tune
        monkeypatch.setattr(tuning, "tune", lambda model, _: tune(model, 2**30))
    model = write_model(tmp_path, kind(**sizes))
    made = Pair(lambda: make_mlx(model, "float32" if kernels else "bfloat16"), kernels)
    yield made
    made.shutdown()


def begin(backend: ModelBackendPort, seq: int, tokens: list[int]) -> None:
    backend.open_sequence(SequenceId(seq), tokens)
    step(backend, Chunk(SequenceId(seq), 0, tuple(tokens)))


def in_steps(backend: ModelBackendPort, first: Chunk, count: int) -> list[int]:
    """The tokens of single steps."""
    tokens, chunk = [], first
    for _ in range(count):
        (row,) = backend.collect(backend.launch(Step((chunk,)))).rows
        tokens.append(sampled(row).token)
        chunk = replace(chunk, start=chunk.start + chunk.num_tokens, tokens=LAST_SAMPLED)
    return tokens


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_of_single_steps(pair: Pair, params: SamplingParams) -> None:
    backend = pair.make()
    loop = backend.loop
    assert loop is not None
    prompts = {0: prompt(30), 1: prompt(300, 1)}
    draws = {0: Draw(params, 30), 1: Draw(params, 300, num_before=7)}
    news = {0: (5,), 1: (7, 9, 11)}
    for seq, tokens in prompts.items():
        begin(backend, seq, tokens)
        begin(backend, 10 + seq, tokens)
    firsts = [Chunk(SequenceId(s), len(tokens), news[s], draws[s]) for s, tokens in prompts.items()]
    drafted = loop.sample(firsts, 5)
    assert [len(tokens) for tokens in drafted] == [5, 5]
    assert isinstance(drafted[0][:3], PendingTokens)
    assert drafted[0].seconds > 0
    expected = [
        in_steps(backend, replace(first, seq=SequenceId(10 + s)), 5)
        for s, first in enumerate(firsts)
    ]
    if pair.kernels is not None:  # else rounding may decide
        assert [[*tokens] for tokens in drafted] == expected
    # Go on after a cut, and from where the loop ended, each in its own way.
    ends = [first.start + first.num_tokens for first in firsts]
    assert backend.truncate(SequenceId(0), ends[0] + 2) == ends[0] + 2
    for seq, held in ((0, drafted[0][:2]), (1, drafted[1][:4])):
        known = [*prompts[seq], *news[seq], *held]
        begin(backend, 20 + seq, known)
        draw = replace(draws[seq], params=replace(GREEDY, top_logprobs=3))
        rows = step(
            backend,
            Chunk(SequenceId(seq), len(known), (3,), draw),
            Chunk(SequenceId(20 + seq), len(known), (3,), draw),
        )
        one, two = (sampled(row).logprob for row in rows)
        assert one is not None
        assert two is not None
        for (_, value), (_, fresh) in zip(one.top, two.top, strict=True):
            assert value == pytest.approx(fresh, abs=1e-4 if pair.kernels else 0.2)


def test_what_the_loop_does_not_sample_changes_nothing(pair: Pair) -> None:
    backend = pair.make()
    loop = backend.loop
    assert loop is not None
    begin(backend, 0, prompt(30))
    draw = Draw(GREEDY, 30)
    first = Chunk(SequenceId(0), 30, (5,), draw)
    for chunks, count in (
        ([replace(first, draw=replace(draw, params=PENALISED))], 3),
        ([replace(first, tokens=(5,) * 17)], 3),
        ([first], 17),
        ([first, first], 2),
    ):
        assert not loop.sample(chunks, count)
    assert len(in_steps(backend, first, 2)) == 2


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_begun_before_a_step_ends_follows_its_tokens(
    pair: Pair, params: SamplingParams
) -> None:
    """All of the first sequence's draft is accepted; the second one's step samples otherwise."""
    served, backend = pair.make(), pair.make()
    loop = backend.loop
    assert loop is not None
    prompts = {0: prompt(30), 1: prompt(300, 1)}
    firsts, verifying = [], []
    for seq, tokens in prompts.items():
        for owner, number in ((served, seq), (backend, seq), (backend, 10 + seq)):
            begin(owner, number, tokens)
        draw = Draw(params, len(tokens))
        firsts.append(Chunk(SequenceId(seq), len(tokens), (5,), draw))
        other = replace(draw, params=SamplingParams(temperature=3, seed=2)) if seq else draw
        verifying.append(replace(firsts[-1], draw=other))
    drafts = loop.sample(firsts, 4)
    step_chunks = tuple(replace(c, draft=d) for c, d in zip(verifying, drafts, strict=True))
    ticket = served.launch(Step(step_chunks))
    ahead = loop.sample_ahead(firsts, ticket, 3)
    assert [len(tokens) for tokens in ahead] == [3, 3]
    rows = [sampled(row) for row in served.collect(ticket).rows]
    if pair.kernels is not None:  # else rounding may decide
        assert [len(row.accepted) for row in rows] == [4, 0]
    for seq, (first, row, begun) in enumerate(zip(firsts, rows, ahead, strict=True)):
        new = (5, *(token.token for token in row.accepted), row.token)
        num_held = first.start + min(len(new) - 1, 4)
        assert backend.truncate(SequenceId(seq), num_held) == num_held
        follows = replace(first, start=num_held, tokens=new[num_held - first.start :])
        loop.adopt([follows], [begun])
        fresh = replace(first, seq=SequenceId(10 + seq), tokens=new)
        expected = in_steps(backend, fresh, 4)
        last = replace(first, start=first.start + len(new) + 2, tokens=(begun[2],))
        if pair.kernels is not None:
            assert [*begun] == expected[:3]
            assert in_steps(backend, last, 1) == expected[3:]


def test_a_step_that_the_loop_cannot_read_begins_no_draft(pair: Pair) -> None:
    served, backend = pair.make(), pair.make()
    loop = backend.loop
    assert loop is not None
    for owner in (served, backend):
        begin(owner, 0, prompt(30))
    first = Chunk(SequenceId(0), 30, (5,), Draw(GREEDY, 30))
    (draft,) = loop.sample([first], 2)
    on_host = replace(first, draw=Draw(PENALISED, 30))
    for chunk in (first, replace(first, draft=(1, 2)), replace(on_host, draft=draft)):
        ticket = served.launch(Step((chunk,)))
        assert not loop.sample_ahead([first], ticket, 3)
        served.collect(ticket)
        served.truncate(SequenceId(0), 30)
    ticket = served.launch(Step((replace(first, draft=draft),)))
    assert not loop.sample_ahead([first], ticket, 17)
    assert loop.sample_ahead([first], ticket, 3)
    backend.close_sequence(SequenceId(0))  # waits for the loop that writes to it
    served.collect(ticket)


def serve(pair: Pair, params: SamplingParams) -> EngineRig[ModelBackendPort]:
    """Replies with a draft model that is the served model itself."""
    backend = pair.make()
    rig = EngineRig(
        backend,
        AgentCacheStore(BlockPool(backend.spec, backend.bytes_for([500] * 64))),
        EngineLimits(max_idle=8),
        tokenizer=FakeTokenizer(),
    )
    rig.engine.add_draft_model(pair.make())
    jobs = [
        Job(
            f"{i}",
            f"{i}",
            ROOT,
            (*prompt(40), *prompt(9, i)),
            params,
            StopRules(ignore_eos=True),
            24 - 3 * i,
        )
        for i in range(3)
    ]
    rig.serve(jobs[0])
    rig.serve(*jobs[1:])
    plain = pair.make()
    for job in jobs:
        begin(plain, job_id := int(job.id), list(job.tokens[:-1]))
        first = Chunk(SequenceId(job_id), len(job.tokens) - 1, job.tokens[-1:], Draw(params, 49))
        if pair.kernels is not None:  # else rounding may decide
            assert list(rig.reply_state(job.id).tokens) == in_steps(plain, first, job.max_tokens)
    return rig


@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"]
)
def test_replies_are_those_of_plain_decoding(pair: Pair, params: SamplingParams) -> None:
    rig = serve(pair, params)
    usages = [rig.finished(f"{i}").usage for i in range(3)]
    assert sum(usage.accepted_by_source.get("draft_model", 0) for usage in usages) > 8
    if pair.kernels is not None:
        served, draft = pair.kernels.loops[:1], pair.kernels.loops
        assert served == draft  # only the draft model has one
        runs = draft[0].calls[2:]  # after those that check it
        assert (len(runs) > 3) == (params is not PENALISED)
        assert (draft[0].num_after > 3) == (params is not PENALISED)


def test_a_model_without_a_working_kernel_has_no_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pair.kernels is None:
        pytest.skip("the kernel works")

    def fail(*_: object) -> None:
        raise RuntimeError("compiling kernel failed")

    monkeypatch.setattr(PlainLoop, "run", fail)
    assert pair.make().loop is None


def test_a_loop_that_fails_is_not_used_again(pair: Pair) -> None:
    if pair.kernels is None:
        pytest.skip("the kernel does not fail")
    kernels, make = pair.kernels, pair._make

    def make_broken() -> ModelBackendPort:
        backend = make()
        if len(pair._made) == 1:  # the draft model
            assert backend.loop is not None
            kernels.loops[0].is_broken = True
        return backend

    pair._make = make_broken
    rig = serve(pair, GREEDY)
    assert len(kernels.loops[0].calls) == 4  # two to check it, a draft, and the one begun after it
    usages = [rig.finished(f"{i}").usage for i in range(3)]
    assert sum(usage.accepted_by_source.get("draft_model", 0) for usage in usages) > 8
