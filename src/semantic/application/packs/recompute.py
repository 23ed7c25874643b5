"""Computes blocks of a pack again on the loaded model, and compares them with the pack's.

The blocks are visited in order in one sequence. A chosen block is computed after the blocks before
it; any other block is loaded as it is. A block that was computed from other tokens, by another
model, or not computed at all, therefore differs from what this model computes in its place.
"""

import random
from collections.abc import Callable, Collection, Iterable, Sequence

from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.engine.request import GuestSequence
from semantic.domain.blocks import unpack_tokens
from semantic.domain.errors import CacheCorruptionError, InvalidRequestError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload
from semantic.ports.storage import ExportPart

MIN_CHECKED = 4
PackBlock = Sequence[ExportPart]  # the parts of one block
# Returns how stored KV cache differs from computed; see `PackFilePort.compare`.
Compare = Callable[[KVPayload, KVPayload], str]


def choose_blocks(
    num_blocks: int, share: float, model: LoadedModel, chance: random.Random
) -> set[int]:
    """Choose the blocks to compute again: the first, and others at random.

    Window and recurrent layers have no stored state between blocks, so a sequence with such layers
    can only be computed from its beginning: all blocks are chosen.
    """
    if model.backend.spec.kinds != (LayerKind.FULL,):
        return set(range(num_blocks))
    wanted = max(MIN_CHECKED, round(num_blocks * share))
    others = range(1, num_blocks)
    return {0, *chance.sample(others, min(wanted - 1, len(others)))}


class BlockRecomputation:
    """Checks the blocks of one pack. Other requests run between two blocks."""

    def __init__(self, device: DeviceThread, compare: Compare) -> None:
        self._device = device
        self._compare = compare

    def check(
        self, tokens: Sequence[int], blocks: Iterable[PackBlock], chosen: Collection[int]
    ) -> None:
        """Compute the chosen blocks, and compare them.

        Raises:
            InvalidRequestError: a block differs, or cannot be loaded; the message names it.
            PoolExhaustedError: the pack does not fit in memory beside the running requests.
            ModelSwapError: the model was swapped meanwhile.
        """
        guest = self._device.run_between_steps(lambda engine: engine.open_guest(tokens))
        try:
            for index, parts in enumerate(blocks):
                self._visit(guest, index, parts, is_chosen=index in chosen)
        finally:
            self._device.run_between_steps(lambda engine: engine.close_guest(guest))

    def _visit(
        self, guest: GuestSequence, index: int, parts: PackBlock, *, is_chosen: bool
    ) -> None:
        block = parts[0].part
        stored = [item.payload for item in parts if item.payload.buffers]
        if not is_chosen:
            try:
                self._device.run_between_steps(lambda engine: engine.load_guest(guest, stored))
            except CacheCorruptionError as error:
                raise _refused(index, block.name.short, error.message) from error
            return
        kinds = [payload.kind for payload in stored]
        tokens = unpack_tokens(block.tokens)
        computed = self._device.run_between_steps(
            lambda engine: engine.compute_guest(guest, block.start, tokens, kinds)
        )
        for ours, theirs in zip(computed, stored, strict=True):
            if difference := self._compare(theirs, ours):
                raise _refused(index, block.name.short, difference)


def _refused(index: int, name: str, problem: str) -> InvalidRequestError:
    reason = problem.rstrip(".")
    return InvalidRequestError(
        f"block {index} ({name}) is not what this model computes: {reason}. Nothing was added.",
        param="file",
    )
