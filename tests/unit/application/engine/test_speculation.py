"""Speculative decoding: replies stay the same, and rows carry drafts where they save time."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.fake import FakeTokenizer, fake_spec
from semantic.application.engine.generation import Generation
from semantic.application.engine.request import Draft, Job
from semantic.application.engine.speculative.drafts import DraftMemory, TenantMemory
from semantic.application.engine.speculative.planner import (
    AdaptiveDraftPlanner,
    forced_token,
    is_allowed,
)
from semantic.application.engine.steps import StepCosts
from semantic.application.parsing import TextAssembler
from semantic.application.settings import EngineLimits
from semantic.domain.blocks import BlockNamespace
from semantic.domain.errors import BackendError
from semantic.domain.events import Finished, TextDelta
from semantic.domain.images.spans import IMAGE_ID, image_ids
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.domain.spec import ModelCacheSpec
from semantic.ports.backend import Step, Ticket, Traits
from semantic.ports.text import TokenConstraint
from tests.unit.application.engine_rig import ROOT, FaultyBackend, Rig, make_job, make_rig

pytestmark = pytest.mark.unit

Depth = Literal[0, 1]
WITHOUT = EngineLimits(draft_tokens=0)
LETTERS = b"abcdefghijklmnopqrstuvwxyz "


class Alternating:
    """Allows vowels, then one digit that is forced, then a vowel again."""

    def __init__(self, num_accepted: int = 0) -> None:
        self._num_accepted = num_accepted

    def allowed(self) -> bytes:
        wanted = b"7" if self._num_accepted % 3 == 2 else b"aeiou"
        return sum(1 << token for token in wanted).to_bytes(33, "little")

    def accept(self, token: int) -> None:
        assert is_allowed(self.allowed(), token)
        self._num_accepted += 1

    def copy(self) -> "Alternating":
        return Alternating(self._num_accepted)


class Adversary:
    """Guesses what will be said, half of it spoilt, for any row at any time."""

    def __init__(self, seed: int, replies: dict[str, tuple[int, ...]]) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not a secret
        self._replies = replies
        self.num_sent = 0

    def plan(self, rows: Sequence[Generation], *, has_prompts: bool) -> dict[int, Draft]:  # noqa: ARG002
        drafts = {row.order: self._draft(row) for row in rows if self._random.random() < 0.8}
        self.num_sent += sum(len(draft.tokens) for draft in drafts.values())
        return drafts

    def _draft(self, row: Generation) -> Draft:
        size = self._random.randint(0, max(row.drafting.room, 0))
        start = row.num_generated
        tokens = list(self._replies[row.job.id][start : start + size])
        tokens += self._random.choices(LETTERS, k=size - len(tokens))
        if tokens and self._random.random() < 0.5:
            tokens[self._random.randrange(len(tokens))] = self._random.choice(LETTERS)
        return self._allowed(row.constraint, tokens) if row.constraint else Draft(tuple(tokens))

    def _allowed(self, state: TokenConstraint, tokens: list[int]) -> Draft:
        draft = Draft()
        for token in tokens:
            if not is_allowed(state.allowed(), token):
                break
            state = state.copy()
            state.accept(token)
            draft = Draft(
                (*draft.tokens, token), (*draft.masks, state.allowed()), (*draft.states, state)
            )
        return draft

    def draft_ahead(self, rows: Sequence[Generation], verifying: Ticket) -> None:
        """Nothing can follow drafts that are known."""

    def wants_tokens(self, rows: Sequence[Generation]) -> bool:  # noqa: ARG002
        return self._random.random() < 0.5

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        pass

    def forget(self, generation: Generation) -> None:
        pass


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 3),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    top_logprobs=st.sampled_from([None, 2]),
)
stops = st.sampled_from(
    [
        StopRules(ignore_eos=True),
        StopRules(),
        StopRules(strings=("th", "e a")),
        StopRules(strings=("q",)),
    ]
)


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    made = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        prompt = draw(st.sampled_from(["one prompt ", "one prompt and another "])) + name
        job = make_job(
            name,
            prompt,
            agent=draw(st.sampled_from(["x", "y"])),
            sampling=draw(samplings),
            stop=draw(stops),
            max_tokens=draw(st.integers(1, 40)),
        )
        is_bound = draw(st.booleans())
        made.append(replace(job, constraint=Alternating()) if is_bound else job)
    return made


def outcome(rig: Rig, job: Job) -> tuple[object, ...]:
    """What a reader, and the log of turns, get of a reply."""
    final = rig.final(job.id)
    assert isinstance(final, Finished), final
    deltas = [event for event in rig.events[job.id] if isinstance(event, TextDelta)]
    scores = [score for delta in deltas for score in delta.logprobs]
    state, usage = rig.reply_state(job.id), final.usage
    return rig.text(job.id), scores, state.tokens, final.reason, usage.completion_tokens


@settings(max_examples=15)
@given(
    asked=jobs(),
    spec=st.builds(fake_spec, block_tokens=st.sampled_from([4, 8]), window=st.sampled_from([0, 6])),
    depth=st.sampled_from([0, 1]),
    budget=st.sampled_from([110, 100_000]),
    max_idle=st.sampled_from([0, 2]),
    seed=st.integers(0, 10**6),
    fault=st.sampled_from([None, "launch", "collect"]),
)
def test_no_draft_changes_a_reply(
    asked: list[Job],
    spec: ModelCacheSpec,
    depth: Depth,
    budget: int,
    max_idle: int,
    seed: int,
    fault: str | None,
) -> None:
    # Few blocks fit the small budget: rows are preempted, and go on from what was sealed.
    plain = make_rig(spec=spec, limits=WITHOUT)
    plain.serve(
        *(replace(job, constraint=Alternating() if job.constraint else None) for job in asked)
    )
    expected = {job.id: outcome(plain, job) for job in asked}
    rig = make_rig(spec=spec, pipeline_depth=depth, budget_tokens=budget, max_idle=max_idle)
    adversary = Adversary(seed, {job.id: plain.reply_state(job.id).tokens for job in asked})
    rig.engine.draft_with(adversary)
    if fault:
        rig.backend.fail_next(fault, after=6)
    rig.serve(*asked)
    assert {job.id: outcome(rig, job) for job in asked} == expected
    # A second turn goes on from what the first one left: only what was said is there.
    for job in asked:
        reply = plain.reply_state(job.id).tokens
        later = replace(job, id=f"{job.id}2", tokens=(*job.tokens, *reply, 65, 66), constraint=None)
        for each in (plain, rig):
            each.engine.draft_with(Adversary(seed, {later.id: ()}))
            each.serve(later)
        assert outcome(rig, later) == outcome(plain, later)
    rig.engine.abandon(BackendError("the end"))
    assert rig.backend.num_open == 0


def repeat(depth: Depth) -> tuple[Rig, Rig]:
    """One agent says something; another is asked the same, with drafts and without."""
    rigs = tuple(
        make_rig(pipeline_depth=depth, limits=limits) for limits in (EngineLimits(), WITHOUT)
    )
    for rig in rigs:
        for name in ("first", "second", "third"):
            rig.serve(make_job(name, "say it again", max_tokens=80))
    return rigs[0], rigs[1]


@pytest.mark.parametrize("depth", [0, 1])
def test_earlier_text_is_drafted(depth: Depth) -> None:
    drafting, plain = repeat(depth)
    for name in ("first", "second", "third"):
        assert outcome(drafting, make_job(name)) == outcome(plain, make_job(name))
    usage = drafting.finished("third").usage
    assert usage.accepted_prediction_tokens > 40
    assert len(drafting.backend.steps) < 0.7 * len(plain.backend.steps)
    counts = drafting.store.telemetry.counts.engine
    used = [drafting.finished(name).usage for name in ("first", "second", "third")]
    assert counts.accepted_tokens == sum(each.accepted_prediction_tokens for each in used)
    assert counts.generated_tokens == plain.store.telemetry.counts.engine.generated_tokens
    assert plain.store.telemetry.counts.engine.drafted_tokens == 0


def test_many_rows_carry_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semantic.application.engine.speculative.planner._MAX_ROWS", 0)
    drafting, plain = repeat(0)
    for name in ("first", "second", "third"):
        assert outcome(drafting, make_job(name)) == outcome(plain, make_job(name))
    assert drafting.store.telemetry.counts.engine.drafted_tokens == 0


def test_drafts_never_come_from_another_tenant() -> None:
    rig, other = make_rig(), BlockNamespace("fake", "fake.v1", b"another").root()
    rig.serve(make_job("first", "say it again", max_tokens=80))
    rig.serve(replace(make_job("second", "say it again", max_tokens=80), root=other))
    assert rig.finished("second").usage.accepted_prediction_tokens == 0
    assert rig.text("second") == rig.text("first")


def test_predictions_and_the_past_feed_the_drafter() -> None:
    rig = make_rig()
    rig.serve(make_job("first", "say it", max_tokens=60))
    reply = rig.reply_state("first").tokens
    learnt: dict[str, dict[str, Any]] = {
        "predicted": {"prediction": reply},
        "from the log": {"past": ((*FakeTokenizer().encode("say it"), *reply),)},
    }
    for name, more in learnt.items():
        fresh = make_rig()
        fresh.serve(make_job("warm-up", "something else", max_tokens=20))
        fresh.serve(replace(make_job(name, "say it", max_tokens=60), **more))
        assert fresh.text(name) == rig.text("first")
        assert fresh.finished(name).usage.accepted_prediction_tokens > 30, name


def test_a_wrong_prediction_costs_a_few_draft_tokens_and_no_more() -> None:
    rig = make_rig()
    wrong = tuple(b"quite another text, of which nothing will be said " * 4)
    rig.serve(replace(make_job("a", "say it", max_tokens=60), prediction=wrong))
    assert rig.finished("a").usage.rejected_prediction_tokens <= 16
    rig.expect_alone(make_job("a", "say it", max_tokens=60))


def test_forced_tokens_are_drafted_for_free() -> None:
    class Spelt(Alternating):
        def allowed(self) -> bytes:
            return (1 << ord("forced text "[self._num_accepted % 12])).to_bytes(33, "little")

        def copy(self) -> "Spelt":
            return Spelt(self._num_accepted)

    rig = make_rig()
    rig.serve(make_job("warm-up", max_tokens=8))
    rig.serve(replace(make_job("a", max_tokens=60), constraint=Spelt()))
    assert rig.text("a") == "forced text " * 5
    usage = rig.finished("a").usage
    assert usage.accepted_prediction_tokens > 30
    assert usage.rejected_prediction_tokens == 0


def test_a_model_that_cannot_be_cut_back_is_not_drafted_for() -> None:
    rig = make_rig(spec=fake_spec(block_tokens=8, has_state=True))
    for name in ("first", "second"):
        rig.serve(make_job(name, "say it again", max_tokens=80))
    assert rig.store.telemetry.counts.engine.drafted_tokens == 0
    rig.expect_alone(make_job("second", "say it again", max_tokens=80))


class SlowBackend(FaultyBackend):
    """A step takes a second for its first token and `token_s` for each other, drafts included."""

    def __init__(self, now: list[float], token_s: float = 1.0) -> None:
        super().__init__(fake_spec(block_tokens=8))
        self._now, self._token_s = now, token_s

    def launch(self, step: Step) -> Ticket:
        num_tokens = sum(chunk.num_tokens + len(chunk.draft) for chunk in step.chunks)
        self._now[0] += 1 + self._token_s * (num_tokens - 1)
        return super().launch(step)


def test_where_rows_cost_in_proportion_drafts_cost_next_to_nothing() -> None:
    """Replies that others begin alike and end differently: half of the draft tokens are wrong."""
    took = []
    for limits in (EngineLimits(), WITHOUT):
        now = [0.0]
        rig = make_rig(backend=SlowBackend(now), limits=limits)
        rig.now = now
        for number in range(12):
            sampling = SamplingParams(temperature=0.3, seed=number)
            rig.serve(make_job(f"{number}", "say it again", max_tokens=60, sampling=sampling))
        took.append(now[0])
    assert took[0] < took[1] / 0.97


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    memory = DraftMemory(max_bytes=2**21)
    tenant = memory.of(ROOT)
    for number in range(64):
        said = tenant.begin("a", ())
        tenant.extend(said, [number * 1000 + i for i in range(1000)])
        memory.shrink(tenant, said)
    assert 2**20 < memory.nbytes <= 2**21
    own = tenant.begin("b", ())
    assert tenant.find_draft([63 * 1000 + i for i in range(5, 9)], own)
    assert tenant.find_draft(list(range(5, 9)), own) is None


def test_what_a_memory_takes_is_what_its_conversations_take() -> None:
    memory = TenantMemory()
    empty = memory.nbytes
    forgotten, kept = memory.begin("a", ()), memory.begin("b", ())
    memory.extend(forgotten, [1, 2, 3])
    memory.extend(kept, [4, 5, 6, 7])
    like = memory.begin("c", [4, 5, 9])
    assert memory.nbytes == empty + forgotten.nbytes + kept.nbytes + like.nbytes
    assert memory.forget_oldest()
    memory.extend(forgotten, [8, 9])  # its reply goes on
    assert memory.nbytes == empty + kept.nbytes + like.nbytes
    assert memory.forget_oldest()
    assert memory.forget_oldest()
    assert (memory.nbytes, memory.forget_oldest()) == (empty, False)


def test_what_waits_to_be_remembered_is_bounded() -> None:
    """Long prompts with short replies come faster than they are read, a piece a step."""
    planner = AdaptiveDraftPlanner(Traits(0, "", max_draft=16), frozenset())
    for order in range(48):
        job = make_job(f"r{order}", f"{order:02}" * 1000)
        row = Generation(job, order, TextAssembler(lambda _: b""), 0.0, block_tokens=8)
        row.drafting.room = 4
        planner.plan([row], has_prompts=False)
        planner.forget(row)
    assert planner.memory.num_unread == 32


def test_the_longest_match_goes_first_and_most_votes_win() -> None:
    memory = TenantMemory()
    for said in ([1, 2, 3, 4, 5, 60], [9, 2, 3, 4, 5, 70], [8, 2, 3, 4, 5, 70]):
        memory.extend(memory.begin("a", ()), said)
    own = memory.begin("b", ())
    assert [m.tokens[0] for m in [memory.find_draft([1, 2, 3, 4, 5], own)] if m] == [60]
    voted = memory.find_draft([7, 2, 3, 4, 5], own)
    assert voted is not None
    assert voted.tokens == [70]
    assert not voted.is_unanimous
    memory.extend(own, [1, 2, 3] * 4)
    looped = memory.find_draft([1, 2, 3] * 4, own)
    assert looped is not None
    assert looped.tokens[:6] == [1, 2, 3, 1, 2, 3]


def test_costs_are_known_after_two_steps_and_forgotten_slowly() -> None:
    costs = StepCosts()
    costs.observe(1, 0, 1.0)
    assert costs.plain(1) is None
    costs.observe(1, 0, 2.0)
    assert costs.plain(1) == 1.0
    costs.observe(1, 7, 5.0)
    costs.observe(1, 7, 5.0)
    assert costs.points(1, 1.0) == [(1, 1.0), (8, 5.0)]
    for _ in range(1000):
        costs.observe(1, 0, 1.0)
    assert costs.points(1, 1.0)[1][1] < 2


@pytest.mark.parametrize(
    "mask, token", [(None, None), (b"\x00\x04", 10), (b"\x03", None), (b"\x00", None)]
)
def test_forced_tokens_are_seen(mask: bytes | None, token: int | None) -> None:
    assert forced_token(mask) == token


def test_nothing_is_drafted_before_the_cost_of_steps_is_known() -> None:
    assert not AdaptiveDraftPlanner(Traits(0, "", max_draft=16), frozenset()).wants_tokens([])


def test_key_ids_of_images_are_no_source_of_draft_tokens() -> None:
    keys = list(image_ids(bytes(32), 12))
    before, after = list(range(10, 30)), list(range(40, 60))
    memory = TenantMemory()
    conversation = memory.begin("a", [*before, *keys, *after])
    memory.extend(conversation, [*before, *keys, *after][len(conversation.tokens) :])
    again = memory.begin("b", [*before, *keys, *after, *before])

    assert all(token < IMAGE_ID for token in conversation.tokens)
    match = memory.find_draft([*before, *keys, *after, *before[:10]], again)
    assert match is not None
    assert match.tokens == before[10:]  # up to the image
    assert memory.find_draft([*before, *keys], again) is None
    assert memory.find_draft([*before, *keys, *after[:2]], again) is None
    match = memory.find_draft([*keys, *after[:5]], again)
    assert match is not None
    assert match.tokens[:15] == after[5:]
