"""Compares a backend with the library that it runs, on a tiny model with random weights.

A type of model is exact if the backend's greedy tokens equal those of the library's own generation,
computed fresh, in a batch of unlike lengths, after a restore from blocks, and after a fork.
"""

import enum
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from semantic.domain.errors import InvalidRequestError
from semantic.ports.backend import ModelBackendPort, SequenceId
from tests.contract.driver import Run, begin, finish, prompt

LENGTHS = (3, 21, 40)  # within and beyond the windows, chunks and indices of the tiny models
BLOCK_ENDS = (8, 16, 32)
NUM_REPLY = 8


class Verdict(enum.Enum):
    """The result of one type.

    UNBUILDABLE: no tiny model can be built, for a known reason.
    NOT_BUILT: building a tiny model failed: sizes or a reason are missing.
    """

    EXACT = "exact"
    REFUSED = "refused"
    UNBUILDABLE = "cannot be built"
    WRONG = "wrong"
    NOT_BUILT = "not built"

    @property
    def is_fault(self) -> bool:
        return self in (Verdict.WRONG, Verdict.NOT_BUILT)


@dataclass(frozen=True, slots=True)
class ZooResult:
    """The verdict on one type.

    Attributes:
        note: EXACT: what the layers keep; otherwise the reason.
    """

    model_type: str
    verdict: Verdict
    note: str


class ZooModel(Protocol):
    """A tiny model that was written to a directory."""

    def open_backend(self) -> ModelBackendPort:
        """Load it through the backend; raises InvalidRequestError if that refuses it."""

    def library_reply(self, tokens: Sequence[int], backend: ModelBackendPort) -> list[int]:
        """Return `NUM_REPLY` greedy tokens by the library's own generation."""


class ZooLibrary(Protocol):
    """A library whose types are compared; its class is registered in `tests.zoo.__main__`."""

    @property
    def title(self) -> str:
        """Name and version, for the report."""

    @property
    def unbuildable(self) -> Mapping[str, str]:
        """Types of which no tiny model can be built, with the reasons."""

    def types(self) -> Sequence[str]:
        """Return every type of causal language model that the installed version has."""

    def write_model(self, model_type: str, directory: Path) -> ZooModel:
        """Write a tiny model; raises any exception if that is not possible."""


def check_type(library: ZooLibrary, model_type: str) -> ZooResult:
    """Build a tiny model of one type and compare it."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            model = library.write_model(model_type, Path(directory))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a library raises
            if model_type in library.unbuildable:
                reason = library.unbuildable[model_type]
                return ZooResult(model_type, Verdict.UNBUILDABLE, reason)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return ZooResult(model_type, Verdict.NOT_BUILT, reason[:200])
        try:
            backend = model.open_backend()
        except InvalidRequestError as error:
            return ZooResult(model_type, Verdict.REFUSED, error.message)
        except Exception as error:  # noqa: BLE001 - a refusal must be one of ours
            return ZooResult(model_type, Verdict.WRONG, f"load raises {error!r}"[:200])
        try:
            fault = _fault(model, backend)
        except Exception as error:  # noqa: BLE001 - a type that fails is a wrong one
            fault = f"{type(error).__name__}: {error}"[:200]
        finally:
            backend.shutdown()
    if fault:
        return ZooResult(model_type, Verdict.WRONG, fault)
    kinds = "+".join(kind.value for kind in backend.spec.kinds)
    return ZooResult(model_type, Verdict.EXACT, kinds)


def _fault(model: ZooModel, backend: ModelBackendPort) -> str:
    """Describe the first difference; empty if there is none."""
    limit = backend.spec.max_context - NUM_REPLY
    prompts = [prompt(min(length, limit), seed=length) for length in LENGTHS]
    expected = [model.library_reply(tokens, backend) for tokens in prompts]
    if len({*map(tuple, expected)}) == 1:
        return "the tiny model gives the same reply to every prompt: nothing can be compared"
    alone = [begin(backend, n, tokens).finish(NUM_REPLY) for n, tokens in enumerate(prompts)]
    if alone != expected:
        return f"fresh replies {alone} differ from the library's {expected}"
    together = [begin(backend, 100 + n, tokens) for n, tokens in enumerate(prompts)]
    finish(together, NUM_REPLY)
    if [run.reply for run in together] != expected:
        return "replies of a batch of unlike lengths differ"
    if _restored(backend, prompts[-1]) != expected[-1]:
        return "the reply after a restore from blocks differs"
    forked, fresh = _forked(backend, prompts[1])
    return "" if forked == fresh else "the reply after a fork differs"


def _restored(backend: ModelBackendPort, tokens: list[int]) -> list[int]:
    run = begin(backend, 200, tokens)
    blocks = run.seal(*(end for end in BLOCK_ENDS if end < len(tokens)))
    backend.close_sequence(run.seq)
    again = begin(backend, 201, tokens)
    if blocks:
        again.load(blocks)
    return again.finish(NUM_REPLY)


def _forked(backend: ModelBackendPort, tokens: list[int]) -> tuple[list[int], list[int]]:
    run = begin(backend, 300, tokens)
    run.finish(3)
    held, seq = run.num_held, SequenceId(301)
    if not backend.fork(run.seq, seq, held):
        return [], [-1]
    other = [*run.tokens[:held], 7]
    fork = Run(backend, seq, other, len(other), num_held=held)
    finish([run, fork], NUM_REPLY)
    return fork.reply, begin(backend, 302, other).finish(NUM_REPLY)
