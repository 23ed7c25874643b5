import asyncio
import threading

import pytest

from semantic.application.requests.prepare import PreparationThreads
from semantic.domain.errors import GenerationTimeoutError, InvalidRequestError

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


async def test_a_caller_that_goes_away_leaves_no_place_taken() -> None:
    gate = threading.Event()
    threads = PreparationThreads(60, num_threads=1)
    gone = asyncio.create_task(threads.run(gate.wait))
    await asyncio.sleep(0.01)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    gate.set()
    assert await threads.run(int, "7") == 7
