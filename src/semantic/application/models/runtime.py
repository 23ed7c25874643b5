"""Changes settings while the server runs, through the components that apply them."""

from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import TypeAlias

from semantic.application.cache.writer import DiskTier
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.models.registry import ModelRegistry
from semantic.application.settings import RuntimeSettings
from semantic.domain.errors import ConflictError, ModelSwapError, PoolExhaustedError

_RESIZE_S = 10.0
Value: TypeAlias = float | int | str | bool | None


class Runtime:
    """Reads and changes runtime settings.

    Thread-safe; a change of the memory budget waits until the device has applied it.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        device: DeviceThread,
        models: ModelRegistry,
        disk: DiskTier | None,
        set_memory: Callable[[int], None],
        set_log_level: Callable[[str], None],
    ) -> None:
        """`set_memory` sets the memory budget, in bytes, of stores created later."""
        self._settings = settings
        self._device = device
        self._models = models
        self._disk = disk
        self._set_memory = set_memory
        self._set_log_level = set_log_level

    def read(self) -> RuntimeSettings:
        return self._settings

    def change(self, changes: Mapping[str, Value]) -> RuntimeSettings:
        """Change settings and return all of them; the engine applies limits from its next step on.

        Raises:
            ConflictError: running requests use more memory than the new budget.
            ModelSwapError: the device did not apply the memory budget in time.
        """
        wanted = replace(self._settings, **changes)  # type: ignore[arg-type]  # checked at the edge
        if "memory_budget_mb" in changes:
            self._resize(wanted.memory_budget_mb)
        self._device.reconfigure(wanted)
        self._models.policy = wanted
        if self._disk is not None:
            self._disk.limits = replace(
                self._disk.limits,
                budget_bytes=wanted.disk_bytes,
                queue_bytes=wanted.write_queue_bytes,
            )
        if "log_level" in changes:
            self._set_log_level(wanted.log_level)
        self._settings = wanted
        return wanted

    def _resize(self, megabytes: int) -> None:
        nbytes = megabytes * 2**20
        try:
            self._device.resize(nbytes).result(_RESIZE_S)
        except PoolExhaustedError as error:
            raise ConflictError(
                f"memory_budget_mb {megabytes} is too small for what runs now: {error.message}.",
                param="memory_budget_mb",
            ) from error
        except FutureTimeoutError as error:
            raise ModelSwapError("the device is busy.", retry_after_s=2) from error
        self._set_memory(nbytes)
