"""Copies from a CUDA device to pinned host memory, where there is such a device."""

import pytest

from semantic.domain.errors import CacheCorruptionError

torch = pytest.importorskip("torch")
copies = pytest.importorskip("semantic.adapters.outbound.backends.torch.kv.copies")
pinned = pytest.importorskip("semantic.adapters.outbound.backends.pinned")

pytestmark = pytest.mark.unit
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class FailedEvent:
    """What is left of a copy that the device did not make."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: invalid argument")

    def synchronize(self) -> None:
        self.query()


def test_a_failed_copy_is_reported_to_its_reader_alone() -> None:
    """Later copies look whether it is done, and must not fail because of it."""
    assert copies.is_over(FailedEvent())
    with pytest.raises(CacheCorruptionError, match="invalid argument"):
        copies.wait_for(FailedEvent())


@needs_cuda
def test_a_copy_has_the_state_at_the_time_of_the_call() -> None:
    """The sequence continues at once, and its buffers are overwritten."""
    made = copies.DeviceCopies(pinned.shared_memory(2**28), torch.device("cuda"))
    state = torch.randn((4, 2, 3000, 64), device="cuda", dtype=torch.bfloat16)
    expected = [state[[0, 3], :, 17:256].cpu(), state.cpu()]
    buffers = [made.copy_out("keys", tensor) for tensor in (state[[0, 3], :, 17:256], state)]
    state.zero_()
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert buffer.shape == tuple(wanted.shape)
        assert buffer.nbytes == 2 * wanted.numel()
        found = torch.frombuffer(buffer.data, dtype=torch.bfloat16).view(wanted.shape)
        assert torch.equal(found, wanted)
    made.finish()


@needs_cuda
def test_without_memory_nothing_is_copied() -> None:
    memory = pinned.PinnedMemory(lambda *_: True, slab=2**16, limit=2**16)
    made = copies.DeviceCopies(memory, torch.device("cuda"))
    assert made.copy_out("keys", torch.zeros(2**17, device="cuda")) is None
