"""How the device's memory is divided: weights, KV cache of open sequences, and MLX's own use.

MLX caches freed buffers, by default as many as the memory holds, and keeps what loading freed. Its
memory limit did not make it release them on an H200, so the cache has a limit of its own: on CUDA
what MLX may use besides weights and KV cache, and at most a sixteenth of the device. On Metal,
memory is shared with all other programs: the cache is small. There, macOS may also page out buffers
of a GPU that idles, and the first reply after a pause would wait for them: wired buffers stay.

On CUDA the memory limit follows the KV cache of open sequences. MLX encodes operations ahead of the
device until its arrays reach the limit, and each holds its results until it has run: with one limit
for the whole budget, a prompt of 100,000 tokens took 45 GB where its KV cache has 14. The limit is
one for the process: it counts the weights and sequences of all loaded models. Above it, MLX waits
for the device before each operation.

MLX's own limits are shares of the whole device. It raises an error if the device cannot give it
what they allow, so both are set before a model is loaded, from what is free then.
"""

import logging
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import device as cuda

_LOG = logging.getLogger(__name__)
_CACHED = 16  # MLX caches at most one part in this many: of the device, on Metal of its limit
_RESERVED = 8  # one part in this many of the device is for activations
_LEAST_SPARE = 5 * 2**28  # on CUDA: a pass over 1,000 tokens of an 8B model takes half of it
_SMALL = 32 * 2**30
_OUTPUTS, _LEAST_STEP = 6, 256  # see `step_tokens`
_ROUNDED = 16  # CUDA's pool rounds arrays up to 2 MB: about one part in this many of KV cache
# MLX submits operations to a CUDA device in graphs, whose arrays all exist until one has run. By
# default, a graph has up to 100 operations on capability 9.0 and 12.0, which RTX 50 have.
_SMALL_GRAPHS = {"MLX_MAX_OPS_PER_BUFFER": "20", "MLX_MAX_MB_PER_BUFFER": "100"}
_MARGIN = 10  # MLX may use one part in this many more than weights and KV cache
_LEAST_MARGIN = 2**30
_LOST = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "ecc error",
)


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """What there is for a model on the device before it is loaded, in bytes.

    Attributes:
        total: What the server may use; 0 if there is no limit, as on a CPU without a setting.
        outside: What the driver and other programs have.
    """

    total: int = 0
    outside: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The shares of the device's memory, in bytes.

    Attributes:
        total: What the server may use; 0 if there is no limit, as on a CPU without a setting.
        weights: On CUDA with what else was loaded with them, such as a vision tower.
        budget: Limit of the KV cache by the setting; 0 if there is none.
        overhead: What loading added besides arrays: kernels, and gaps in the driver's pool.
        least_spare: See `spare`; 0 if it is not a CUDA device.
        expanded: Size of the largest matrix that is dequantised for prompts.
        others: What other models had when this one was loaded.
    """

    total: int
    weights: int
    budget: int = 0
    overhead: int = 0
    least_spare: int = 0
    expanded: int = 0
    others: int = 0

    @classmethod
    def of(cls, room: DeviceRoom, weights: int, budget: int, expanded: int = 0) -> Self:
        """Divide what there was before the model was loaded; call it when it is loaded."""
        if not room.total or not cuda.is_in_use():
            return cls(room.total, weights, budget)
        recover_memory()
        arrays, others = int(mx.get_active_memory()), sum(limit.held for limit in _FOLLOWED)
        overhead = max(0, _used_besides_arrays(mx.device_info()) - room.outside)
        overhead += max(0, cuda.pool_bytes() - arrays)
        weights = max(weights, arrays - others)
        return cls(room.total, weights, budget, overhead, _LEAST_SPARE, expanded, others)

    @property
    def spare(self) -> int:
        """Bytes for activations, and for memory that the driver's pool cannot use again at once."""
        least = min(self.least_spare, self.total // 4)
        return max(self.total // _RESERVED, least) + 2 * self.expanded

    def step_tokens(self, layer_bytes: int) -> int:
        """Prompt tokens of a step whose activations fit; no limit where that never was one.

        MLX has up to two layers' operations submitted, and a copy or two of each output.

        Args:
            layer_bytes: Size of what a layer's matrices return for a token.
        """
        if not self.least_spare or self.total >= _SMALL:
            return sys.maxsize
        return max(_LEAST_STEP, self.spare // 2 // (_OUTPUTS * layer_bytes))

    @property
    def kv_room(self) -> int | None:
        """Bytes for open sequences; None without a limit. Negative if the weights do not fit."""
        if not self.total:
            return None
        room = self.total - self.overhead - self.spare - self.weights - self.others
        return room - room // _ROUNDED if self.least_spare else room

    @property
    def needed(self) -> int:
        """Bytes of weights and KV cache together."""
        room = self.kv_room or 0
        return self.weights + min(self.budget or room, room)

    @property
    def margin(self) -> int:
        """Bytes for activations and cached buffers where the device has enough."""
        return max(self.needed // _MARGIN, _LEAST_MARGIN)

    @property
    def limit(self) -> int:
        """Bytes that arrays and cached buffers may take together."""
        return min(self.total - self.overhead, self.needed + self.margin)

    def limit_beside(self, others: int) -> int:
        """Bytes that they and the overhead may take beside other models with so many."""
        return min(self.total, self.needed + self.margin + others)

    @property
    def cache_limit(self) -> int:
        """Bytes of freed buffers that MLX may cache on CUDA."""
        return max(0, min(self.limit - self.needed, self.total // _CACHED))

    def limit_with(self, kv_bytes: int, others: int = 0) -> int:
        """Bytes that they may take while open sequences have so much KV cache.

        `others` is what other models have. MLX exceeds its limit by the operations that it submits
        together, and the driver's pool has gaps: most of what is spare is for these.
        """
        held = self.weights + kv_bytes + others
        most = min(
            self.limit_beside(others) - self.overhead,
            self.total - self.overhead - self.spare * 5 // 8,
        )
        return max(min(held + self.margin, most), held + self.spare // 4)


def device_room(setting: int) -> DeviceRoom:
    """Return what the server may use of the default device; no limit for a CPU by default."""
    if mx.default_device() != mx.Device(mx.gpu):
        return DeviceRoom(setting)
    info = mx.device_info()
    total = int(info.get("max_recommended_working_set_size") or info.get("total_memory") or 0)
    outside = _used_besides_arrays(info)
    total -= outside
    return DeviceRoom(min(setting, total) if setting and total else setting or total, outside)


def limit_while_loading(room: DeviceRoom) -> None:
    """Keep MLX within a CUDA device's memory while weights are read, copied and joined."""
    if cuda.is_in_use() and room.total:
        if room.total < _SMALL:
            for name, value in _SMALL_GRAPHS.items():
                os.environ.setdefault(name, value)  # MLX reads it before its first operation
        mx.set_cache_limit(0)  # so that joined weights take the place of others
        mx.set_memory_limit(room.total - room.total // _RESERVED)


def limit_device_memory(plan: MemoryPlan) -> None:
    """Set MLX's limits for its default device, and release what loading left; none for a CPU."""
    if mx.default_device() != mx.Device(mx.gpu):
        return
    mx.clear_cache()
    if working_set := int(mx.device_info().get("max_recommended_working_set_size") or 0):
        mx.set_cache_limit(min(working_set, plan.limit) // _CACHED)
        mx.set_memory_limit(plan.limit)
        _wire(working_set)
    elif plan.total:
        mx.set_cache_limit(plan.cache_limit)
        mx.set_memory_limit(plan.limit)


class MemoryLimit:
    """Keeps MLX's memory limit on CUDA near what is needed now. For the engine's thread.

    Models that are loaded side by side, such as a draft model, have one each.

    Attributes:
        held: Bytes of the model's weights and open sequences.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._is_followed = bool(plan.total) and cuda.is_in_use()
        self.held = plan.weights
        if self._is_followed:
            _FOLLOWED.add(self)

    def follow(self, kv_bytes: int) -> None:
        """Set the limits for open sequences with so much KV cache.

        Also if they are the same: another model may have been loaded, or have failed to load.
        """
        if not self._is_followed:
            return
        plan = self._plan
        self.held = plan.weights + kv_bytes
        others = sum(limit.held for limit in [*_FOLLOWED] if limit is not self)
        limit = plan.limit_with(kv_bytes, others)
        mx.set_memory_limit(limit)
        mx.set_cache_limit(plan.cache_limit)
        if cuda.pool_bytes() > max(limit, plan.limit_beside(others) - plan.overhead):
            cuda.trim_pool(limit)

    def release(self) -> None:
        """Stop counting this model, which is unloaded."""
        _FOLLOWED.discard(self)


_FOLLOWED: weakref.WeakSet[MemoryLimit] = weakref.WeakSet()  # of all loaded models


def _used_besides_arrays(info: Mapping[str, Any]) -> int:
    """Return what of the device is not MLX's arrays: the driver, kernels, plans, other programs."""
    if "free_memory" not in info:
        return 0
    used = int(info["total_memory"]) - int(info["free_memory"])
    arrays = int(mx.get_active_memory() + mx.get_cache_memory())
    return max(0, used - max(cuda.pool_bytes(), arrays))


def recover_memory() -> None:
    """After a failed allocation: wait for what was submitted, and free what MLX caches.

    Operations that were submitted before the failure may use arrays that are about to be dropped.

    Raises:
        RuntimeError: the device has failed.
    """
    try:
        mx.synchronize()
    finally:
        mx.clear_cache()
        cuda.trim_pool(0)


def has_lost_device(error: BaseException) -> bool:
    """Whether an error means that no operation on a CUDA device can succeed in this process."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _LOST)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of MLX means that an allocation failed."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "unable to allocate" in text or "out of memory" in text


def _wire(nbytes: int) -> None:
    try:
        mx.set_wired_limit(nbytes)
    except (RuntimeError, ValueError) as error:  # before macOS 15, or a lower limit of the system
        _LOG.warning(
            "macOS may page out the model while it idles, so that the first reply after a pause "
            "is slow: %s",
            error,
        )
