"""What tests of the cache and of its upkeep share."""

from collections.abc import Iterator

import pytest

from semantic.application.cache.writer import DiskLimits
from semantic.domain.spec import ModelCacheSpec
from tests.unit.application.memory_rig import IndexedLedger, MakeRig, MemoryRig, RigLimits


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Makes rigs of so many bytes, and ends them."""
    made: list[MemoryRig] = []

    def make(
        spec: ModelCacheSpec | None = None,
        *,
        memory: int = 10**6,
        disk: int = 10**7,
        queue: int = 10**6,
        tenant: int | None = None,
        has_disk: bool = True,
        ledger: IndexedLedger | None = None,
    ) -> MemoryRig:
        limits = RigLimits(memory, DiskLimits(disk, queue, lambda _: tenant))
        made.append(MemoryRig(spec=spec, limits=limits, has_disk=has_disk, ledger=ledger))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> MemoryRig:
    """One of the usual size."""
    return make_rig()
