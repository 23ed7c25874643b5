"""Room for sequences: admission, growth, preemption, and which sequences stay open."""

from typing import Literal

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.engine.generation import Generation
from semantic.application.engine.memory import IdleCopies
from semantic.application.engine.request import Job
from semantic.application.parsing import TextAssembler
from semantic.domain.blocks import BlockName
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.sampling import StopRules
from semantic.ports.backend import SequenceId, Step, Ticket
from tests.unit.application.engine_rig import GREEDY, ROOT, FaultyBackend, make_job, make_rig

pytestmark = pytest.mark.unit


# -- admission ----------------------------------------------------------------------------------


def test_admission_reserves_the_prompt_and_one_block() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 20))
    rig.step()
    assert rig.store.usage().working == rig.backend.bytes_for([28])


def test_a_reply_needs_room_for_a_token_and_no_whole_block() -> None:
    rig = make_rig(budget_tokens=50)
    fits = make_job("fits", "x" * 45, max_tokens=3)
    rig.serve(make_job("exact", "x" * 50), fits)
    rig.error("exact")
    rig.expect_alone(fits)


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_memory() -> None:
    rig = make_rig(budget_tokens=100)
    rig.submit(make_job("first", "f" * 40, max_tokens=20))
    rig.step()
    rig.submit(make_job("large", "l" * 60, max_tokens=2))
    rig.submit(make_job("small", "s" * 4, max_tokens=2))
    rig.step()
    assert rig.backend.num_open == 1
    rig.run()


def test_a_small_device_limits_sequences_more_than_the_budget_does() -> None:
    spec = fake_spec(block_tokens=8)
    backend = FaultyBackend(spec, kv_room=spec.bytes_per_context(100))
    rig = make_rig(backend=backend)
    assert rig.engine.longest_sequence == 100
    fits = [make_job(name, name * 60, max_tokens=30) for name in "abc"]
    rig.submit(make_job("long", "x" * 101), *fits)
    while rig.engine.has_work:
        rig.step()
        assert backend.memory() <= backend.bytes_for([100])
    assert "does not fit this server's memory" in rig.error("long", PoolExhaustedError)
    rig.expect_alone(*fits)


def test_a_step_without_memory_fails_its_request_and_no_other() -> None:
    class SmallDevice(FaultyBackend):
        def launch(self, step: Step) -> Ticket:
            if any(chunk.num_tokens > 50 for chunk in step.chunks):
                raise PoolExhaustedError("the device is out of memory", retry_after_s=5)
            return super().launch(step)

    rig = make_rig(backend=SmallDevice(fake_spec(block_tokens=8)))
    small, after = make_job("small"), make_job("after")
    rig.serve(small, make_job("large", "x" * 60))
    rig.serve(after)
    rig.error("large", PoolExhaustedError)
    rig.expect_alone(small, after)


# -- growth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_room_grows_by_blocks_and_before_it_is_needed(depth: Literal[0, 1]) -> None:
    rig = make_rig(pipeline_depth=depth)
    rig.submit(make_job("a", "x" * 20, max_tokens=40))
    reserved: set[int] = set()
    while rig.engine.has_work:
        rig.step()
        assert rig.backend.memory() <= rig.store.usage().working
        reserved.add(rig.store.usage().working)
    assert len(reserved) <= 8


def test_blocks_are_sealed_as_they_fill() -> None:
    rig = make_rig()
    rig.submit(make_job("a", "x" * 40, max_tokens=100))
    rig.step()
    assert rig.store.usage().num_blocks == 5


# -- preemption ---------------------------------------------------------------------------------


def test_preemption_keeps_what_was_computed_and_that_is_no_reuse() -> None:
    # The older one wants 65 tokens more than its 164 while the younger holds 94: of 320 there are
    # 62 left, too few to grow and enough for what the younger has computed.
    rig = make_rig(spec=fake_spec(block_tokens=64), budget_tokens=320)
    rig.submit(make_job("old", "o" * 100, max_tokens=100))
    rig.step(45)
    rig.serve(make_job("young", "y" * 30, max_tokens=40))
    assert rig.store.telemetry.counts.engine.preemptions == 1
    # Each token once; the last of a reply is never fed.
    assert rig.backend.num_computed == (100 + 100 - 1) + (30 + 40 - 1)
    assert rig.num_reused("young") == 0


# -- idle copies --------------------------------------------------------------------------------


def generation(agent: str, tokens: list[int], seq: int = 0, root: BlockName = ROOT) -> Generation:
    job = Job(f"{agent}{seq}", agent, root, tuple(tokens), GREEDY, StopRules(), 1)
    made = Generation(job, 0, TextAssembler(lambda _: b"", ()), 0.0, 4, SequenceId(seq))
    made.progress.num_computed = len(tokens)
    return made


def copies(*made: Generation) -> IdleCopies:
    idle = IdleCopies()
    for one in made:
        idle.add(one)
    return idle


def best(idle: IdleCopies, request: Generation) -> tuple[int, int] | None:
    found = idle.best_for(request)
    return (int(found[0].seq), found[1]) if found else None


def test_the_copy_that_shares_most_is_best_and_a_token_is_left_to_compute() -> None:
    idle = copies(generation("a", [1, 2, 3], 1), generation("b", [1, 2, 3, 4, 5], 2))
    assert best(idle, generation("c", [1, 2, 3, 4, 9])) == (2, 4)
    assert best(idle, generation("c", [1, 2, 3, 4, 5])) == (2, 4)
    assert best(idle, generation("c", [9, 9])) is None
    # Tenants share nothing.
    assert best(idle, generation("a", [1, 2, 3, 4], root=BlockName(bytes(32)))) is None


def test_of_equals_an_agents_own_is_best_then_the_youngest() -> None:
    idle = copies(*(generation(name, [1, 2, 3], seq) for seq, name in enumerate("aba", 1)))
    for name, seq in {"b": 2, "a": 3, "c": 3}.items():
        assert best(idle, generation(name, [1, 2, 3, 4])) == (seq, 3)


def test_a_copy_holds_what_was_computed_and_no_more() -> None:
    ended = generation("a", [1, 2, 3, 4], 1)
    ended.progress.num_computed = 3
    assert best(copies(ended), generation("a", [1, 2, 3, 4, 5])) == (1, 3)


def test_the_oldest_comes_first_and_a_removed_one_not_at_all() -> None:
    idle = copies(generation("a", [1], 1), generation("b", [2], 2), generation("c", [3], 3))
    idle.remove(SequenceId(2))
    idle.remove(SequenceId(2))
    assert [copy.agent for copy in idle] == ["a", "c"]
    assert len(idle) == 2
