"""Which blocks are computed again, and sequences that belong to no request."""

import random

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.application.engine.model import LoadedModel
from semantic.application.packs.recompute import choose_blocks
from semantic.domain.errors import BackendError, ModelSwapError, PoolExhaustedError
from semantic.domain.spec import LayerKind
from tests.unit.application.device_rig import ready_device

pytestmark = pytest.mark.unit


def model_of(**layers: int) -> LoadedModel:
    spec = fake_spec(window=layers.get("window", 0), has_state=bool(layers.get("state", 0)))
    return LoadedModel("fake", FakeBackend(spec), FakeTokenizer())


@pytest.mark.parametrize(
    "num_blocks, share, num_chosen", [(1, 0.1, 1), (3, 0.1, 3), (100, 0.1, 10), (100, 1, 100)]
)
def test_the_first_block_and_random_others_are_chosen(
    num_blocks: int, share: float, num_chosen: int
) -> None:
    choices = [
        choose_blocks(num_blocks, share, model_of(), random.Random(seed))  # noqa: S311
        for seed in range(20)
    ]
    for chosen in choices:
        assert 0 in chosen
        assert len(chosen) == num_chosen
        assert chosen <= set(range(num_blocks))
    if num_chosen < num_blocks:
        assert set().union(*choices) > choices[0]


@pytest.mark.parametrize("layers", [{"window": 8}, {"state": 1}])
def test_all_blocks_of_a_model_that_cannot_resume_anywhere_are_chosen(
    layers: dict[str, int],
) -> None:
    assert choose_blocks(50, 0.1, model_of(**layers), random.Random()) == set(range(50))  # noqa: S311


def test_a_guest_computes_what_a_sequence_of_the_backend_computes() -> None:
    tokens = list(b"some tokens of a prompt")
    with ready_device(model_of()) as (device, _):
        whole = device.run_between_steps(lambda engine: engine.open_guest(tokens))
        kinds = [LayerKind.FULL]
        (expected,) = device.run_between_steps(
            lambda engine: engine.compute_guest(whole, 0, tokens, kinds)
        )
        guest = device.run_between_steps(lambda engine: engine.open_guest(tokens))
        (first,) = device.run_between_steps(
            lambda engine: engine.compute_guest(guest, 0, tokens[:10], kinds)
        )
        device.run_between_steps(lambda engine: engine.close_guest(guest))
        again = device.run_between_steps(lambda engine: engine.open_guest(tokens))
        device.run_between_steps(lambda engine: engine.load_guest(again, [first]))
        (second,) = device.run_between_steps(
            lambda engine: engine.compute_guest(again, 10, tokens[10:], kinds)
        )
        parts = [bytes(payload.buffers[0].data) for payload in (first, second)]
        assert b"".join(parts) == bytes(expected.buffers[0].data)
        device.run_between_steps(lambda engine: engine.check_integrity())
        device.run_between_steps(lambda engine: engine.close_guest(whole))
        for _ in range(2):  # the second time, there is nothing to close
            device.run_between_steps(lambda engine: engine.close_guest(again))
        device.run_between_steps(lambda engine: engine.check_integrity())


def test_what_fails_for_a_guest_fails_nothing_else() -> None:
    with ready_device(model_of()) as (device, _):
        guest = device.run_between_steps(lambda engine: engine.open_guest([1]))
        with pytest.raises(BackendError):
            device.run_between_steps(lambda engine: engine.compute_guest(guest, 0, [10**6], []))
        with pytest.raises(PoolExhaustedError):
            device.run_between_steps(lambda engine: engine.open_guest([1] * 10**7))
        device.run_between_steps(lambda engine: engine.check_integrity())
        device.exchange(lambda _: model_of(), drain_s=0).result(60)
        with pytest.raises(ModelSwapError):
            device.run_between_steps(lambda engine: engine.load_guest(guest, []))
        device.exchange(None, drain_s=0).result(60)
        with pytest.raises(ModelSwapError):
            device.run_between_steps(lambda engine: engine.open_guest([1]))
