"""The backends under contract, and the reply of each to a prompt computed fresh and alone."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import pytest
import torch

from semantic.adapters.outbound.backends.common import SequenceBackend
from semantic.adapters.outbound.backends.fake import FakeBackend, fake_spec
from semantic.adapters.outbound.backends.mlx import runtime
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild
from semantic.domain.sampling import SamplingParams
from semantic.ports.backend import ModelBackendPort
from tests.contract.driver import GREEDY, NUM_REPLY, begin
from tests.contract.mlx_models import CUT_WHERE_SAVED, MLX_FAMILIES, write_mlx_model
from tests.contract.models import (
    BLOCK_TOKENS,
    FAMILIES,
    OTHER_FAMILIES,
    WINDOW,
    GetModel,
    TinyModel,
    family_config,
    write_model,
)
from tests.contract.models import CUT_WHERE_SAVED as TORCH_CUT_WHERE_SAVED
from tests.contract.sharded import fake_in_ranks


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend under contract.

    Attributes:
        make: A fresh one.
        cuts_anywhere: Whether state can be cut at any token, or only where it was saved.
        is_quick: Whether steps take no longer than to read a file.
    """

    make: Callable[[], ModelBackendPort]
    cuts_anywhere: bool = True
    is_quick: bool = True


class Alone(Protocol):
    """The reply to a prompt, whole in one chunk, with no other sequence open."""

    def __call__(
        self, tokens: Sequence[int], params: SamplingParams = ..., num_reply: int = ...
    ) -> list[int]: ...


_FAKES = {
    "fake": Subject(lambda: FakeBackend(fake_spec(block_tokens=BLOCK_TOKENS))),
    "fake-window": Subject(
        lambda: FakeBackend(fake_spec(block_tokens=BLOCK_TOKENS, window=WINDOW)),
        cuts_anywhere=False,
    ),
    "fake-state": Subject(
        lambda: FakeBackend(fake_spec(block_tokens=BLOCK_TOKENS, has_state=True)),
        cuts_anywhere=False,
    ),
    "fake-pipelined": Subject(
        lambda: FakeBackend(fake_spec(block_tokens=BLOCK_TOKENS), pipeline_depth=1)
    ),
    "fake-2-shards": Subject(lambda: fake_in_ranks(2), is_quick=False),
    "fake-3-shards": Subject(lambda: fake_in_ranks(3, WINDOW), cuts_anywhere=False, is_quick=False),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models lose more to the threads' hand-over than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    """Writes a family's tiny model when it is first asked for."""
    written: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in written:
            directory = tmp_path_factory.mktemp(family)
            written[family] = write_model(directory, family_config(family))
        return written[family]

    return get


@pytest.fixture(scope="session")
def mlx_model(tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    """Writes a family's tiny model for MLX when it is first asked for; skips without MLX."""
    written: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        require_mlx()
        if family not in written:
            written[family] = write_mlx_model(tmp_path_factory.mktemp(f"mlx-{family}"), family)
        return written[family]

    return get


def require_mlx() -> None:
    """Make MLX ready, or skip the test where it is not installed."""
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")
    runtime.prepare(num_threads=1)
    import mlx.core as mx

    mx.disable_compile()  # which runs a C++ compiler for every new kernel


def make_mlx(
    model: TinyModel,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    *,
    has_head: bool = False,
) -> ModelBackendPort:
    """A backend that computes in a number format."""
    from semantic.adapters.outbound.backends.mlx.backend import MlxBackend
    from semantic.adapters.outbound.backends.mlx.loading import MlxOptions

    options = MlxOptions(dtype=dtype, pinned_bytes=2**30, has_head=has_head)
    return MlxBackend.from_directory(model.directory, model.spec, options)


_NAMES = (
    *_FAKES,
    *(f"torch-{family}" for family in (*FAMILIES, *OTHER_FAMILIES)),
    *(f"mlx-{family}" for family in MLX_FAMILIES),
)


# One architecture for each way to keep KV cache: full attention, windows, several shapes, latents
# and states. For tests of what does not depend on how a model computes.
_KINDS = (
    *_FAKES,
    *(f"torch-{family}" for family in ("llama", "gemma3", "gemma4", "qwen3-next")),
    *(f"mlx-{family}" for family in ("llama", "gemma3", "deepseek-v3", "qwen3-next")),
)
each_kind = pytest.mark.parametrize("subject", _KINDS, indirect=True, scope="session")


@pytest.fixture(scope="session", params=_NAMES)
def subject(
    request: pytest.FixtureRequest,
    tiny_model: GetModel,
    mlx_model: GetModel,
    native: NativeBuild,
) -> Subject:
    name: str = request.param
    if name in _FAKES:
        return _FAKES[name]
    library, _, family = name.partition("-")
    if library == "mlx":
        written = mlx_model(family)
        return Subject(lambda: make_mlx(written), cuts_anywhere=family not in CUT_WHERE_SAVED)
    model, options = tiny_model(family), TorchOptions("float32", native=native)
    return Subject(
        lambda: TorchBackend(model.directory, model.spec, options),
        cuts_anywhere=family not in TORCH_CUT_WHERE_SAVED,
    )


@pytest.fixture
def backend(subject: Subject, shared_backend: ModelBackendPort) -> Iterator[ModelBackendPort]:
    """A backend without sequences. One that loads a model serves many tests: that takes longer."""
    if not isinstance(shared_backend, SequenceBackend):
        made = subject.make()
        yield made
        made.shutdown()
        return
    yield shared_backend
    for seq in list(shared_backend._sequences):
        shared_backend.close_sequence(seq)
    assert shared_backend.memory() == 0


@pytest.fixture(scope="session")
def shared_backend(subject: Subject) -> Iterator[ModelBackendPort]:
    """One for the whole session: references, and tests of many examples, close what they open."""
    made = subject.make()
    yield made
    made.shutdown()


@pytest.fixture(scope="session")
def alone(subject: Subject) -> Alone:
    reference = subject.make()
    ids = itertools.count()
    known: dict[tuple[tuple[int, ...], SamplingParams, int], list[int]] = {}

    def reply(
        tokens: Sequence[int], params: SamplingParams = GREEDY, num_reply: int = NUM_REPLY
    ) -> list[int]:
        key = (tuple(tokens), params, num_reply)
        if key not in known:
            run = begin(reference, next(ids), tokens, params)
            known[key] = run.finish(num_reply)
            reference.close_sequence(run.seq)
        return known[key]

    return reply
