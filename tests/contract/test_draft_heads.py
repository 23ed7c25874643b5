"""Replies with a model's own MTP head, by the engine, equal those of plain decoding."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.adapters.outbound.backends.mtp import state as head_state
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.request import Job
from semantic.application.settings import EngineLimits
from semantic.domain.pool import BlockPool
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.ports.backend import Chunk, Draw, ModelBackendPort, SequenceId
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import GREEDY, begin, prompt, sampled, step
from tests.contract.head_models import (
    ATTENDING_HEADS,
    RECURRENT_HEADS,
    fuse_experts,
    write_head_model,
)
from tests.contract.models import TinyModel
from tests.contract.test_draft_models import SEEDED, make_job
from tests.unit.application.engine_rig import EngineRig

pytestmark = pytest.mark.contract

# How much the layers add: nothing, so that the head is always right; little; and as much as usual.
ALWAYS, MOSTLY, RARELY = 0.0, 0.004, 1.0

NUM_REPLY = 16  # two blocks, and several drafts

# Each family on each backend.
BACKENDS = ("torch", "mlx")
ATTENDING = tuple(f"{library}-{family}" for library in BACKENDS for family in ATTENDING_HEADS)
RECURRENT = tuple(f"{library}-{family}" for library in BACKENDS for family in RECURRENT_HEADS)
SUBJECTS = (*ATTENDING, *RECURRENT)

# A head that is mostly right and one that is rarely, for each family; with the other way to sample
# too, where state is kept in another way.
CASES = (
    *((subject, MOSTLY, GREEDY) for subject in SUBJECTS),
    *((subject, RARELY, SEEDED) for subject in SUBJECTS),
    *((subject, MOSTLY, SEEDED) for subject in ("torch-deepseek-v3", "mlx-qwen3.5")),
    *((subject, RARELY, GREEDY) for subject in ("torch-deepseek-v3", "mlx-qwen3.5")),
)
NAMES = {MOSTLY: "mostly", RARELY: "rarely", GREEDY: "greedy", SEEDED: "seeded"}


@dataclass(frozen=True)
class HeadModel:
    """A model with a head, for one of the backends."""

    library: str
    model: TinyModel

    def load(self, *, has_head: bool = True) -> Any:
        model = self.model
        if self.library == "mlx":
            return make_mlx(model, has_head=has_head)
        options = TorchOptions("float32", num_threads=1, has_head=has_head)
        return TorchBackend(model.directory, model.spec, options)

    def shared(self, *, has_head: bool = True) -> Any:
        """A backend that other tests use too; its sequences are closed after each of them."""
        if (self, has_head) not in _SHARED:
            _SHARED[self, has_head] = self.load(has_head=has_head)
        return _SHARED[self, has_head]


_SHARED: dict[tuple[HeadModel, bool], Any] = {}

GetHeadModel = Callable[[str, float], HeadModel]


@pytest.fixture(scope="module")
def head_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetHeadModel]:
    written: dict[tuple[str, float], TinyModel] = {}

    def get(subject: str, share: float) -> HeadModel:
        library, _, family = subject.partition("-")
        if library == "mlx":
            require_mlx()
        if (family, share) not in written:
            directory = tmp_path_factory.mktemp(family)
            written[family, share] = write_head_model(directory, family, share)
        return HeadModel(library, written[family, share])

    yield get
    for backend in _SHARED.values():
        backend.shutdown()
    _SHARED.clear()


@pytest.fixture(autouse=True)
def _no_sequences() -> Iterator[None]:
    yield
    for backend in _SHARED.values():
        for seq in [*backend._sequences]:
            backend.close_sequence(seq)
        assert backend.memory() == 0


def make_rig(
    backend: ModelBackendPort, lengths: Sequence[int], max_idle: int
) -> EngineRig[ModelBackendPort]:
    store = AgentCacheStore(BlockPool(backend.spec, backend.bytes_for(lengths)))
    return EngineRig(backend, store, EngineLimits(max_idle=max_idle), tokenizer=FakeTokenizer())


def alone(model: HeadModel, tokens: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    """The reply without a head, computed fresh."""
    run = begin(model.shared(has_head=False), 1, tokens, params)
    reply = run.finish(count)
    run.backend.close_sequence(run.seq)
    return reply


def drafted(backend: Any) -> list[tuple[int, ...]]:
    """Drafts after prompts of several lengths."""
    assert backend.head is not None
    found = []
    for size in (2, 11, 40):
        seq = SequenceId(size)
        backend.open_sequence(seq, prompt(size))
        step(backend, Chunk(seq, 0, tuple(prompt(size))))
        found += backend.head.draft([Chunk(seq, size, (9,), Draw(SEEDED, size))], 6)
    return found


@pytest.mark.parametrize("subject, share, params", CASES, ids=lambda value: NAMES.get(value, value))
def test_replies_are_those_of_plain_decoding(
    head_model: GetHeadModel, subject: str, share: float, params: SamplingParams
) -> None:
    model = head_model(subject, share)
    rig = make_rig(model.shared(), [500] * 64, max_idle=8)

    def expect(*jobs: Job) -> None:
        rig.serve(*jobs)
        for job in jobs:
            expected = alone(model, job.tokens, params, job.max_tokens)
            assert list(rig.reply_state(job.id).tokens) == expected

    first = prompt(40)
    jobs = [make_job(f"batched {i}", [*first, *prompt(9, i)], params, NUM_REPLY) for i in range(3)]
    expect(*jobs)
    said = [*jobs[0].tokens, *rig.reply_state(jobs[0].id).tokens]
    expect(forked := make_job("forked", [*said, *prompt(5, 7)], params, NUM_REPLY))
    for job in (*jobs, forked):
        rig.engine.close_idle(job.agent)
    expect(restored := make_job("restored", [*said, *prompt(5, 8)], params, NUM_REPLY))
    assert rig.num_reused("restored") >= len(jobs[0].tokens)
    usages = [rig.finished(job.id).usage for job in (*jobs, forked, restored)]
    if share == RARELY:
        assert sum(usage.rejected_prediction_tokens for usage in usages) > 0
    else:
        assert sum(usage.accepted_by_source.get("mtp", 0) for usage in usages) > 4


@pytest.mark.parametrize("subject", SUBJECTS)
def test_preempted_replies_are_those_of_plain_decoding(
    head_model: GetHeadModel, subject: str
) -> None:
    model = head_model(subject, MOSTLY)
    rig = make_rig(model.shared(), [300, 210], max_idle=0)
    jobs = [make_job(f"{i}", prompt(246, i), SEEDED, 24) for i in range(2)]
    rig.serve(*jobs)
    assert rig.store.telemetry.counts.engine.preemptions
    for job in jobs:
        assert list(rig.reply_state(job.id).tokens) == alone(model, job.tokens, SEEDED, 24)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_head_that_agrees_is_always_accepted(head_model: GetHeadModel, subject: str) -> None:
    """Also over more tokens than it attends to, and beside rows of other lengths."""
    backend = head_model(subject, ALWAYS).shared()
    assert backend.head is not None
    runs = [begin(backend, size, prompt(size), SEEDED) for size in (3, 30)]
    rows = step(backend, *(run.chunk() for run in runs))
    for run, row in zip(runs, rows, strict=True):
        run.take(run.chunk(), row)
    for _ in range(3):
        chunks = [run.chunk() for run in runs]
        drafts = backend.head.draft(chunks, 4)
        chunks = [replace(c, draft=d) for c, d in zip(chunks, drafts, strict=True)]
        for run, row in zip(runs, step(backend, *chunks), strict=True):
            drawn = [*sampled(row).accepted, sampled(row)]
            assert len(drawn) == 5
            run.tokens += [each.token for each in drawn]
            run.num_held += len(drawn)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_head_does_not_depend_on_the_rows_beside_it(
    head_model: GetHeadModel, subject: str
) -> None:
    """Rows of other lengths pad a batch; the drafts of strong layers show what they attend to."""
    backend = head_model(subject, RARELY).shared()
    head = backend.head
    assert head is not None

    def drafts_of(sizes: Sequence[int]) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for again in range(2):  # with new entries only, and after some
            chunks = []
            for size in sizes:
                seq = SequenceId(size)
                if not again:
                    backend.open_sequence(seq, prompt(size))
                tokens = (*prompt(size), 7)[size * again :]
                step(backend, Chunk(seq, size * again, tokens[:-1] or tokens))
                start = size + again
                chunks.append(Chunk(seq, start, (9,), Draw(GREEDY, size)))
            found = dict(zip(sizes, head.draft(chunks, 3), strict=True))
        for size in sizes:
            backend.close_sequence(SequenceId(size))
        return found

    sizes = (4, 17, 40)
    together = drafts_of(sizes)
    assert all(map(len, together.values()))
    assert together == {size: drafts_of([size])[size] for size in sizes}


@pytest.mark.parametrize("family", [*ATTENDING_HEADS, *RECURRENT_HEADS])
def test_backends_draft_the_same_tokens(head_model: GetHeadModel, family: str) -> None:
    """A head of another library, read by another way, computes the same."""

    on_torch = drafted(head_model(f"torch-{family}", RARELY).shared())
    assert all(len(tokens) == 6 for tokens in on_torch)
    assert on_torch == drafted(head_model(f"mlx-{family}", RARELY).shared())


@pytest.mark.parametrize("library", BACKENDS)
def test_experts_of_a_head_are_read_fused_and_one_by_one(tmp_path: Path, library: str) -> None:
    if library == "mlx":
        require_mlx()
    model = HeadModel(library, write_head_model(tmp_path, "qwen3.5-moe", RARELY))
    separate = drafted(model.load())
    assert all(len(tokens) == 6 for tokens in separate)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    fuse_experts(weights, "mtp.layers.0.mlp.experts.")
    save_file(weights, file, {"format": "pt"})
    assert drafted(model.load()) == separate


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_head_keeps_a_bounded_part_of_a_sequence(
    head_model: GetHeadModel, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_state, "MAX_ENTRIES", 24)
    monkeypatch.setattr(head_state, "MAX_HIDDEN", 16)
    backend = head_model(subject, ALWAYS).shared()
    assert backend.head is not None
    run = begin(backend, 1, prompt(60), SEEDED)
    state = backend._sequences[run.seq].ahead
    for _ in range(40):
        run.take(run.chunk(), *step(backend, run.chunk()))
        assert state.num_hidden < 2 * 16
    for _ in range(20):
        assert len(backend.head.draft([run.chunk()], 2)[0]) == 2
        run.take(run.chunk(), *step(backend, run.chunk()))
        assert 0 < state.num_entries <= 24
    assert backend.memory() <= backend.bytes_for([len(run.tokens)])


@pytest.mark.parametrize("subject", ATTENDING)
def test_a_sequence_that_was_cut_or_forked_begins_anew(
    head_model: GetHeadModel, subject: str
) -> None:
    backend = head_model(subject, RARELY).shared()
    assert backend.head is not None
    run = begin(backend, 1, prompt(20), GREEDY)
    run.take(run.chunk(), *step(backend, run.chunk()))
    assert backend.head.draft([run.chunk()], 1) != [()]
    copy, draw = SequenceId(2), Draw(GREEDY, 20)
    assert backend.fork(run.seq, copy, 12)
    assert backend.truncate(run.seq, 12) == 12
    for seq in (run.seq, copy):
        chunk = Chunk(seq, 12, (5,), draw)
        assert backend.head.draft([chunk], 2) == [()]
        step(backend, chunk)
        assert len(backend.head.draft([replace(chunk, start=13)], 2)[0]) == 2


@pytest.mark.parametrize("subject", RECURRENT)
def test_weights_of_a_head_are_read_as_those_of_the_model(
    head_model: GetHeadModel, subject: str
) -> None:
    """The head's layer was written as a copy of the model's last one, and its norms scale by 1."""
    backend = head_model(subject, RARELY).shared()
    model = backend._runner._model
    if subject.startswith("torch"):
        head, last = backend._head, model.base_model.layers[-1]
        own, expected = head.layer.state_dict(), last.state_dict()
        scale = 0  # transformers adds 1 to the weights of these norms
    else:
        head, scale = model.mtp, 1
        flatten = importlib.import_module("mlx.utils").tree_flatten
        own, expected = (dict(flatten(p.parameters())) for p in (head.layer, model.layers[-1]))
    assert own.keys() == expected.keys()
    assert all((own[name] == expected[name]).all().item() for name in own)
    for norm in (head.embedding_norm, head.hidden_norm, head.norm):
        assert (norm.weight == scale).all().item()


@pytest.mark.parametrize("subject", RECURRENT)
def test_a_reply_that_ends_inside_a_draft_is_resumed_there(
    head_model: GetHeadModel, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = head_model(subject, MOSTLY)
    backend = model.shared()
    rig, cuts, truncate = make_rig(backend, [200] * 64, max_idle=8), [], backend.truncate

    def spied(seq: SequenceId, num_tokens: int) -> int:
        cuts.append(backend._sequences[seq].length - num_tokens)
        reached: int = truncate(seq, num_tokens)
        return reached

    monkeypatch.setattr(backend, "truncate", spied)
    for number in range(4):
        tokens = prompt(20, number)
        reply = alone(model, tokens, SEEDED, 28)
        last = next(i for i, token in enumerate(reply) if i > 15 and token not in reply[:i])
        stop = StopRules(token_ids=frozenset([reply[last]]), ignore_eos=True)
        job = make_job(f"first {number}", tokens, SEEDED, 28)
        rig.serve(replace(job, stop=stop))
        assert list(rig.reply_state(job.id).tokens) == reply[: last + 1]
        if number % 2:
            rig.engine.close_idle(job.agent)
        said = [*tokens, *reply[: last + 1], *prompt(3, 50)]
        rig.serve(later := make_job(f"later {number}", said, SEEDED, 4))
        assert rig.num_reused(later.id) >= 20 + last
        assert list(rig.reply_state(later.id).tokens) == alone(model, said, SEEDED, 4)
    assert any(cut > 0 for cut in cuts)


@pytest.mark.parametrize("subject", RECURRENT)
def test_recurrent_state_returns_into_the_last_draft(
    head_model: GetHeadModel, subject: str
) -> None:
    """The state is that of the last accepted token, and of any before it in the draft."""
    model = head_model(subject, RARELY)
    backend, tokens = model.shared(), prompt(20)
    expected = alone(model, tokens, SEEDED, 12)
    for kept in (1, 3):  # so many tokens of the draft are right
        for end in range(20, 22 + kept):
            run = begin(backend, 1, tokens, SEEDED)
            run.take(run.chunk(), *step(backend, run.chunk()))
            wrong = (expected[1 + kept] + 1) % 90
            draft = (*expected[1 : 1 + kept], wrong)
            (row,) = step(backend, replace(run.chunk(), draft=draft))
            assert len(sampled(row).accepted) == kept
            assert backend.memory() <= backend.bytes_for([len(tokens) + 12])
            copy = SequenceId(2)
            assert backend.fork(run.seq, copy, end)
            assert backend.truncate(run.seq, end) == end
            for seq in (copy, run.seq):
                said = [*tokens, *expected][: end + 1]
                found: list[int] = []
                while len(found) < 4:
                    chunk = Chunk(seq, len(said) - 1, (said[-1],), Draw(SEEDED, 20))
                    found.append(sampled(*step(backend, chunk)).token)
                    said.append(found[-1])
                assert found == expected[end - 19 :][:4]
                backend.close_sequence(seq)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_head_changes_neither_geometry_nor_traits(head_model: GetHeadModel, subject: str) -> None:
    """So that stored KV cache is used with and without it."""
    model = head_model(subject, MOSTLY)
    with_head, without = model.shared(), model.shared(has_head=False)
    assert without.head is None
    assert with_head.spec == without.spec
    # On a GPU, the head's weights leave less room.
    assert replace(with_head.traits, kv_room=without.traits.kv_room) == without.traits


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("lacking", ["eh_proj", "self_attn.o_proj"])
def test_a_head_without_some_weights_is_not_used(
    tmp_path: Path, library: str, lacking: str
) -> None:
    if library == "mlx":
        require_mlx()
    model = HeadModel(library, write_head_model(tmp_path, "glm4-moe", MOSTLY))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights[f"model.layers.2.{lacking}.weight"]
    save_file(weights, file, {"format": "pt"})
    backend = model.load()
    assert backend.head is None
    reply = begin(backend, 1, prompt(9), GREEDY).finish(6)
    assert reply == alone(model, prompt(9), GREEDY, 6)
