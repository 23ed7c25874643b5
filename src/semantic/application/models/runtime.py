"""Settings that may change while the server runs, and the components that apply them."""

from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

from semantic.application.cache.writer import DiskTier
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.models.registry import ModelRegistry
from semantic.domain.errors import ConflictError, ModelSwapError, PoolExhaustedError

_RESIZE_S = 10.0
Value: TypeAlias = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Current values, with the names and units of the start-up settings."""

    batch_window_ms: float
    target_step_ms: float | None
    max_batch_size: int
    prefill_step_size: int
    max_queue: int
    max_idle: int
    draft_tokens: int
    default_max_tokens: int | None
    memory_budget_mb: int
    disk_budget_mb: int
    write_queue_mb: int
    log_level: str
    drain_timeout_s: float
    swap_on_request: bool
    min_residence_s: float
    model_keep_alive_s: float


_LIMITS = (
    *("batch_window_ms", "target_step_ms", "max_batch_size", "prefill_step_size"),
    *("max_queue", "max_idle", "draft_tokens", "default_max_tokens"),
)
_POLICY = {
    "drain_timeout_s": "drain_s",
    "swap_on_request": "swap_on_request",
    "min_residence_s": "min_residence_s",
    "model_keep_alive_s": "keep_alive_s",
}
_DISK = {"disk_budget_mb": "budget_bytes", "write_queue_mb": "queue_bytes"}


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
        """Start with the settings the server was started with.

        Args:
            settings: Initial values.
            device: Applies engine limits and the memory budget.
            models: Applies the swap policy.
            disk: Applies disk budgets; None if nothing is stored on disk.
            set_memory: Sets the memory budget, in bytes, of stores created later.
            set_log_level: Sets the log level.
        """
        self._settings = settings
        self._device = device
        self._models = models
        self._disk = disk
        self._set_memory = set_memory
        self._set_log_level = set_log_level

    def read(self) -> RuntimeSettings:
        """Return the current settings."""
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
        given = asdict(wanted)
        limits = {name: given[name] for name in _LIMITS}
        self._device.reconfigure(replace(self._device.limits, **limits))
        policy = {field: given[name] for name, field in _POLICY.items()}
        self._models.policy = replace(self._models.policy, **policy)
        if self._disk is not None:
            budgets = {field: given[name] * 2**20 for name, field in _DISK.items()}
            self._disk.limits = replace(self._disk.limits, **budgets)
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
                f"memory_budget_mb {megabytes} is too little for what runs now: {error.message}.",
                param="memory_budget_mb",
            ) from error
        except FutureTimeoutError as error:
            raise ModelSwapError("the device is busy.", retry_after_s=2) from error
        self._set_memory(nbytes)
