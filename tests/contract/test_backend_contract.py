"""Whatever happens to a sequence, its reply is the one it gives fresh and alone."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.domain.errors import CacheCorruptionError, InvalidRequestError
from semantic.domain.sampling import SamplingParams
from semantic.domain.spec import LayerKind
from semantic.ports.backend import ModelBackendPort, RowFailed, SequenceId, Step
from tests.contract.conftest import Alone, Subject, each_kind
from tests.contract.driver import (
    NUM_REPLY,
    Run,
    advance,
    begin,
    finish,
    needed,
    prompt,
    restored,
    sampled,
    step,
)
from tests.contract.models import BLOCK_TOKENS

pytestmark = pytest.mark.contract

FULL_BLOCKS = (BLOCK_TOKENS, 2 * BLOCK_TOKENS)


def test_every_token_of_the_context_counts(alone: Alone) -> None:
    """Otherwise the tests below could not fail."""
    tokens = prompt(20)
    replies = {tuple(alone(tokens, num_reply=12))}
    for place in (9, 14, 19):
        changed = [*tokens[:place], (tokens[place] + 1) % 96, *tokens[place + 1 :]]
        replies.add(tuple(alone(changed, num_reply=12)))
    assert len(replies) == 4


def test_every_buffer_of_a_payload_counts(backend: ModelBackendPort, alone: Alone) -> None:
    """A part of another sequence shows."""
    (own,) = begin(backend, 0, prompt(20)).seal(16)
    (foreign,) = begin(backend, 1, prompt(20, seed=1)).seal(16)
    places = [(i, j) for i, payload in enumerate(own) for j in range(len(payload.buffers))]
    for i, j in places:
        buffers = list(own[i].buffers)
        buffers[j] = foreign[i].buffers[j]
        mixed = (*own[:i], replace(own[i], buffers=tuple(buffers)), *own[i + 1 :])
        run = begin(backend, 2 + 10 * i + j, prompt(20))
        run.load([mixed])
        assert run.finish(12) != alone(prompt(20), num_reply=12), buffers[j].name


def test_full_attention_state_takes_the_bytes_that_spec_and_traits_say(
    backend: ModelBackendPort,
) -> None:
    (parts,) = begin(backend, 0, prompt(20)).seal(16)
    sizes = [part.nbytes for part in parts if part.kind is LayerKind.FULL]
    bits = backend.traits.state_bits
    assert all(size == backend.spec.kind_bytes(LayerKind.FULL, 16, bits) for size in sizes)


# -- batches and chunks -------------------------------------------------------------------------


def test_a_mixed_batch(backend: ModelBackendPort, alone: Alone) -> None:
    lengths = (1, 3, 8, 13, 40)
    runs = [begin(backend, n, prompt(n, seed=n)) for n in lengths]
    finish(runs)
    assert [run.reply for run in runs] == [alone(prompt(n, seed=n)) for n in lengths]


def test_chunks_of_every_size(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(17)
    for size in range(1, len(tokens) + 1):
        run = begin(backend, size, tokens)
        while not run.reply:
            advance([run], [size])
        assert run.finish(2) == alone(tokens)[:2], size


def test_a_long_prompt_in_chunks(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(290)
    run = begin(backend, 0, tokens)
    while not run.reply:
        advance([run], [90])
    assert run.finish() == alone(tokens)


def test_last_sampled_is_the_token_itself(backend: ModelBackendPort, alone: Alone) -> None:
    fed, explicit = begin(backend, 0, prompt(11)), begin(backend, 1, prompt(17, seed=1))
    advance([fed, explicit])
    while len(fed.reply) < NUM_REPLY:
        chunks = fed.chunk_of_last(), explicit.chunk()
        for run, chunk, row in zip((fed, explicit), chunks, step(backend, *chunks), strict=True):
            run.take(chunk, row)
    assert fed.reply == alone(prompt(11))
    assert explicit.reply == alone(prompt(17, seed=1))


@pytest.mark.parametrize(
    "subject", ["fake-pipelined", "mlx-llama", "mlx-deepseek-v3"], indirect=True
)
def test_a_step_ahead_and_a_stop_seen_late(backend: ModelBackendPort, alone: Alone) -> None:
    assert backend.traits.pipeline_depth == 1
    run = begin(backend, 0, prompt(11))
    chunk = run.chunk()
    ticket = backend.launch(Step((chunk,)))
    reply: list[int] = []
    while len(reply) < 4:
        run.num_held += chunk.num_tokens
        chunk = run.chunk_of_last()
        following = backend.launch(Step((chunk,)))
        reply.append(sampled(*backend.collect(ticket).rows).token)
        ticket = following
    assert reply == alone(prompt(11))[:4]
    # The fourth token stops the reply, but the step that computed it is under way.
    backend.collect(ticket)
    assert backend.truncate(run.seq, 14) == 14
    tokens = [*prompt(11), *reply[:3], *prompt(4, seed=1)]
    assert Run(backend, run.seq, tokens, len(tokens), num_held=14).finish() == alone(tokens)


# -- saved and restored -------------------------------------------------------------------------


def test_restored_around_block_boundaries(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(25)
    for end in (1, 7, 8, 9, 15, 16, 17, 24):
        source = begin(backend, end, tokens)
        run = begin(backend, 100 + end, tokens)
        run.load(source.seal(*(full for full in FULL_BLOCKS if full < end), end))
        assert run.finish() == alone(tokens), end


def test_restored_over_several_calls(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(22)
    parts = begin(backend, 0, tokens).seal(*FULL_BLOCKS, 19)
    run = begin(backend, 1, tokens)
    for count in range(1, len(parts) + 1):
        run.load(parts[:count])
    assert run.finish() == alone(tokens)


def test_restored_onto_what_was_computed(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(22)
    parts = begin(backend, 0, tokens).seal(*FULL_BLOCKS, 19)
    run = begin(backend, 1, tokens)
    run.compute(BLOCK_TOKENS)
    run.load(parts)
    assert run.finish() == alone(tokens)


def test_window_and_state_may_come_last(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(22)
    blocks = begin(backend, 0, tokens).seal(*FULL_BLOCKS, 20)
    if LayerKind.FULL not in backend.spec.kinds:
        return
    run = begin(backend, 1, tokens)
    parts = needed(run, blocks, 20)
    for end, block in zip((*FULL_BLOCKS, 20), blocks, strict=True):
        backend.load(run.seq, [part for part in block if part.kind is LayerKind.FULL], end)
    backend.load(run.seq, [part for part in parts if part.kind is not LayerKind.FULL], 20)
    run.num_held = 20
    assert run.finish() == alone(tokens)


def test_without_window_or_state_it_cannot_go_on(backend: ModelBackendPort) -> None:
    if len(backend.spec.kinds) == 1:
        return
    (block,) = begin(backend, 0, prompt(22)).seal(20)
    run = begin(backend, 1, prompt(22))
    backend.load(run.seq, [part for part in block if part.kind is LayerKind.FULL], 20)
    run.num_held = 20
    assert isinstance(step(backend, run.chunk())[0], RowFailed)


def test_a_tail_cut_at_every_token(backend: ModelBackendPort, alone: Alone) -> None:
    """The conversations part there."""
    blocks = begin(backend, 0, prompt(24)).seal(*FULL_BLOCKS, 23)
    has_state = LayerKind.STATE in backend.spec.kinds
    for end in range(17, 24):
        tokens = [*prompt(24)[:end], *prompt(6, seed=9)]
        run = begin(backend, end, tokens)
        if has_state and end < 23:
            with pytest.raises(CacheCorruptionError):
                backend.load(run.seq, needed(run, blocks, end), end)
            run.load(blocks[:-1])
        else:
            run.load(blocks, end)
        assert run.finish() == alone(tokens), end


@pytest.mark.parametrize("end", [13, 256])
def test_a_payload_is_not_touched_by_what_follows(
    backend: ModelBackendPort, alone: Alone, end: int
) -> None:
    tokens = prompt(end + 1)
    run = begin(backend, 0, tokens)
    run.compute(end)
    tickets = [backend.snapshot(run.seq, 0, end, kind) for kind in backend.spec.kinds]
    assert backend.truncate(run.seq, 0) == 0
    Run(backend, run.seq, prompt(end + 1, seed=1), end + 1).compute(end)
    payloads = tuple(backend.payload(ticket) for ticket in tickets)
    backend.close_sequence(run.seq)
    again = begin(backend, 1, tokens)
    again.load([payloads])
    assert again.finish() == alone(tokens)


# -- forked and cut -----------------------------------------------------------------------------


def test_fork_then_diverge(subject: Subject, backend: ModelBackendPort, alone: Alone) -> None:
    source = begin(backend, 0, prompt(18))
    source.compute(17)
    forks: list[Run] = []
    for num_tokens in (0, 1, 8, 13, 16, 17):
        used, seq = backend.memory(), SequenceId(1 + num_tokens)
        is_forked = backend.fork(source.seq, seq, num_tokens)
        assert is_forked == (subject.cuts_anywhere or num_tokens in (0, 17))
        tokens = [*prompt(18)[:num_tokens], *prompt(5, seed=3)]
        if is_forked:
            forks.append(Run(backend, seq, tokens, len(tokens), num_held=num_tokens))
        else:
            assert backend.memory() == used
            begin(backend, seq, tokens)
    finish([*forks, source])
    for run in (source, *forks):
        assert run.reply == alone(run.tokens[: run.num_prompt]), run.num_prompt


def test_truncate_then_go_on(subject: Subject, backend: ModelBackendPort, alone: Alone) -> None:
    for num_tokens in (0, 1, 7, 8, 9, 16, 19):
        run = begin(backend, num_tokens, prompt(20))
        run.finish(3)
        reached = backend.truncate(run.seq, num_tokens)
        assert reached == num_tokens or (reached < num_tokens and not subject.cuts_anywhere)
        tokens = [*prompt(20)[:num_tokens], *prompt(4, seed=5)]
        run = Run(backend, run.seq, tokens, len(tokens), num_held=reached)
        assert run.finish() == alone(tokens), num_tokens


def test_truncate_to_no_less_changes_nothing(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(20))
    run.finish(3)
    assert backend.truncate(run.seq, 22) == 22
    assert backend.truncate(run.seq, 1000) == 22
    chunk = run.chunk_of_last()
    run.take(chunk, *step(backend, chunk))
    assert run.finish() == alone(prompt(20))


def test_state_lost_by_a_truncation_is_loaded_again(
    backend: ModelBackendPort, alone: Alone
) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.8)
    run = begin(backend, 0, prompt(20), params)
    parts = run.seal(*FULL_BLOCKS)
    run.finish(2)
    run.num_held = backend.truncate(run.seq, 16)
    assert run.num_held in (0, 16)
    if run.num_held == 0:
        run.load(parts)
    assert run.finish() == alone(prompt(20), params)


# -- all of it ----------------------------------------------------------------------------------

_SIZES = st.lists(st.none() | st.integers(1, 9), min_size=3, max_size=3)
_DEED = st.sampled_from(["run", "run", "restore", "fork", "truncate"])


@each_kind
@settings(max_examples=20, deadline=None, derandomize=True)
@given(deeds=st.lists(st.tuples(_DEED, st.integers(0, 2), st.integers(0, 12), _SIZES), max_size=12))
def test_any_history(
    shared_backend: ModelBackendPort,
    alone: Alone,
    deeds: list[tuple[str, int, int, list[int | None]]],
) -> None:
    prompts = [prompt(n, seed=n) for n in (2, 15, 26)]
    ids = itertools.count()
    runs = [begin(shared_backend, next(ids), tokens) for tokens in prompts]
    for deed, index, number, sizes in deeds:
        run = runs[index]
        match deed:
            case "restore":
                runs[index] = restored(run, next(ids))
            case "fork":
                fork = Run(run.backend, SequenceId(next(ids)), run.tokens, run.num_prompt)
                if shared_backend.fork(run.seq, fork.seq, max(0, run.num_held - number)):
                    fork.num_held = max(0, run.num_held - number)
                    shared_backend.close_sequence(run.seq)
                    runs[index] = fork
            case "truncate":
                run.num_held = shared_backend.truncate(run.seq, max(0, run.num_held - number))
        advance(runs, sizes)
    finish(runs)
    for run, tokens in zip(runs, prompts, strict=True):
        shared_backend.close_sequence(run.seq)
        assert run.reply[:NUM_REPLY] == alone(tokens)
    assert shared_backend.memory() == 0


@each_kind
def test_a_device_reports_its_memory(shared_backend: ModelBackendPort) -> None:
    memory = shared_backend.device_memory()
    assert memory is None or 0 < memory.used <= memory.total


# -- embeddings ---------------------------------------------------------------------------------


def embedded(backend: ModelBackendPort, seq: int, tokens: list[int], *ends: int) -> list[float]:
    """The sum of hidden states, computed in pieces that end there."""
    backend.open_sequence(SequenceId(seq), tokens)
    pieces = [
        backend.embed(SequenceId(seq), start, tokens[start:end])
        for start, end in itertools.pairwise((0, *ends, len(tokens)))
    ]
    return [sum(values) for values in zip(*pieces, strict=True)]


def test_a_text_has_the_same_embedding_in_pieces_and_beside_others(
    backend: ModelBackendPort,
) -> None:
    tokens = prompt(30)
    whole = embedded(backend, 0, tokens)
    neighbour = begin(backend, 1, prompt(9, seed=1))
    advance([neighbour])
    # A GPU's kernels add up in another order for every length, and norms enlarge what is small.
    compute = backend.traits.compute
    limit = 2e-2 if compute is not None and compute.device == "cuda" else 1e-3
    assert embedded(backend, 2, tokens, 1, 9, 22) == pytest.approx(whole, rel=1e-3, abs=limit)
    backend.close_sequence(SequenceId(0))
    assert embedded(backend, 0, tokens) == pytest.approx(whole, rel=1e-5, abs=1e-5)
    other = embedded(backend, 3, [*tokens[:-1], (tokens[-1] + 1) % 96])
    assert other != pytest.approx(whole, rel=1e-3, abs=1e-3)


def test_embedding_leaves_replies_as_they_are(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(12))
    advance([run])
    embedded(backend, 1, prompt(20, seed=1), 7)
    advance([run])
    assert run.finish() == alone(prompt(12))


@each_kind
@pytest.mark.parametrize(
    "start, tokens", [(0, [10**6]), (0, []), (5, [1])], ids=["unknown id", "nothing", "a gap"]
)
def test_what_cannot_be_embedded_is_refused(
    backend: ModelBackendPort, start: int, tokens: list[int]
) -> None:
    backend.open_sequence(SequenceId(0), [1, 2])
    with pytest.raises(InvalidRequestError):
        backend.embed(SequenceId(0), start, tokens)
