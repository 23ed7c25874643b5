"""What MLX may keep of a device's memory, by what the device reports."""

from collections.abc import Callable

import pytest

mx = pytest.importorskip("mlx.core")
from semantic.adapters.outbound.backends.mlx import device_limits  # noqa: E402 - needs MLX
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda  # noqa: E402
from semantic.adapters.outbound.backends.mlx.device_limits import (  # noqa: E402
    DeviceRoom,
    MemoryLimit,
    MemoryPlan,
)

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
        total = device_limits.device_room(0).total
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


@pytest.mark.parametrize(
    "kv,overhead,expected", [(0, 1, 11), (2, 1, 13), (44, 1, 54), (44, 4, 53.125)]
)
def test_the_limit_follows_the_open_sequences(kv: int, overhead: int, expected: float) -> None:
    plan = MemoryPlan(100 * GB, weights=6 * GB, budget=44 * GB, overhead=overhead * GB)
    assert plan.limit == 55 * GB
    assert plan.limit_with(kv * GB) == expected * GB


@pytest.mark.parametrize("size,spare", [(4, 1.0), (8, 1.25), (12, 1.5), (24, 3.0)])
def test_a_full_cuda_device_keeps_most_of_the_spare_memory_free(size: int, spare: float) -> None:
    """MLX exceeds its limit by the operations it submits together."""
    plan = MemoryPlan(size * GB, GB, 64 * GB, overhead=GB // 2, least_spare=5 * GB // 4)
    assert plan.spare == spare * GB
    room = plan.kv_room
    assert room == (size - 0.5 - spare - 1) * GB * 15 / 16
    assert plan.step_tokens(100_000) == max(256, plan.spare // 2 // 600_000)
    assert plan.limit_with(room) <= plan.total - plan.overhead - plan.spare * 5 // 8
    assert plan.limit_with(0) <= 2 * GB + plan.spare


def test_on_cuda_mlx_is_told_the_limit_and_freed_memory_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver's own gigabyte is no room for arrays."""
    told: list[tuple[str, int]] = []
    cached: set[int] = set()
    pool = 7 * GB
    info = NVIDIA | {"free_memory": 16 * GB}
    monkeypatch.setattr(cuda, "is_in_use", lambda: True)
    monkeypatch.setattr(cuda, "pool_bytes", lambda: pool)
    monkeypatch.setattr(cuda, "trim_pool", lambda size: told.append(("trim", size)))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_memory_limit", lambda size: told.append(("limit", size)))
    monkeypatch.setattr(mx, "set_cache_limit", cached.add)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 6 * GB)
    monkeypatch.setattr(device_limits, "recover_memory", lambda: None)
    plan = MemoryPlan.of(DeviceRoom(24 * GB), weights=6 * GB, budget=4 * GB)
    assert plan.overhead == (1 + 1) * GB  # the driver's, and what its pool has too much
    limit = MemoryLimit(plan)
    for kv in (0, 1, 3):
        limit.follow(kv * GB)
    assert told == [("limit", size * GB) for size in (7, 8, 9.75)]
    pool = 11 * GB
    limit.follow(3 * GB)
    assert told[3:] == [("limit", 9.75 * GB), ("trim", 9.75 * GB)]
    assert cached == {GB}  # 10 % of weights and budget, or 1 GB
    limit.release()


def test_the_limit_counts_all_loaded_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit of a draft model alone, MLX waits for the device before each operation."""
    told: list[int] = []
    pool = 13 * GB
    monkeypatch.setattr(cuda, "is_in_use", lambda: True)
    monkeypatch.setattr(cuda, "pool_bytes", lambda: pool)
    monkeypatch.setattr(cuda, "trim_pool", lambda size: pytest.fail(f"trimmed to {size}"))
    monkeypatch.setattr(mx, "device_info", lambda: NVIDIA | {"free_memory": 24 * GB})
    monkeypatch.setattr(mx, "set_memory_limit", told.append)
    monkeypatch.setattr(mx, "set_cache_limit", lambda _: None)
    served, draft = (MemoryLimit(MemoryPlan(24 * GB, n * GB, budget=4 * GB)) for n in (6, 2))
    served.follow(1 * GB)
    draft.follow(2 * GB)
    served.follow(4 * GB)
    served.follow(4 * GB)
    assert told == [(6 + 1 + 2 + 1) * GB, (2 + 2 + 7 + 1) * GB, *[(6 + 4 + 4 + 1) * GB] * 2]
    draft.release()
    pool = 7 * GB
    served.follow(0)
    assert told[-1] == (6 + 1) * GB
    served.release()


def test_weights_that_do_not_fit_leave_no_room() -> None:
    room = MemoryPlan(8 * GB, weights=16 * GB).kv_room
    assert room is not None
    assert room < 0


def test_a_setting_makes_a_device_smaller_and_never_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert [device_limits.device_room(n).total for n in (0, 2 * GB)] == [0, 2 * GB]
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: NVIDIA)
    rooms = [device_limits.device_room(n * GB) for n in (0, 8, 80)]
    assert rooms == [DeviceRoom(24 * GB), DeviceRoom(8 * GB), DeviceRoom(24 * GB)]


def test_memory_of_other_programs_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, int] = {}
    monkeypatch.setattr(cuda, "is_in_use", lambda: True)
    monkeypatch.setattr(cuda, "pool_bytes", lambda: 2 * GB)  # the server's own
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: NVIDIA | {"free_memory": 14 * GB})
    monkeypatch.setattr(mx, "set_cache_limit", lambda nbytes: told.update(cache=nbytes))
    monkeypatch.setattr(mx, "set_memory_limit", lambda nbytes: told.update(limit=nbytes))
    room = device_limits.device_room(0)
    assert room == DeviceRoom(16 * GB, outside=8 * GB)
    assert device_limits.device_room(8 * GB).total == 8 * GB
    device_limits.limit_while_loading(room)
    assert told == {"cache": 0, "limit": 14 * GB}
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * GB)
    monkeypatch.setattr(device_limits, "recover_memory", lambda: None)
    plan = MemoryPlan.of(room, weights=6 * GB, budget=4 * GB)
    assert plan.overhead == 0  # theirs is not counted twice
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * GB)
    assert MemoryPlan.of(room, weights=GB, budget=4 * GB).weights == 2 * GB  # and a tower
    other = MemoryLimit(MemoryPlan(room.total, GB))
    beside = MemoryPlan.of(room, weights=GB, budget=4 * GB)
    assert (beside.weights, beside.others) == (GB, GB)
    assert beside.kv_room == (16 - 2 - 1 - 1) * GB * 15 // 16
    other.release()


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


@pytest.mark.parametrize(
    "error,expected",
    [
        (RuntimeError("cudaMallocManaged(&data) failed: an illegal memory access was made"), True),
        (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), False),
        (ValueError("unspecified launch failure"), False),
    ],
)
def test_a_lost_device_is_recognised(error: Exception, expected: bool) -> None:
    assert device_limits.has_lost_device(error) == expected


def test_a_cpu_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(mx, "device_info", lambda: pytest.fail("asked a CPU"))
    device_limits.limit_device_memory(MemoryPlan(0, weights=1))
