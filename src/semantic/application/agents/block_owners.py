"""Which tenant and which model the blocks below a root belong to."""

from typing import TypeAlias

from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.storage_quota import TenantQuotas
from semantic.domain.blocks import BlockName, BlockNamespace

# The model's fingerprint and the format of its KV cache; a tenant's salt completes it to a root.
Naming: TypeAlias = tuple[str, str]


class BlockOwners:
    """Finds the owners of roots, for disk quotas and file headers. Thread-safe."""

    def __init__(self, agents: AgentLedger, quotas: TenantQuotas) -> None:
        self._agents = agents
        self._quotas = quotas
        self._tenants: dict[Naming, dict[BlockName, str]] = {}  # by root

    def serve(self, naming: Naming) -> None:
        """Know the roots of a model from now on."""
        self._tenants.setdefault(naming, {})

    def root(self, naming: Naming, tenant: str) -> BlockName:
        return BlockNamespace(*naming, self._agents.principal(tenant).salt).root()

    def fingerprint(self, root: BlockName) -> str:
        """Return the fingerprint of the model that uses a root; empty if none is known."""
        return self._owner(root)[1]

    def max_bytes(self, root: BlockName) -> int | None:
        """Return how many bytes of blocks a root may have on disk; None for no limit.

        That is the quota of its tenant less the size of the tenant's agents and turns.
        """
        storage = self._agents.storage
        if storage is None:
            return None  # no tenant has a quota
        tenant, _ = self._owner(root)
        quota = self._quotas.of(tenant)
        if not tenant or quota is None:
            return quota
        return max(0, quota - storage.used(tenant))

    def _owner(self, root: BlockName) -> tuple[str, str]:
        principals = self._agents.principals()
        for naming, tenants in tuple(self._tenants.items()):
            if root not in tenants and len(tenants) < len(principals):
                roots = (BlockNamespace(*naming, each.salt).root() for each in principals)
                tenants.update(zip(roots, (each.tenant for each in principals), strict=True))
            if root in tenants:
                return tenants[root], naming[0]
        return "", ""
