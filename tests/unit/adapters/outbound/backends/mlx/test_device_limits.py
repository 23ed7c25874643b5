"""What MLX may keep of a device's memory, by what the device reports."""

from collections.abc import Callable

import pytest

mx = pytest.importorskip("mlx.core")
from semantic.adapters.outbound.backends.mlx import device_limits  # noqa: E402 - needs MLX
from semantic.adapters.outbound.backends.mlx.device_limits import MemoryPlan  # noqa: E402

pytestmark = pytest.mark.unit

GB = 2**30
APPLE = {"max_recommended_working_set_size": 32 * 2**30, "memory_size": 48 * 2**30}
NVIDIA = {"total_memory": 24 * 2**30, "compute_capability_major": 8}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, int]]:
    """Set the limits of a device that reports this; MLX itself is not told."""

    def made(info: dict[str, int], *, is_old: bool = False) -> dict[str, int]:
        found: dict[str, int] = {}

        def wire(nbytes: int) -> None:
            if is_old:
                raise ValueError("[set_wired_limit] needs macOS 15.0")
            found["wired"] = nbytes

        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        monkeypatch.setattr(mx, "device_info", lambda: info)
        monkeypatch.setattr(mx, "set_cache_limit", lambda nbytes: found.update(cache=nbytes))
        monkeypatch.setattr(mx, "set_memory_limit", lambda nbytes: found.update(limit=nbytes))
        monkeypatch.setattr(mx, "set_wired_limit", wire)
        total = device_limits.device_total(0)
        device_limits.limit_device_memory(MemoryPlan(total, weights=8 * GB, budget=4 * GB))
        return found

    return made


def test_on_metal_the_model_is_wired_and_little_is_cached(
    limits: Callable[..., dict[str, int]],
) -> None:
    limit = 12 * GB + 12 * GB // 10
    assert limits(APPLE) == {"cache": limit // 16, "limit": limit, "wired": 32 * GB}


def test_an_older_macos_is_only_warned(
    limits: Callable[..., dict[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert set(limits(APPLE, is_old=True)) == {"cache", "limit"}
    assert "needs macOS 15.0" in caplog.text


def test_on_cuda_all_that_is_used_is_limited(limits: Callable[..., dict[str, int]]) -> None:
    limit = 12 * GB + 12 * GB // 10
    assert limits(NVIDIA) == {"cache": 12 * GB // 10, "limit": limit}


@pytest.mark.parametrize(
    "total,room,limit", [(8, 2.0, 8.0), (12, 5.5, 10.0), (16, 9.0, 10.0), (24, 16.0, 10.0)]
)
def test_a_plan_fits_the_device(total: int, room: float, limit: float) -> None:
    plan = MemoryPlan(total * GB, weights=5 * GB, budget=4 * GB)
    assert plan.kv_room == room * GB
    assert plan.limit == limit * GB  # weights, budget and 1 GB


def test_weights_that_do_not_fit_leave_no_room() -> None:
    room = MemoryPlan(8 * GB, weights=16 * GB).kv_room
    assert room is not None
    assert room < 0


def test_a_setting_makes_a_device_smaller_and_never_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert [device_limits.device_total(n) for n in (0, 2 * GB)] == [0, 2 * GB]
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: NVIDIA)
    assert [device_limits.device_total(n * GB) for n in (0, 8, 80)] == [24 * GB, 8 * GB, 24 * GB]


@pytest.mark.parametrize(
    "error,expected",
    [
        (RuntimeError("[malloc_async] Unable to allocate 4294967296 bytes."), True),
        (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), True),
        (MemoryError(), True),
        (ValueError("[matmul] shapes do not match"), False),
    ],
)
def test_failed_allocations_are_recognised(error: Exception, expected: bool) -> None:
    assert device_limits.is_out_of_memory(error) == expected


def test_a_cpu_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(mx, "device_info", lambda: pytest.fail("asked a CPU"))
    device_limits.limit_device_memory(MemoryPlan(0, weights=1))
