"""Images on every model that accepts them: a reply equals the one computed fresh and alone.

Each test also shows what was reused: an engine that computes everything anew would be right too.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.application.cache.restore_plan import WantedPart
from semantic.application.engine.request import AheadJob, Job
from semantic.domain.images.spans import IMAGE_ID, whole_chunk_end
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.domain.spec import LayerKind
from semantic.ports.backend import ModelBackendPort, RowFailed, SequenceId
from tests.contract.driver import GREEDY, NUM_REPLY, Run, advance, begin, finish, step
from tests.contract.models import BLOCK_TOKENS
from tests.contract.seeing_models import SEEING_FAMILIES, mlx_subject, torch_subject
from tests.contract.test_memory_contract import BenchLimits, MemoryBench
from tests.contract.vision_models import VISION_SUBJECTS, VisionSubject, text
from tests.picture_prompts import PicturePrompt

pytestmark = pytest.mark.contract

PENALISED = SamplingParams(temperature=0, seed=0, repetition_penalty=1.3, presence_penalty=0.5)
# One model of each kind runs all tests.
REAL_SUBJECTS = [f"{b}-{f}" for b in ("torch", "mlx") for f in ("smolvlm", "qwen3_vl", "gemma3")]
ALL_SUBJECTS = [*VISION_SUBJECTS, *(f"{b}-{f}" for b in ("torch", "mlx") for f in SEEING_FAMILIES)]
HEAD = 19  # tokens of text before the first image: inside a block


# The engine's part of a test is the same for all models, and real ones allocate more at a time.
on_fakes = pytest.mark.parametrize("subject", VISION_SUBJECTS, indirect=True)
on_all_families = pytest.mark.parametrize("subject", ALL_SUBJECTS, indirect=True)


@functools.cache
def subject_of(name: str, native: NativeBuild) -> VisionSubject:
    library, _, family = name.partition("-")
    if library == "torch":
        return torch_subject(family, native)
    return mlx_subject(family) if library == "mlx" else VISION_SUBJECTS[name]()


@pytest.fixture(params=(*VISION_SUBJECTS, *REAL_SUBJECTS))
def subject(request: pytest.FixtureRequest, native: NativeBuild) -> VisionSubject:
    return subject_of(request.param, native)


@pytest.fixture
def backend(subject: VisionSubject) -> Iterator[ModelBackendPort]:
    made = subject.make()
    yield made
    made.shutdown()


@pytest.fixture
def make_bench(
    tmp_path: Path, backend: ModelBackendPort
) -> Iterator[Callable[[BenchLimits | None], "PictureBench"]]:
    benches: list[PictureBench] = []

    def make(limits: BenchLimits | None = None) -> PictureBench:
        for other in benches:
            other.close()
        benches[:] = [PictureBench(tmp_path, backend, limits)]
        return benches[0]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(make_bench: Callable[[BenchLimits | None], "PictureBench"]) -> "PictureBench":
    return make_bench(None)


class PictureBench(MemoryBench):
    """A start of a server, asked with pictures."""

    def queue(
        self,
        name: str,
        asked: PicturePrompt,
        agent: str = "",
        params: SamplingParams = GREEDY,
        num_reply: int = NUM_REPLY,
    ) -> None:
        stop = StopRules(ignore_eos=True)
        job = Job(name, agent or name, self.root, asked.tokens, params, stop, num_reply)
        self.submit(replace(job, images=asked.images, boundaries=asked.boundaries))

    def answer(
        self, name: str, asked: PicturePrompt, agent: str = "", params: SamplingParams = GREEDY
    ) -> list[int]:
        self.queue(name, asked, agent, params)
        self.run()
        return self.reply(name)


def fresh(
    subject: VisionSubject,
    asked: PicturePrompt,
    params: SamplingParams = GREEDY,
    num_reply: int = NUM_REPLY,
) -> list[int]:
    """The reply of a new backend to a prompt in one chunk."""
    backend = subject.make()
    try:
        return begin(backend, 0, asked.tokens, params, asked.images).finish(num_reply)
    finally:
        backend.shutdown()


def conversation(subject: VisionSubject, *seeds: int) -> PicturePrompt:
    """Text, and after it images with text after each."""
    made = PicturePrompt.of(text(HEAD))
    for number, seed in enumerate(seeds):
        made = PicturePrompt.of(made, text(number), subject.prepare(seed), text(11, seed + 100))
    return made


def advance_to(run: Run, end: int) -> None:
    advance([run], [end - run.num_held])


# -- the backend --------------------------------------------------------------------------------


@on_all_families
def test_an_image_decides_about_the_reply(subject: VisionSubject) -> None:
    first, second = (
        fresh(subject, conversation(subject, 1)),
        fresh(subject, conversation(subject, 2)),
    )

    assert first != second
    assert first == fresh(subject, conversation(subject, 1))


@on_all_families
@pytest.mark.parametrize("size", [3, 16])
def test_chunk_sizes_do_not_matter(
    subject: VisionSubject, backend: ModelBackendPort, size: int
) -> None:
    asked = conversation(subject, 1, 2)
    run = begin(backend, 0, asked.tokens, images=asked.images)
    while run.num_held < run.num_prompt - 1:
        end = min(run.num_held + size, run.num_prompt - 1)
        if backend.traits.needs_whole_images:
            end = whole_chunk_end(run.num_held, end, asked.images)
        advance_to(run, end)

    assert run.finish() == fresh(subject, asked)


@on_all_families
def test_restored_equals_recomputed(subject: VisionSubject, backend: ModelBackendPort) -> None:
    asked = conversation(subject, 1, 2)
    ends = [*asked.boundaries, len(asked.tokens) - 1]
    blocks = begin(backend, 0, asked.tokens, images=asked.images).seal(*ends)

    for number, end in enumerate(ends, 1):
        again = begin(backend, number, asked.tokens, images=asked.images)
        again.load(blocks[:number])
        assert again.num_held == end
        assert again.finish() == fresh(subject, asked), end


def test_a_fork_goes_on_with_other_images(
    subject: VisionSubject, backend: ModelBackendPort
) -> None:
    one = conversation(subject, 1, 2)
    other = PicturePrompt.of(conversation(subject, 1), subject.prepare(3), text(4))
    place = len(conversation(subject, 1).tokens)
    source = begin(backend, 0, one.tokens, images=one.images)
    advance_to(source, place)

    assert backend.fork(source.seq, SequenceId(1), place)
    forked = Run(backend, SequenceId(1), [*other.tokens], len(other.tokens), num_held=place)
    forked.images = other.images

    assert forked.finish() == fresh(subject, other)
    assert source.finish() == fresh(subject, one)


def test_a_sequence_is_never_cut_inside_an_image(
    subject: VisionSubject, backend: ModelBackendPort
) -> None:
    asked = conversation(subject, 1)
    (span,) = asked.images
    run = begin(backend, 0, asked.tokens, images=asked.images)
    advance_to(run, len(asked.tokens) - 1)

    assert not backend.fork(run.seq, SequenceId(1), span.start + 1)
    run.num_held = backend.truncate(run.seq, span.end - 1)

    assert run.num_held == (span.start if subject.cuts_anywhere else 0)
    assert run.finish() == fresh(subject, asked)


@on_all_families
def test_a_batch_of_text_and_images_equals_each_alone(
    subject: VisionSubject, backend: ModelBackendPort
) -> None:
    prompts = [
        conversation(subject, 1),
        PicturePrompt.of(text(31, 5)),
        conversation(subject, 2, 3),
        PicturePrompt.of(text(3, 6)),
    ]
    runs = [begin(backend, n, p.tokens, images=p.images) for n, p in enumerate(prompts)]

    finish(runs)

    assert [run.reply for run in runs] == [fresh(subject, asked) for asked in prompts]


def test_penalties_ignore_key_ids(subject: VisionSubject, backend: ModelBackendPort) -> None:
    asked = conversation(subject, 1)
    run = begin(backend, 0, asked.tokens, PENALISED, asked.images)
    for end in (*asked.boundaries, len(asked.tokens) - 1):
        advance_to(run, end)

    assert run.finish() == fresh(subject, asked, PENALISED)


def test_key_ids_without_their_image_are_refused(
    subject: VisionSubject, backend: ModelBackendPort
) -> None:
    one, other = conversation(subject, 1), conversation(subject, 2)
    run = begin(backend, 0, one.tokens, images=one.images)
    whole = run.chunk()

    for images in ((), other.images):
        (row,) = step(backend, replace(whole, images=images))
        assert isinstance(row, RowFailed)
    assert run.finish() == fresh(subject, one)


# -- the engine ---------------------------------------------------------------------------------


@on_all_families
def test_two_images_never_share_and_the_text_before_them_does(
    subject: VisionSubject, bench: PictureBench
) -> None:
    one, other = conversation(subject, 1), conversation(subject, 2)

    assert bench.answer("one", one) == fresh(subject, one)
    assert bench.answer("other", other) == fresh(subject, other)
    assert bench.reuse("other").reused == other.images[0].start
    assert bench.answer("again", one, "again") == fresh(subject, one)
    assert bench.reuse("again").reused >= one.images[0].end


@on_fakes
def test_images_whose_first_key_ids_are_equal_never_share(
    subject: VisionSubject, bench: PictureBench
) -> None:
    """By chance, or because someone searched for them: 31 bits are no secret."""
    image = subject.prepare(1)
    last = image.feature_offsets[-1]
    forged = list(image.tokens)
    forged[last] = IMAGE_ID + (forged[last] + 1) % IMAGE_ID
    pixels = tuple(replace(b, data=bytes(255 - v for v in b.data)) for b in image.pixels)
    twin = replace(image, digest=bytes(32), tokens=tuple(forged), pixels=pixels)
    one, other = (PicturePrompt.of(text(HEAD), each, text(5)) for each in (image, twin))

    bench.answer("one", one)
    bench.queue("two", one)
    bench.queue("other", other)
    bench.run()

    assert bench.reply("other") == fresh(subject, other) != fresh(subject, one)
    assert bench.reuse("other").reused == other.images[0].start


@on_all_families
def test_an_image_at_another_offset_never_matches(
    subject: VisionSubject, bench: PictureBench
) -> None:
    one = PicturePrompt.of(text(HEAD), subject.prepare(1), text(5))
    moved = PicturePrompt.of(text(HEAD + BLOCK_TOKENS), subject.prepare(1), text(5))

    bench.answer("one", one)

    assert bench.answer("moved", moved) == fresh(subject, moved)
    assert bench.reuse("moved").reused <= HEAD


def test_the_same_pixels_of_another_size_never_match(
    subject: VisionSubject, bench: PictureBench
) -> None:
    one = PicturePrompt.of(text(HEAD), subject.prepare(1, (128, 96)), text(5))
    other = PicturePrompt.of(text(HEAD), subject.prepare(1, (96, 128)), text(5))

    bench.answer("one", one)

    assert bench.answer("other", other) == fresh(subject, other)
    assert bench.reuse("other").reused == other.images[0].start


def test_requests_run_together_restored_and_from_idle_copies(
    subject: VisionSubject, make_bench: Callable[[BenchLimits | None], PictureBench]
) -> None:
    """Three turns of agents that share images, and one without any."""
    bench = make_bench(BenchLimits(max_idle=3))
    turns = {
        "a": conversation(subject, 1),
        "b": conversation(subject, 1, 2),
        "c": conversation(subject, 3),
        "text": PicturePrompt.of(text(40, 4)),
    }
    for number in range(3):
        for agent, asked in turns.items():
            bench.queue(f"{agent}{number}", asked, agent, num_reply=3)
        bench.run()
        for agent, asked in turns.items():
            said = bench.reply(f"{agent}{number}")
            assert said == fresh(subject, asked, num_reply=3), (agent, number)
            new = subject.prepare(10 + number)
            turns[agent] = PicturePrompt.of(asked, said, text(2), new, text(3, number))
            if number:
                assert bench.reuse(f"{agent}{number}").reused > 30


def test_a_restart_restores_images_from_disk(
    subject: VisionSubject, make_bench: Callable[[BenchLimits | None], PictureBench]
) -> None:
    asked = conversation(subject, 1, 2)
    said = make_bench(None).answer("first", asked)
    later = PicturePrompt.of(asked, said, subject.prepare(3), text(6))

    bench = make_bench(None)

    assert bench.answer("later", later) == fresh(subject, later)
    assert bench.reuse("later").disk >= asked.images[1].end
    # A rewind before the second image, whose turn then goes on with another one.
    back = PicturePrompt.of(conversation(subject, 1), subject.prepare(4), text(3))
    assert bench.answer("back", back) == fresh(subject, back)
    first, second = back.images
    least = len(conversation(subject, 1).tokens) if subject.cuts_anywhere else first.end
    assert least <= bench.reuse("back").reused <= second.start


@on_fakes
def test_a_restore_never_ends_inside_an_image(subject: VisionSubject, bench: PictureBench) -> None:
    """Where the last blocks of an image are gone, all of it is computed again."""
    asked = conversation(subject, 1)
    (span,) = asked.images
    bench.answer("first", asked)
    gone = [node for node in bench.nodes() if node.end > span.end - 1]
    parts = [WantedPart(node, kind) for node in gone for kind in LayerKind]
    bench.forget(gone)
    bench.store.drop_files(parts)
    assert max(node.end for node in bench.nodes()) in range(span.start + 1, span.end)

    assert bench.answer("second", asked) == fresh(subject, asked)
    assert bench.reuse("second").reused == span.start


@pytest.mark.parametrize("num_steps", [2, 4, 6])
@on_fakes
def test_a_request_that_is_cancelled_anywhere_leaves_what_others_can_use(
    subject: VisionSubject,
    make_bench: Callable[[BenchLimits | None], PictureBench],
    num_steps: int,
) -> None:
    bench = make_bench(BenchLimits(max_idle=2, prefill_step_size=8))
    one, other = conversation(subject, 1, 2), conversation(subject, 1, 3)
    bench.queue("one", one, "a")
    bench.step(num_steps)
    bench.engine.cancel("one")
    bench.run()

    assert bench.answer("same", one, "b") == fresh(subject, one)
    assert bench.answer("other", other, "a") == fresh(subject, other)


@on_fakes
def test_preempted_requests_go_on_with_equal_tokens(
    subject: VisionSubject, make_bench: Callable[[BenchLimits | None], PictureBench]
) -> None:
    prompts = {f"r{n}": conversation(subject, n, n + 10) for n in range(3)}
    lengths = [len(asked.tokens) + BLOCK_TOKENS for asked in prompts.values()]
    bench = make_bench(BenchLimits(budget_tokens=tuple(lengths)))
    for name, asked in prompts.items():
        bench.queue(name, asked, num_reply=60)
    bench.run()

    for name, asked in prompts.items():
        assert bench.reply(name) == fresh(subject, asked, num_reply=60), name
    assert bench.store.telemetry.counts.engine.preemptions


@on_fakes
def test_images_of_expected_prompts_are_computed_ahead(
    subject: VisionSubject, make_bench: Callable[[BenchLimits | None], PictureBench]
) -> None:
    bench = make_bench(BenchLimits(max_idle=4))
    asked = conversation(subject, 1)
    said = bench.answer("first", asked, "a")
    later = PicturePrompt.of(asked, said, text(2), subject.prepare(2), text(9))
    bench.engine.compute_ahead(AheadJob("a", bench.root, later.tokens[:-1], later.images))
    while bench.engine.has_ahead:
        bench.engine.step_ahead()
        bench.check()

    assert bench.answer("right", later, "a") == fresh(subject, later)
    assert bench.reuse("right").ahead > len(subject.prepare(2).tokens)
    other = PicturePrompt.of(asked, said, text(2), subject.prepare(3), text(9))
    assert bench.answer("wrong", other, "a") == fresh(subject, other)
