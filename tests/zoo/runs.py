"""Runs the comparison in a worker process, which is replaced if a model crashes it."""

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tests.zoo.checks import Verdict, ZooLibrary, ZooResult, check_type


def _mlx() -> ZooLibrary:
    from tests.zoo.mlx_library import MlxZoo

    return MlxZoo()


def _torch() -> ZooLibrary:
    from tests.zoo.torch_library import TorchZoo

    return TorchZoo()


LIBRARIES: Mapping[str, Callable[[], ZooLibrary]] = {"mlx": _mlx, "torch": _torch}


_CRASH = "it crashes the process"
_libraries: dict[str, ZooLibrary] = {}  # of a worker process


def _check(name: str, model_type: str) -> ZooResult:
    if name not in _libraries:
        _libraries[name] = LIBRARIES[name]()
    return check_type(_libraries[name], model_type)


def run(name: str, types: Sequence[str]) -> list[ZooResult]:
    """Compare types in a worker process, which is replaced if a model crashes it."""
    results: list[ZooResult] = []
    while len(results) < len(types):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
            for model_type in types[len(results) :]:
                started = time.monotonic()
                try:
                    result = worker.submit(_check, name, model_type).result()
                except BrokenProcessPool:
                    result = ZooResult(model_type, Verdict.WRONG, _CRASH)
                results.append(result)
                _report(name, result, time.monotonic() - started)
                if result.note == _CRASH:
                    break
    return results


def _report(name: str, result: ZooResult, took: float) -> None:
    print(
        f"{name} {result.model_type}: {result.verdict.value} ({result.note}) {took:.1f} s",
        flush=True,
    )
