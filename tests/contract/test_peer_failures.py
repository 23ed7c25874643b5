"""Failures that other servers had with KV cache, repeated here on one model of each kind.

`docs/cache-failures.md` links every test to the report that it follows. Layers with full attention,
with a window and with recurrent state fail in different ways, so each kind has its model.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from semantic.application.cache.restore_plan import WantedPart
from semantic.domain.sampling import FinishReason
from semantic.domain.spec import LayerKind
from semantic.ports.backend import ModelBackendPort, Step, Ticket
from tests.contract.conftest import Alone
from tests.contract.driver import GREEDY, prompt
from tests.contract.models import BLOCK_TOKENS
from tests.contract.test_memory_contract import (
    FIRST,
    HEAD,
    SYSTEM,
    BenchLimits,
    MemoryBench,
    checked,
    next_turn,
    talk,
)

_SUBJECTS = ("fake", "fake-window", "fake-state", "torch-llama", "torch-qwen3-next", "mlx-llama")
pytestmark = [
    pytest.mark.contract,
    pytest.mark.parametrize("subject", _SUBJECTS, indirect=True, scope="session"),
]
OpenBench = Callable[..., MemoryBench]


class CountingBackend:
    """Passes everything to a backend, and counts the tokens that it has to compute."""

    def __init__(self, backend: ModelBackendPort) -> None:
        self._backend = backend
        self.num_computed = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def launch(self, step: Step) -> Ticket:
        self.num_computed += step.num_tokens
        return self._backend.launch(step)


@pytest.fixture
def counting(shared_backend: ModelBackendPort) -> CountingBackend:
    return CountingBackend(shared_backend)


@pytest.fixture
def open_bench(tmp_path: Path, counting: CountingBackend) -> Iterator[OpenBench]:
    """Starts a bench on the directory of the one before it, which ends."""
    opened: list[MemoryBench] = []

    def start(limits: BenchLimits | None = None) -> MemoryBench:
        for before in opened[-1:]:
            before.close()
        opened.append(MemoryBench(tmp_path, cast("ModelBackendPort", counting), limits))
        return opened[-1]

    yield start
    for bench in opened[-1:]:
        bench.close()


def resend(bench: MemoryBench, alone: Alone, name: str, tokens: list[int]) -> int:
    """Send a prompt, compare a reply that crosses blocks, and return how much was reused."""
    assert bench.say(name, tokens, 20, agent=name) == alone(tokens, GREEDY, 20)
    return bench.reuse(name).reused


def num_preempted(bench: MemoryBench) -> int:
    return bench.store.telemetry.counts.engine.preemptions


def test_a_prompt_paused_for_memory_poisons_no_block(open_bench: OpenBench, alone: Alone) -> None:
    # The older request outgrows its memory, which torch allocates for 256 tokens at a time, while
    # the younger one is in the middle of its prompt. It continues from what was stored of it.
    older, younger = prompt(200, 9), [*SYSTEM, *prompt(420, 7)]
    bench = open_bench(BenchLimits((256, len(younger) + BLOCK_TOKENS), prefill_step_size=8))
    bench.ask("older", older, 100)
    while len(bench.text("older").split()) < 46:
        bench.step()
    assert bench.disk.flush(30)  # what is being written is in the way
    bench.ask("younger", younger)
    while not num_preempted(bench):
        bench.step()
        assert bench.text("younger") == "", "it was not paused in its prompt"
    bench.run()
    assert bench.reply("older") == alone(older, GREEDY, 100)
    assert bench.reply("younger") == alone(younger, GREEDY, 6)
    again = [*younger, *prompt(5, 99)]
    resend(bench, alone, "again", again)
    bench = open_bench()  # a restart, with room for everything
    resend(bench, alone, "restarted", again)
    assert resend(bench, alone, "known", again) >= HEAD


def test_a_prompt_cancelled_half_way_leaves_only_whole_blocks(
    open_bench: OpenBench, alone: Alone
) -> None:
    bench = open_bench(BenchLimits(prefill_step_size=5))
    asked = [*FIRST, *prompt(60, 7)]
    bench.ask("cancelled", asked)
    bench.step(8)
    assert bench.text("cancelled") == ""
    bench.engine.cancel("cancelled")
    bench.run()
    assert bench.finished("cancelled").reason is FinishReason.CANCELLED
    assert resend(bench, alone, "again", asked) >= HEAD
    assert resend(open_bench(), alone, "restarted", asked) >= HEAD


def test_tokens_reported_as_reused_are_not_computed(
    open_bench: OpenBench, alone: Alone, counting: CountingBackend
) -> None:
    said = talk(open_bench(), alone, 2)
    bench = open_bench()  # a restart: everything comes from disk
    asked = [*said, *prompt(5, 99)]
    before = counting.num_computed
    assert bench.say("restored", asked, 1) == alone(asked, GREEDY, 1)
    reuse = bench.reuse("restored")
    assert reuse.disk >= len(said) - 1
    assert counting.num_computed - before == len(asked) - reuse.reused


@pytest.mark.parametrize("max_idle", [0, 4])
def test_a_branch_is_not_answered_from_its_sibling(
    open_bench: OpenBench, alone: Alone, max_idle: int
) -> None:
    bench = open_bench(BenchLimits(max_idle=max_idle))
    trunk = talk(bench, alone, 2)
    one = checked(bench, alone, "one", [*trunk, *prompt(9, 201)], "one")
    checked(bench, alone, "other", [*trunk, *prompt(9, 202)], "other")
    assert resend(bench, alone, "back", [*one, *prompt(3, 203)]) >= len(one) - 1
    bench.forget()  # and displaced from memory
    again = [*one, *prompt(3, 203)]
    assert resend(bench, alone, "from disk", again) >= len(one) - 1
    assert resend(bench, alone, "and again", again) >= len(one) - 1
    assert next_turn(bench, alone, [*one, *prompt(30, 204)], "deeper").reused >= len(one) - 1


def test_a_stored_prefix_is_not_changed_by_the_requests_that_use_it(
    open_bench: OpenBench, alone: Alone, tmp_path: Path
) -> None:
    bench = open_bench(BenchLimits(max_idle=4))
    said = talk(bench, alone, 2)
    assert bench.disk.flush(30)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for name in ("first", "second", "third"):
        assert resend(bench, alone, name, said) >= len(said) - BLOCK_TOKENS
    assert bench.disk.flush(30)
    # A tail that grew into a longer block is replaced.
    kept = {path: path.read_bytes() for path in files if path.exists()}
    assert len(kept) >= len(said) // BLOCK_TOKENS
    assert kept == {path: files[path] for path in kept}


def test_nothing_is_found_of_a_cache_that_was_evicted(open_bench: OpenBench, alone: Alone) -> None:
    bench = open_bench(BenchLimits((400,)))
    said = talk(bench, alone, 2)
    for i in range(3):
        pressure = prompt(300, 500 + i)  # takes the room of everything else
        assert bench.say(f"pressure {i}", pressure) == alone(pressure, GREEDY, 6)
        asked = [*said, *prompt(5, 600 + i)]
        assert bench.say(f"back {i}", asked) == alone(asked, GREEDY, 6)
    bench.forget()
    bench.store.drop_files([WantedPart(node, kind) for node in bench.nodes() for kind in LayerKind])
    assert resend(bench, alone, "evicted", said) == 0
    assert resend(bench, alone, "computed again", said) >= HEAD


def test_reuse_does_not_decay_under_new_conversations(open_bench: OpenBench, alone: Alone) -> None:
    # One agent talks among strangers who share its system prompt and never come back. Their blocks
    # exceed the budgets of memory and disk several times.
    said = talk(first := open_bench(), alone)
    assert first.disk.flush(30)
    num_bytes = first.files.used_bytes()
    room = open_bench().disk.used_bytes + 4 * num_bytes  # with the ledger
    bench = open_bench(BenchLimits((256,), extra_bytes=num_bytes, disk_bytes=room))
    for i in range(12):
        stranger = [*SYSTEM, *prompt(40, 700 + i)]
        assert bench.say(f"stranger {i}", stranger, 1, agent=f"s{i}") == alone(stranger, GREEDY, 1)
        assert bench.reuse(f"stranger {i}").reused >= HEAD - 1
        known, asked = len(said), [*said, *prompt(2, 800 + i)]
        said = [*asked, *bench.say(f"turn {i}", asked, 2)]
        assert said[len(asked) :] == alone(asked, GREEDY, 2)
        assert bench.reuse(f"turn {i}").reused >= known - 1
        assert bench.disk.flush(30)
    assert {tier for tier, _ in bench.store.counts.evictions} == {"memory", "disk"}
