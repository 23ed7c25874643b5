"""A refused call changes neither its own sequence nor the others in the batch."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from semantic.domain.errors import CacheCorruptionError, InvalidRequestError
from semantic.domain.sampling import SamplingParams
from semantic.domain.spec import LayerKind
from semantic.ports.backend import (
    Chunk,
    HostBuffer,
    KVPayload,
    ModelBackendPort,
    RowFailed,
    SequenceId,
    Step,
)
from tests.contract.conftest import Alone, Subject, each_kind
from tests.contract.driver import (
    GREEDY,
    NUM_REPLY,
    Run,
    Saved,
    advance,
    begin,
    finish,
    mask,
    prompt,
    sampled,
    save,
    step,
)

pytestmark = [pytest.mark.contract, each_kind]

NOTHING = mask()


def _is_refused(run: Run, bad: Chunk, neighbour: Run) -> None:
    """Put a bad chunk on either side of a good one: it fails, and its neighbour does not."""
    for is_first in (True, False):
        good = neighbour.chunk()
        rows = step(run.backend, *((bad, good) if is_first else (good, bad)))
        refused, answered = rows if is_first else reversed(rows)
        assert isinstance(refused, RowFailed)
        assert refused.reason
        neighbour.take(good, answered)


def _pair(backend: ModelBackendPort, params: SamplingParams = GREEDY) -> tuple[Run, Run]:
    """A run that something is refused, and its neighbour."""
    return begin(backend, 0, prompt(10), params), begin(backend, 1, prompt(13, seed=1))


def _go_on(alone: Alone, run: Run, neighbour: Run, num_reply: int = NUM_REPLY) -> None:
    """Both finish as if nothing had happened."""
    finish([run, neighbour], num_reply)
    assert run.reply == alone(run.tokens[: run.num_prompt], run.params, num_reply)
    assert neighbour.reply == alone(prompt(13, seed=1), num_reply=num_reply)


# -- rows ---------------------------------------------------------------------------------------


def test_bad_tokens(backend: ModelBackendPort, alone: Alone) -> None:
    run, neighbour = _pair(backend)
    for tokens in [(), (-1,), (3, backend.spec.vocab_size), (2**40, 3)]:
        _is_refused(run, replace(run.chunk(), tokens=tokens), neighbour)
        advance([run], [2])
    _go_on(alone, run, neighbour, 8)


def test_a_chunk_that_starts_elsewhere(backend: ModelBackendPort, alone: Alone) -> None:
    run, neighbour = _pair(backend)
    run.compute(4)
    for start in (-1, 0, 3, 5):
        _is_refused(run, replace(run.chunk(), start=start), neighbour)
    _go_on(alone, run, neighbour, 8)


def test_last_sampled_where_nothing_was_sampled(backend: ModelBackendPort, alone: Alone) -> None:
    """Neither at the start, nor after tokens that asked for none, nor after a cut."""
    run, neighbour = _pair(backend)
    _is_refused(run, run.chunk_of_last(), neighbour)
    run.finish(1)
    run.tokens += prompt(3, seed=2)
    advance([run], [2])
    _is_refused(run, run.chunk_of_last(), neighbour)
    advance([run])
    run.num_held = backend.truncate(run.seq, 10)
    _is_refused(run, run.chunk_of_last(), neighbour)
    run.tokens, run.num_held = prompt(10), backend.truncate(run.seq, 0)
    assert run.finish() == alone(prompt(10))
    assert neighbour.reply == alone(prompt(13, seed=1))


def test_last_sampled_is_gone_after_a_load(backend: ModelBackendPort, alone: Alone) -> None:
    parts = begin(backend, 0, prompt(17)).seal(8, 16)
    run, neighbour = begin(backend, 1, prompt(17)), begin(backend, 2, prompt(13, seed=1))
    sampled(*step(backend, replace(run.chunk(8), draw=run.chunk().draw)))
    run.num_held = 8
    run.load(parts)
    _is_refused(run, run.chunk_of_last(), neighbour)
    assert run.finish() == alone(prompt(17))


def test_a_sequence_that_is_not_open(backend: ModelBackendPort, alone: Alone) -> None:
    closed, neighbour = _pair(backend)
    backend.close_sequence(closed.seq)
    _is_refused(closed, closed.chunk(), neighbour)
    assert neighbour.finish() == alone(prompt(13, seed=1))


def test_a_sequence_twice_in_a_step(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(10))
    chunk = run.chunk(4)
    first, again, following = step(backend, chunk, run.chunk(8), replace(run.chunk(8), start=4))
    run.take(chunk, first)
    assert isinstance(again, RowFailed)
    assert isinstance(following, RowFailed)
    assert run.finish() == alone(prompt(10))


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1, seed=7),
        SamplingParams(temperature=1, seed=7, min_p=0.1, top_k=3, top_p=0.5),
    ],
    ids=["greedy", "sampled", "filtered"],
)
def test_a_mask_that_allows_nothing(
    backend: ModelBackendPort, alone: Alone, params: SamplingParams
) -> None:
    run, neighbour = _pair(backend, params)
    _is_refused(run, run.chunk(allowed=NOTHING), neighbour)
    run.finish(3)
    _is_refused(run, run.chunk(allowed=NOTHING), neighbour)
    _is_refused(run, run.chunk_of_last(allowed=NOTHING), neighbour)
    chunk = run.chunk_of_last()
    run.take(chunk, *step(backend, chunk))
    _go_on(alone, run, neighbour)


def test_a_failed_row_leaves_the_history_as_it_was(backend: ModelBackendPort, alone: Alone) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.8)
    tokens = prompt(12)
    parts = begin(backend, 0, tokens).seal(8, 11)
    run = begin(backend, 1, tokens, params)
    run.load(parts[:1])
    other = replace(run.chunk(allowed=NOTHING), tokens=tuple(prompt(4, seed=3)))
    (row,) = step(backend, other)
    assert isinstance(row, RowFailed)
    run.load(parts)
    assert run.finish() == alone(tokens, params)


def test_a_step_of_refused_rows_only(backend: ModelBackendPort) -> None:
    run = begin(backend, 0, prompt(10))
    (row,) = step(backend, replace(run.chunk(), tokens=()))
    assert isinstance(row, RowFailed)
    assert backend.collect(backend.launch(Step(()))).rows == ()


# -- payloads -----------------------------------------------------------------------------------


def _shorten(buffer: HostBuffer) -> HostBuffer:
    return replace(buffer, source=bytes(buffer.data)[:-4])


def _is_corrupt(run: Run, *blocks: Saved, end: int | None = None) -> bool:
    """Whether the backend refuses to load this."""
    end = blocks[-1][0].end if end is None else end
    parts = [p for b in blocks for p in b if p.kind is not LayerKind.STATE or b is blocks[-1]]
    try:
        run.backend.load(run.seq, parts, end)
    except CacheCorruptionError:
        return True
    return False


BAD_PAYLOADS: dict[str, Callable[[KVPayload], KVPayload]] = {
    "another abi": lambda p: replace(p, abi="another.v1"),
    "earlier": lambda p: replace(p, start=p.start - 1, end=p.end - 1),
    "later": lambda p: replace(p, start=p.start + 1, end=p.end + 1),
    "said to be longer": lambda p: replace(p, end=p.end + 1),
    "said to be shorter": lambda p: replace(p, end=p.end - 1),
    "without buffers": lambda p: replace(p, buffers=()),
    "without its last buffer": lambda p: replace(p, buffers=p.buffers[:-1]),
    "truncated": lambda p: replace(p, buffers=(*p.buffers[:-1], _shorten(p.buffers[-1]))),
    "empty": lambda p: replace(p, buffers=tuple(replace(b, source=b"") for b in p.buffers)),
}


def _spoilt(block: Saved) -> Iterator[tuple[str, Saved]]:
    """The block with one of its payloads bad, in every way."""
    for name, spoil in BAD_PAYLOADS.items():
        for i, payload in enumerate(block):
            yield f"{payload.kind.value} {name}", (*block[:i], spoil(payload), *block[i + 1 :])


def test_a_bad_payload_loads_nothing(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(25)
    first, second = begin(backend, 0, tokens).seal(8, 16)
    run, neighbour = begin(backend, 1, tokens), begin(backend, 2, prompt(13, seed=1))
    neighbour.finish(2)
    for name, bad in _spoilt(second):
        assert _is_corrupt(run, first, bad, end=16), name
    run.load([first])
    for name, bad in _spoilt(second):
        windows = tuple(part for part in first if part.kind is LayerKind.WINDOW)
        assert _is_corrupt(run, windows, bad, end=16), name
    run.load([first, second])
    _go_on(alone, run, neighbour)


def test_an_end_that_is_not_reached_or_passed(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(25)
    first, second = begin(backend, 0, tokens).seal(8, 16)
    run = begin(backend, 1, tokens)
    for end in (0, 8, 17):
        assert _is_corrupt(run, first, second, end=end), end
    assert run.finish() == alone(tokens)


def test_payloads_out_of_order(backend: ModelBackendPort, alone: Alone) -> None:
    tokens = prompt(25)
    parts = begin(backend, 0, tokens).seal(8, 16, 24)
    run = begin(backend, 1, tokens)
    for order in [(1,), (1, 0), (0, 0), (0, 2)]:
        assert _is_corrupt(run, *(parts[i] for i in order)), order
    assert run.finish() == alone(tokens)


def test_state_of_tokens_that_are_not_known(backend: ModelBackendPort, alone: Alone) -> None:
    """Penalties and positions would be wrong."""
    parts = begin(backend, 0, prompt(25)).seal(8, 16)
    run = begin(backend, 1, prompt(25)[:15])
    assert _is_corrupt(run, *parts)
    failed = replace(run.chunk(allowed=NOTHING), tokens=tuple(prompt(25)))
    assert isinstance(step(backend, failed)[0], RowFailed)
    assert _is_corrupt(run, *parts)
    assert run.finish() == alone(prompt(25)[:15])


def test_tokens_that_were_cut_off_are_not_known(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(25))
    parts = run.seal(8, 16)
    run.num_held = backend.truncate(run.seq, 8)
    assert _is_corrupt(run, *(parts if run.num_held == 0 else parts[1:]), end=16)
    assert run.finish() == alone(prompt(25))


def test_loading_nothing_changes_nothing(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(10))
    backend.load(run.seq, [], 0)
    run.finish(2)
    backend.load(run.seq, [], run.num_held)
    chunk = run.chunk_of_last()
    run.take(chunk, *step(backend, chunk))
    assert run.finish() == alone(prompt(10))


def test_a_load_into_a_sequence_that_is_not_open(backend: ModelBackendPort) -> None:
    with pytest.raises(KeyError):
        backend.load(SequenceId(0), [], 0)


def test_a_snapshot_of_what_is_not_held(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(11))
    run.compute(9)
    for start, end in [(0, 0), (5, 4), (-1, 4), (0, 10), (9, 10)]:
        for kind in backend.spec.kinds:
            with pytest.raises(ValueError, match="hold"):
                backend.snapshot(run.seq, start, end, kind)
    for kind in {*LayerKind} - {*backend.spec.kinds}:
        with pytest.raises(ValueError, match="hold"):
            backend.snapshot(run.seq, 0, 9, kind)
    assert run.finish() == alone(prompt(11))


def test_a_snapshot_whose_window_or_state_is_gone(
    subject: Subject, backend: ModelBackendPort, alone: Alone
) -> None:
    run = begin(backend, 0, prompt(25))
    run.compute(20)
    if LayerKind.FULL in backend.spec.kinds:
        assert backend.payload(backend.snapshot(run.seq, 0, 16, LayerKind.FULL)).end == 16
    if subject.cuts_anywhere:
        assert {payload.end for payload in save(backend, run.seq, 0, 16)} == {16}
    else:
        with pytest.raises(ValueError, match="do not hold"):
            save(backend, run.seq, 0, 16)
    assert run.finish() == alone(prompt(25))


# -- sequences and memory -----------------------------------------------------------------------


def test_open_twice(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(10))
    run.compute(5)
    with pytest.raises(ValueError, match="open"):
        backend.open_sequence(run.seq, prompt(3))
    with pytest.raises(ValueError, match="open"):
        backend.fork(run.seq, run.seq, 5)
    assert run.finish() == alone(prompt(10))


def test_open_with_ids_out_of_range(backend: ModelBackendPort) -> None:
    for token in (-1, backend.spec.vocab_size):
        with pytest.raises(InvalidRequestError):
            backend.open_sequence(SequenceId(0), [1, token])
    backend.open_sequence(SequenceId(0), [1, backend.spec.vocab_size - 1])


def test_fork_of_what_is_not_held(backend: ModelBackendPort) -> None:
    run = begin(backend, 0, prompt(19))
    run.compute(17)
    for num_tokens in (-1, 18):
        assert not backend.fork(run.seq, SequenceId(1), num_tokens)
    begin(backend, 1, prompt(3))


def test_truncate_below_nothing(backend: ModelBackendPort, alone: Alone) -> None:
    run = begin(backend, 0, prompt(10))
    run.compute(5)
    with pytest.raises(ValueError, match="-1"):
        backend.truncate(run.seq, -1)
    assert run.finish() == alone(prompt(10))


def test_a_ticket_of_the_other_kind_is_refused(backend: ModelBackendPort) -> None:
    run = begin(backend, 0, prompt(10))
    stepped = backend.launch(Step((run.chunk(),)))
    saved = backend.snapshot(run.seq, 0, 10, backend.spec.kinds[0])
    with pytest.raises(TypeError):
        backend.collect(saved)
    with pytest.raises(TypeError):
        backend.payload(stepped)
    sampled(*backend.collect(stepped).rows)


def test_closing_what_is_not_open_does_nothing(backend: ModelBackendPort) -> None:
    backend.close_sequence(SequenceId(0))
    begin(backend, 0, prompt(3))
    backend.close_sequence(SequenceId(0))
    backend.close_sequence(SequenceId(0))


def test_closing_everything_gives_the_memory_back(backend: ModelBackendPort) -> None:
    runs = [begin(backend, n, prompt(n)) for n in (1, 9, 300)]
    finish(runs, 2)
    assert backend.fork(runs[1].seq, SequenceId(1000), runs[1].num_held)
    lengths = [run.num_held for run in runs] + [runs[1].num_held]
    assert 0 < backend.memory() <= backend.bytes_for(lengths)
    for run in runs:
        backend.close_sequence(run.seq)
    backend.close_sequence(SequenceId(1000))
    assert backend.memory() == 0


def test_bytes_grow_with_tokens_and_with_sequences(backend: ModelBackendPort) -> None:
    sizes = [backend.bytes_for([length]) for length in range(0, 1200, 40)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[1]
    assert backend.bytes_for([]) == 0
    assert backend.bytes_for([100, 700]) == backend.bytes_for([700]) + backend.bytes_for([100])


def test_shutdown_drops_every_sequence(subject: Subject) -> None:
    backend = subject.make()
    begin(backend, 0, prompt(10)).finish(1)
    backend.shutdown()
    assert backend.memory() == 0
