"""Threads in which requests are prepared: a few, with a deadline, and never waited for at the end.

A thread cannot be ended. One that does not come back keeps its place, its request is answered with
an error, and when all places are lost that way the server says that it is stuck.
"""

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from semantic.domain.errors import GenerationTimeoutError, OverloadedError

_P = ParamSpec("_P")
_T = TypeVar("_T")

NUM_THREADS = 8


class PreparationThreads:
    """Runs work beside the event loop; used on the loop's thread."""

    def __init__(self, timeout_s: float, num_threads: int = NUM_THREADS) -> None:
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._places = asyncio.Semaphore(num_threads)
        self._late: set[asyncio.Future[Any]] = set()

    @property
    def problem(self) -> str:
        """What is wrong, for `/health`; empty if nothing is."""
        if len(self._late) < self._num_threads:
            return ""
        return (
            f"no request can be prepared: {len(self._late)} have taken more than "
            f"{self._timeout_s:g} s each and are not done; restart the server"
        )

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do some work and return its result.

        Raises:
            OverloadedError: no thread became free in time.
            GenerationTimeoutError: the work took too long; it goes on, and nobody hears of it.
        """
        try:
            await asyncio.wait_for(self._places.acquire(), self._timeout_s)
        except TimeoutError:
            raise OverloadedError(
                "too many requests are being prepared; try again.", retry_after_s=5
            ) from None
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_T] = loop.create_future()
        result.add_done_callback(self._settled)

        def do() -> None:
            try:
                settle = functools.partial(result.set_result, work(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                settle = functools.partial(result.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop may be gone
                loop.call_soon_threadsafe(settle)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=[do], name="prepare", daemon=True).start()
        done, _ = await asyncio.wait({result}, timeout=self._timeout_s)
        if done:
            return result.result()
        self._late.add(result)
        raise GenerationTimeoutError(
            f"preparing this request (rendering, tokenising, compiling its schema) took more than "
            f"{self._timeout_s:g} s; send a shorter conversation or a simpler schema."
        )

    def _settled(self, result: "asyncio.Future[Any]") -> None:
        self._places.release()
        self._late.discard(result)
        result.exception()  # nobody may be left to look at it
