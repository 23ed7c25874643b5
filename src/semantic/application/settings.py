"""Settings that the application reads while it runs, with their defaults, bounds and descriptions.

This is their only definition. The configuration and the operator's endpoint take fields, bounds and
descriptions from here, under the same names.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Literal, TypeVar

_MB = 2**20
_T = TypeVar("_T")


def _setting(default: _T, description: str, *, is_changeable: bool = True, **bounds: float) -> _T:
    """Declare a setting; `bounds` are any of `ge`, `gt` and `le`, as pydantic names them."""
    about = {"description": description, "is_changeable": is_changeable, **bounds}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the engine.

    Attributes:
        target_step_ms: Target duration of a step with prompts while other sequences decode; it
            limits the prompt tokens. None means twelve times a step without prompts, or more if
            most of that is fixed costs: prefill then takes little longer than alone, on any device.
        max_idle: The idle copies take at most a share of the memory.
        ageing_s: Counts from the request's last service; see the scheduler.
    """

    max_batch_size: int = _setting(
        16, "maximum number of sequences that run at once", ge=1, le=1024
    )
    max_idle: int = _setting(
        8, "idle working copies to keep open for their agents' next turns", ge=0
    )
    draft_tokens: int = _setting(
        16, "maximum draft tokens checked in one step (speculative decoding); 0: none", ge=0, le=16
    )
    ahead_tokens: int = _setting(
        4096, "maximum prompt tokens computed ahead while an agent's tools run; 0: none", ge=0
    )
    prefill_step_size: int = _setting(
        4096, "maximum prompt tokens in one step; a slow device takes fewer", ge=1
    )
    target_step_ms: float | None = _setting(
        None, "target duration of a step while others decode (default: 12 decode steps)", gt=0
    )
    batch_window_ms: float = _setting(
        5, "how long an idle engine waits for requests that are being prepared", ge=0, le=1000
    )
    max_queue: int = _setting(256, "maximum number of waiting requests", ge=0)
    ageing_s: float = _setting(
        10, "a request that has waited this long takes precedence", ge=0, is_changeable=False
    )
    default_max_tokens: int | None = _setting(
        None,
        "maximum reply length if a request sets none (default: the model's, or 4096 tokens)",
        ge=1,
    )


@dataclass(frozen=True)
class SwapPolicy:
    """When models are swapped and unloaded."""

    drain_timeout_s: float = _setting(
        30, "how long running requests may continue before a swap", ge=0
    )
    swap_on_request: bool = _setting(
        False, "load the model that a request names, if it is on this machine"
    )
    min_residence_s: float = _setting(
        60, "minimum time a model is served before a request may swap it", ge=0
    )
    model_keep_alive_s: float = _setting(
        0, "unload a model that is idle for this long; 0 keeps it loaded", ge=0
    )


@dataclass(frozen=True)
class RuntimeSettings(EngineLimits, SwapPolicy):
    """All of them: the limits of the engine, the swap policy, the budgets and the log level."""

    memory_budget_mb: int = _setting(4096, "memory for the KV cache", ge=1)
    disk_budget_mb: int = _setting(
        20480, "maximum size of the cache directory, including other models' files", ge=1
    )
    write_queue_mb: int = _setting(
        512, "maximum data waiting to be written; the rest stays in memory, dirty", ge=1
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "verbosity")

    @property
    def memory_bytes(self) -> int:
        return self.memory_budget_mb * _MB

    @property
    def disk_bytes(self) -> int:
        return self.disk_budget_mb * _MB

    @property
    def write_queue_bytes(self) -> int:
        return self.write_queue_mb * _MB


def changeable_settings() -> list["Field[object]"]:
    """The fields of `RuntimeSettings` that the operator may change while the server runs."""
    return [entry for entry in fields(RuntimeSettings) if entry.metadata["is_changeable"]]
