"""Drafts for models with recurrent layers on torch: replies equal those of plain decoding."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from semantic.domain.sampling import SamplingParams
from semantic.domain.spec import LayerKind
from semantic.ports.backend import Chunk, Draw, ModelBackendPort, RowFailed, SequenceId
from tests.contract.driver import GREEDY, begin, prompt, sampled, save, step
from tests.contract.test_draft_models import SEEDED
from tests.zoo.torch_library import TorchZoo

pytestmark = pytest.mark.contract

# Each kind of recurrent layer of transformers, with attention and without.
TYPES = ("bamba", "falcon_h1", "kimi_linear", "lfm2", "mamba2", "nemotron_h", "qwen3_5_text")
NUM_PROMPT, NUM_REPLY = 20, 14

GetBackend = Callable[[str], ModelBackendPort]


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> GetBackend:
    opened: dict[str, ModelBackendPort] = {}
    zoo = TorchZoo()

    def get(model_type: str) -> ModelBackendPort:
        if model_type not in opened:
            model = zoo.write_model(model_type, tmp_path_factory.mktemp(model_type))
            opened[model_type] = model.open_backend()
        return opened[model_type]

    return get


def alone(backend: ModelBackendPort, tokens: Sequence[int], params: SamplingParams) -> list[int]:
    run = begin(backend, 1, tokens, params)
    reply = run.finish(NUM_REPLY)
    backend.close_sequence(run.seq)
    return reply


def wrong_at(tokens: Sequence[int], place: int) -> tuple[int, ...]:
    return (*tokens[:place], (tokens[place] + 1) % 90, *tokens[place + 1 :])


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_no_draft_changes_a_reply(
    recurrent: GetBackend, model_type: str, params: SamplingParams
) -> None:
    """Drafts that are right up to each of their tokens, of two sequences in a step."""
    backend = recurrent(model_type)
    assert LayerKind.STATE in backend.spec.kinds
    prompts = [prompt(NUM_PROMPT, seed) for seed in (1, 2)]
    expected = [alone(backend, tokens, params) for tokens in prompts]
    runs = [begin(backend, 10 + n, tokens, params) for n, tokens in enumerate(prompts)]
    for run in runs:
        run.take(run.chunk(), *step(backend, run.chunk()))
    for place in (2, 0, 1):
        chunks = []
        for run, reply in zip(runs, expected, strict=True):
            draft = wrong_at(reply[len(run.reply) :][:3], place)
            chunks.append(replace(run.chunk(), draft=draft))
        for run, row in zip(runs, step(backend, *chunks), strict=True):
            drawn = [*sampled(row).accepted, sampled(row)]
            assert len(drawn) == place + 1
            run.tokens += [each.token for each in drawn]
            run.num_held += len(drawn)
    assert [run.finish(NUM_REPLY) for run in runs] == expected
    for run in runs:
        backend.close_sequence(run.seq)
    assert backend.memory() == 0


@pytest.mark.parametrize("model_type", TYPES)
def test_a_sequence_is_cut_saved_and_forked_inside_its_last_draft(
    recurrent: GetBackend, model_type: str
) -> None:
    backend, tokens = recurrent(model_type), prompt(NUM_PROMPT)
    expected = alone(backend, tokens, SEEDED)
    for end in range(NUM_PROMPT, NUM_PROMPT + 4):
        run = begin(backend, 1, tokens, SEEDED)
        run.take(run.chunk(), *step(backend, run.chunk()))
        (row,) = step(backend, replace(run.chunk(), draft=wrong_at(expected[1:5], 2)))
        assert len(sampled(row).accepted) == 2
        assert backend.memory() <= backend.bytes_for([NUM_PROMPT + 4])
        fork, restored = SequenceId(2), SequenceId(3)
        assert backend.fork(run.seq, fork, end)
        assert backend.truncate(run.seq, end) == end
        backend.open_sequence(restored, [*tokens, *expected][:end])
        backend.load(restored, save(backend, run.seq, 0, end), end)
        for seq in (fork, restored, run.seq):
            said = [*tokens, *expected][: end + 1]
            while len(said) < NUM_PROMPT + NUM_REPLY:
                chunk = Chunk(seq, len(said) - 1, (said[-1],), Draw(SEEDED, NUM_PROMPT))
                said.append(sampled(*step(backend, chunk)).token)
            assert said[NUM_PROMPT:] == expected
            backend.close_sequence(seq)


def test_a_state_is_not_cut_back_further_than_one_draft(recurrent: GetBackend) -> None:
    backend, tokens = recurrent("lfm2"), prompt(NUM_PROMPT)
    expected = alone(backend, tokens, GREEDY)
    run = begin(backend, 1, tokens)
    run.take(run.chunk(), *step(backend, run.chunk()))
    step(backend, replace(run.chunk(), draft=wrong_at(expected[1:4], 1)))
    assert not backend.fork(run.seq, SequenceId(2), NUM_PROMPT - 1)
    (row,) = step(backend, Chunk(run.seq, NUM_PROMPT + 2, (expected[2],), Draw(GREEDY, NUM_PROMPT)))
    assert sampled(row).token == expected[3]
    assert backend.truncate(run.seq, NUM_PROMPT + 1) == 0
    backend.close_sequence(run.seq)


def test_a_row_that_fails_keeps_the_state_before_its_draft(
    recurrent: GetBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, tokens = recurrent("lfm2"), prompt(NUM_PROMPT)
    expected = alone(backend, tokens, GREEDY)
    run = begin(backend, 1, tokens)
    run.take(run.chunk(), *step(backend, run.chunk()))
    forward = backend._forward  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_forward", lambda spans: forward(spans) * float("nan"))
        (row,) = step(backend, replace(run.chunk(), draft=tuple(expected[1:4])))
    assert isinstance(row, RowFailed)
    assert run.finish(NUM_REPLY) == expected
    backend.close_sequence(run.seq)


@pytest.mark.parametrize("model_type", ["mamba", "jamba"])
def test_a_model_that_takes_single_tokens_has_no_drafts(
    recurrent: GetBackend, model_type: str
) -> None:
    """Each draft token would take a pass, as each decoded one."""
    assert recurrent(model_type).traits.max_draft == 0
