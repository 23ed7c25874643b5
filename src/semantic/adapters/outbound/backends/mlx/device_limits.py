"""How the device's memory is divided: weights, KV cache of open sequences, and MLX's own use.

MLX caches freed buffers, by default as many as the memory holds, and keeps what loading freed. Its
memory limit did not make it release them on an H200, so the cache has a limit of its own: on CUDA
what MLX may use besides weights and KV cache. On Metal, memory is shared with all other programs:
the cache is small. There, macOS may also page out buffers of a GPU that idles, and the first reply
after a pause would wait for them: wired buffers stay.

On CUDA the memory limit follows the KV cache of open sequences. MLX encodes operations ahead of the
device until its arrays reach the limit, and each holds its results until it has run: with one limit
for the whole budget, a prompt of 100,000 tokens took 45 GB where its KV cache has 14. The limit is
one for the process: it counts the weights and sequences of all loaded models. Above it, MLX waits
for the device before each operation.
"""

import logging
import weakref
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.cuda import device as cuda

_LOG = logging.getLogger(__name__)
_OF_METAL = 16  # MLX caches at most one part in this many
_RESERVED = 8  # one part in this many of the device is for activations, kernels and other programs
_MARGIN = 10  # MLX may use one part in this many more than weights and KV cache
_LEAST_MARGIN = 2**30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The shares of the device's memory, in bytes.

    Attributes:
        total: What the server may use; 0 if there is no limit, as on a CPU without a setting.
        budget: Limit of the KV cache by the setting; 0 if there is none.
    """

    total: int
    weights: int
    budget: int = 0

    @property
    def kv_room(self) -> int | None:
        """Bytes for open sequences; None without a limit. Negative if the weights do not fit."""
        return self.total - self.total // _RESERVED - self.weights if self.total else None

    @property
    def needed(self) -> int:
        """Bytes of weights and KV cache together."""
        room = self.kv_room or 0
        return self.weights + min(self.budget or room, room)

    @property
    def margin(self) -> int:
        """Bytes for activations and cached buffers."""
        return max(self.needed // _MARGIN, _LEAST_MARGIN)

    @property
    def limit(self) -> int:
        """Bytes that arrays and cached buffers may take together."""
        return min(self.total, self.needed + self.margin)

    def limit_beside(self, others: int) -> int:
        """Bytes that they may take beside other models with so many."""
        return min(self.total, self.limit + others)

    def limit_with(self, kv_bytes: int, overhead: int, others: int = 0) -> int:
        """Bytes that they may take while open sequences have so much KV cache.

        `overhead` is what the device uses besides MLX's arrays, `others` what other models have; at
        least a quarter of the margin is left for activations.
        """
        least = self.needed + others + self.margin // 4
        most = max(self.limit_beside(others) - overhead, least)
        return min(most, self.weights + kv_bytes + others + self.margin)


def device_total(setting: int) -> int:
    """Return the bytes of the default device that the server may use; 0 for a CPU by default."""
    if mx.default_device() != mx.Device(mx.gpu):
        return setting
    info = mx.device_info()
    total = int(info.get("max_recommended_working_set_size") or info.get("total_memory") or 0)
    return min(setting, total) if setting and total else setting or total


def limit_device_memory(plan: MemoryPlan) -> None:
    """Set MLX's limits for its default device, and release what loading left; none for a CPU."""
    if mx.default_device() != mx.Device(mx.gpu):
        return
    mx.clear_cache()
    if working_set := int(mx.device_info().get("max_recommended_working_set_size") or 0):
        mx.set_cache_limit(min(working_set, plan.limit) // _OF_METAL)
        mx.set_memory_limit(plan.limit)
        _wire(working_set)
    elif plan.total:
        mx.set_cache_limit(max(0, plan.limit - plan.needed))
        mx.set_memory_limit(plan.limit)


class MemoryLimit:
    """Keeps MLX's memory limit on CUDA near what is needed now. For the engine's thread.

    Models that are loaded side by side, such as a draft model, have one each.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._is_followed = bool(plan.total) and cuda.is_in_use()
        self._overhead = _overhead() if self._is_followed else 0
        self._held = plan.weights
        if self._is_followed:
            _FOLLOWED.add(self)

    def follow(self, kv_bytes: int) -> None:
        """Set the limit for open sequences with so much KV cache."""
        if not self._is_followed:
            return
        self._held = self._plan.weights + kv_bytes
        others = sum(limit._held for limit in [*_FOLLOWED] if limit is not self)
        limit = self._plan.limit_with(kv_bytes, self._overhead, others)
        mx.set_memory_limit(limit)  # also if it is the same: another model may have set it
        if cuda.pool_bytes() > max(limit, self._plan.limit_beside(others) - self._overhead):
            cuda.trim_pool(limit)

    def release(self) -> None:
        """Stop counting this model, which is unloaded."""
        _FOLLOWED.discard(self)


_FOLLOWED: weakref.WeakSet[MemoryLimit] = weakref.WeakSet()  # of all loaded models


def _overhead() -> int:
    """Return what the device uses besides MLX's arrays: its driver's memory, kernels, plans."""
    info = mx.device_info()
    if "free_memory" not in info:
        return 0
    used = int(info["total_memory"]) - int(info["free_memory"])
    arrays = int(mx.get_active_memory() + mx.get_cache_memory())
    return max(0, used - max(cuda.pool_bytes(), arrays))


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
