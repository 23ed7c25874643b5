"""Which model and format computed the stored blocks, and which blocks the served model cannot use.

Block names derive from a root, which depends on the model, the dtype and the storage format. When
one of these changes, the blocks below the old root stay on disk, but lookups no longer find them.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from semantic.domain.agents import Agent, Pointer
from semantic.domain.blocks import BlockName, BlockOrigin, describe_change


@dataclass(frozen=True, slots=True)
class ServedFormat:
    """The model and format that compute blocks now.

    Attributes:
        abi: See `Traits.kv_abi`.
    """

    fingerprint: str
    abi: str
    kv_format: str
    root_of: Callable[[str], BlockName]


class StoredFormats:
    """Compares stored blocks with the format that is served. Thread-safe."""

    def __init__(self, origins: Iterable[BlockOrigin] = ()) -> None:
        self._origins = {origin.root: origin for origin in origins}
        self._served: ServedFormat | None = None

    def serve(self, served: ServedFormat, tenants: Iterable[str]) -> None:
        self._served = served
        for tenant in tenants:
            self._served_root(tenant)

    def root_for(self, agent: Agent, pointer: Pointer) -> BlockName:
        """Return the root below which an agent's next turn looks for blocks.

        For an agent whose profile names a model, this stays the pointer's root while another model
        is served, so that the agent finds its blocks again when its own model is loaded.
        """
        served = self._served
        if served is None or (agent.profile.model and self._is_other_model(pointer.root)):
            return pointer.root
        return self._served_root(agent.tenant)

    def note(self, tenant: str, root: BlockName) -> str:
        """Explain why the served model, if any, cannot use a root's blocks; empty if it can."""
        return "" if self._served is None else self.describe(root, self._served_root(tenant))

    def describe(self, stored: BlockName, used: BlockName) -> str:
        """Describe the difference between two roots; empty if they are the same."""
        if stored == used:
            return ""
        old, new = self._origins.get(stored), self._origins.get(used)
        if old is None or new is None:
            return "KV cache was written by another model or in another format."
        if old.fingerprint != new.fingerprint:
            return "KV cache was written by another model."
        return describe_change((old.abi, old.kv_format), (new.abi, new.kv_format))

    def summary(self, num_bytes: Callable[[BlockName], int]) -> str:
        """Summarize the served model's stored blocks that are unusable; empty if none."""
        if (served := self._served) is None:
            return ""
        sizes: Counter[str] = Counter()
        for origin in tuple(self._origins.values()):
            stored, used = (origin.abi, origin.kv_format), (served.abi, served.kv_format)
            if origin.fingerprint == served.fingerprint and stored != used:
                sizes[describe_change(stored, used)] += num_bytes(origin.root)
        return " ".join(
            f"{change} {size / 2**20:,.1f} MB of it cannot be used."
            for change, size in sizes.items()
            if size
        )

    def _served_root(self, tenant: str) -> BlockName:
        served = self._served
        assert served is not None  # noqa: S101 - the callers check this
        root = served.root_of(tenant)
        if root not in self._origins:
            self._origins[root] = BlockOrigin(
                root, served.fingerprint, served.abi, served.kv_format
            )
        return root

    def _is_other_model(self, root: BlockName) -> bool:
        origin, served = self._origins.get(root), self._served
        return (
            origin is not None and served is not None and (origin.fingerprint != served.fingerprint)
        )
