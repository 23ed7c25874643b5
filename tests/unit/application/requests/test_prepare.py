import asyncio
import threading
from collections.abc import Callable

import pytest

from semantic.application.requests.prepare import NUM_THREADS, PreparationThreads
from semantic.domain.errors import GenerationTimeoutError, InvalidRequestError, OverloadedError

pytestmark = pytest.mark.unit


async def test_results_and_errors_come_back() -> None:
    threads = PreparationThreads(60)

    def refuse() -> None:
        raise InvalidRequestError("no")

    assert await threads.run(lambda left, right: left + right, 1, right=2) == 3
    with pytest.raises(InvalidRequestError, match="no"):
        await threads.run(refuse)


async def test_work_that_takes_too_long_is_given_up_and_others_go_on() -> None:
    gate = threading.Event()
    threads = PreparationThreads(0.5, num_threads=2)

    with pytest.raises(GenerationTimeoutError, match="simpler schema"):
        await threads.run(gate.wait)
    assert threads.problem == ""
    assert await threads.run(int, "7") == 7
    gate.set()


@pytest.mark.parametrize("num_steps", range(6))
async def test_a_caller_that_goes_away_leaves_no_place_taken(num_steps: int) -> None:
    gate = threading.Event()
    threads = PreparationThreads(60, num_threads=1)
    gone = asyncio.create_task(threads.run(gate.wait, 60))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    gate.set()
    assert await threads.run(int, "7") == 7


async def test_a_thread_that_cannot_be_started_leaves_no_place_taken() -> None:
    refusals = [RuntimeError("can't start new thread")] * NUM_THREADS

    def start(work: Callable[[], None]) -> None:
        if refusals:
            raise refusals.pop()
        threading.Thread(target=work, daemon=True).start()

    threads = PreparationThreads(5, start=start)
    for _ in range(NUM_THREADS):
        with pytest.raises(OverloadedError, match="cannot start a thread"):
            await threads.run(int, "7")
    assert await threads.run(int, "7") == 7


async def test_work_that_exits_leaves_no_place_taken() -> None:
    threads = PreparationThreads(5, num_threads=1)

    def leave() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await threads.run(leave)
    assert await threads.run(int, "7") == 7
