"""The lifecycle of a model: states, and swaps that begin and end with them."""

import pytest

from semantic.adapters.outbound.backends.fake import FakeBackend, FakeModels, FakeTokenizer
from semantic.application.engine.model import Exchange, LoadedModel, ModelLifecycle, ModelSwap
from semantic.domain.errors import ConflictError, DrainingError, ModelSwapError
from semantic.ports.inbound import ModelState

pytestmark = pytest.mark.unit

ENTRY = FakeModels().find_model("fake-2")


def model(name: str = "fake") -> LoadedModel:
    return LoadedModel(name, FakeBackend(), FakeTokenizer())


def ready() -> ModelLifecycle:
    lifecycle = ModelLifecycle()
    lifecycle.served = FakeModels().find_model("fake")
    lifecycle.set_ready(Exchange(None), model(), 100)
    return lifecycle


def begun(lifecycle: ModelLifecycle) -> tuple[ModelSwap, Exchange]:
    """A swap whose exchange has begun."""
    swap, exchange = lifecycle.begin_swap(ENTRY, 0), Exchange(None)
    swap.served_after = ENTRY
    lifecycle.begin_exchange(exchange, "waiting")
    return swap, exchange


def test_a_swap_is_over_when_its_model_is_ready() -> None:
    lifecycle = ready()
    steps: list[tuple[ModelState, str]] = []
    lifecycle.on_step = lambda _, state, step: steps.append((state, step))
    _, exchange = begun(lifecycle)
    assert lifecycle.progress == "model fake-2: waiting"
    lifecycle.drop_model()
    lifecycle.note_loading("reading weights")
    assert (lifecycle.state, lifecycle.public_state) == (ModelState.LOADING, ModelState.SWAPPING)
    with pytest.raises(ConflictError, match="fake-2: reading weights"):
        lifecycle.begin_swap(None, 0)
    lifecycle.set_ready(exchange, model("fake-2"), 50)
    assert (lifecycle.swap, lifecycle.served) == (None, ENTRY)
    assert lifecycle.public_state is ModelState.READY
    assert steps == [(ModelState.SWAPPING, "waiting"), (ModelState.LOADING, "reading weights")]


def test_a_model_that_is_loaded_again_does_not_end_the_swap_behind_it() -> None:
    lifecycle = ready()
    lifecycle.note_swapping("the device was lost")
    lifecycle.note_loading("starting")
    swap, exchange = begun(lifecycle)
    lifecycle.set_ready(Exchange(None), model(), 100)
    assert (lifecycle.swap, lifecycle.state) == (swap, ModelState.SWAPPING)
    with pytest.raises(ModelSwapError):
        lifecycle.ready_model()
    lifecycle.set_unloaded(exchange)
    assert lifecycle.swap is None


def test_a_swap_that_fails_while_it_fetches_leaves_the_model() -> None:
    lifecycle = ready()
    lifecycle.end_swap(lifecycle.begin_swap(ENTRY, 0))
    assert lifecycle.swap is None
    assert lifecycle.ready_model().id == "fake"


def test_a_hang_ends_in_the_state_before_it() -> None:
    lifecycle = ready()
    begun(lifecycle)
    assert lifecycle.set_hung("no answer")
    assert not lifecycle.set_hung("no answer")
    assert lifecycle.end_hang()
    assert (lifecycle.state, lifecycle.detail) == (ModelState.SWAPPING, "waiting")
    assert not lifecycle.end_hang()


def test_stopped_is_final() -> None:
    lifecycle = ready()
    lifecycle.stop()
    lifecycle.note_loading("starting")
    with pytest.raises(DrainingError):
        lifecycle.ready_model()


def test_a_transition_that_is_not_listed_is_a_defect() -> None:
    lifecycle = ready()
    with pytest.raises(AssertionError, match="ready became loading"):
        lifecycle.note_loading("starting")
