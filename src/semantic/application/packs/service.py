"""Make, add, list and remove cache packs.

A pack holds the leading blocks of an agent's prompt that contain only its tools and system
messages. Block names depend on the tenant, so adding a pack seals its blocks again under the names
of each tenant that gets it, within that tenant's disk quota; tenants share no blocks.
"""

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from semantic.application.agents.cache_admin import ModelCache
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.transfer import stored_payload
from semantic.application.cache.index import BlockNode
from semantic.application.cache.restore_plan import RestorePlan, WantedPart
from semantic.application.cache.writer import DiskTier
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.packs.recompute import BlockRecomputation, PackBlock, choose_blocks
from semantic.domain.agents import (
    Agent,
    AgentProfile,
    Pointer,
    Principal,
    Turn,
    pack_id,
)
from semantic.domain.blocks import (
    BlockName,
    BlockNamespace,
    block_name,
    describe_change,
    pack_tokens,
    unpack_tokens,
)
from semantic.domain.errors import (
    ConflictError,
    InvalidRequestError,
    ModelSwapError,
    PoolExhaustedError,
    QuotaExceededError,
)
from semantic.domain.events import Usage
from semantic.domain.images.spans import num_before_images
from semantic.domain.spec import LayerKind
from semantic.ports.packs import (
    AddedPack,
    PackFilePort,
    PackHead,
    PackItem,
    PackSigner,
    PackView,
)
from semantic.ports.storage import ExportPart

DEFAULT_SHARE = 0.1
_FLUSH_S = 60.0

OpenFile = Callable[[], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A pack whose signature, model and chain of blocks were checked."""

    head: PackHead
    signer: PackSigner
    tokens: tuple[int, ...]
    num_blocks: int


class PackService:
    """The packs of all tenants. Thread-safe; methods read from disk, and `add` computes."""

    def __init__(
        self,
        agents: AgentLedger,
        cache: Callable[[], ModelCache],
        device: DeviceThread,
        disk: DiskTier | None,
        files: PackFilePort,
        chance: random.Random | None = None,
    ) -> None:
        """`chance` chooses the blocks to compute again; None is unpredictable."""
        self._agents = agents
        self._cache = cache
        self._device = device
        self._disk = disk
        self._files = files
        self._chance = chance or random.SystemRandom()

    # -- make -----------------------------------------------------------------------------------

    def make(self, principal: Principal, agent_id: str, name: str) -> Iterator[bytes]:
        """Make a pack of the tools and system messages of an agent's latest prompt.

        Their end is where the template's text no longer depends on the first user message, as
        found when the prompt was rendered. The pack has whole blocks up to there and nothing
        after. Yields the file in pieces.

        Raises:
            AgentNotFoundError: the agent does not exist.
            InvalidRequestError: the name is invalid, the agent's prompt has no such beginning, or
                its KV cache is not of the loaded model or was evicted.
            ModelSwapError: no model is ready.
        """
        pack_id(name)
        model = self._device.ready_model()
        agent = self._agents.get(principal.tenant, agent_id)
        tokens = self._head_tokens(agent, model.root(principal))
        plan = self._plan(model.root(principal), tokens)
        head = PackHead(
            name,
            model.id,
            *_identity(model),
            num_tokens=plan.end,
            text=_text(tokens[: plan.end], model),
            created_at=round(time.time(), 3),
        )
        return self._files.write(self._items(head, plan, BlockNamespace(*model.naming).root()))

    def _head_tokens(self, agent: Agent, root: BlockName) -> list[int]:
        turn = next(iter(self._agents.turns(agent, limit=1)), None)
        if turn is None or not turn.num_head:
            raise InvalidRequestError(
                f"the latest prompt of agent {agent.id!r} has no system prompt and no tools, or "
                "an earlier version logged it; send the agent a message, then try again.",
                param="agent",
            )
        if turn.pointer is None or turn.pointer.root != root:
            raise InvalidRequestError(
                f"the KV cache of agent {agent.id!r} is of another model or format than the "
                "loaded one; send the agent a message, then try again.",
                param="agent",
            )
        tokens = self._agents.tokens(agent)[: turn.num_head]
        if len(tokens) < turn.num_head:
            raise InvalidRequestError(
                f"the tokens of agent {agent.id!r} are not stored (store=false).", param="agent"
            )
        return tokens[: num_before_images(tokens)]  # a pack has no image files

    def _plan(self, root: BlockName, tokens: Sequence[int]) -> RestorePlan:
        """Plan which blocks to take: all that end within `tokens`, with the state at their end."""
        store = self._cache().store
        plan = store.find_prefix(root, pack_tokens(tokens))
        while plan.parts and (last := _full_nodes(plan)[-1]).end > plan.end:
            plan = store.find_prefix(root, pack_tokens(tokens[: last.start]))
        names = {node.name for node in _full_nodes(plan)}
        if not plan.parts or not all(wanted.node.name in names for wanted in plan.parts):
            raise InvalidRequestError(
                "no whole block of the agent's system prompt and tools is in the cache: they are "
                "too short, or were evicted. Send the agent a message, then try again.",
                param="agent",
            )
        return plan

    def _items(self, head: PackHead, plan: RestorePlan, root: BlockName) -> Iterator[PackItem]:
        yield head
        parent = root
        for node in _full_nodes(plan):
            tokens = unpack_tokens(node.tokens)
            name = block_name(parent, tokens)
            for kind in _kinds_of(node, plan.parts):
                part = replace(node.part(kind), root=root, name=name, parent=parent)
                yield ExportPart(part, stored_payload(node, kind, self._disk))
            parent = name

    # -- add ------------------------------------------------------------------------------------

    def add(
        self,
        owners: Sequence[str],
        open_file: OpenFile,
        *,
        name: str | None = None,
        share: float = DEFAULT_SHARE,
    ) -> AddedPack:
        """Check a pack, compute some of its blocks again, and add it to tenants: all or none.

        Args:
            owners: The tenants whose agents share the pack.
            open_file: Returns the file's content from its beginning, on every call.
            name: Name of the pack; None takes the name in the file.
            share: Share of the blocks to compute again; at least four are.

        Raises:
            InvalidRequestError: the file is damaged, no trusted key has signed it, it is of
                another model or KV format, or a block is not what the model computes.
            ConflictError: a tenant has a pack with this name.
            QuotaExceededError: there is no room on disk, or in a tenant's quota.
            PoolExhaustedError: there is no room in memory.
            ModelSwapError: no model is ready.
        """
        model = self._device.ready_model()
        arrival = self._examine(open_file, model)
        agent_id = pack_id(name or arrival.head.name)
        principals = [self._owner(tenant) for tenant in owners]
        for principal in principals:
            if self._agents.find_agent(principal.tenant, agent_id) is not None:
                raise ConflictError(
                    f"tenant {principal.tenant!r} has a pack {name or arrival.head.name!r}; remove "
                    "it first, or choose another name.",
                    param="name",
                )
        chosen = choose_blocks(arrival.num_blocks, share, model, self._chance)
        recomputation = BlockRecomputation(self._device, self._files.compare)
        recomputation.check(arrival.tokens, self._blocks(open_file), chosen)
        if self._device.ready_model() is not model:
            raise ModelSwapError("the model was swapped meanwhile; try again.", retry_after_s=2)
        added: list[Agent] = []
        try:
            for principal in principals:
                added.append(self._keep(agent_id, arrival, principal, model, open_file))
                self._require_written(added[-1])
        except BaseException:
            for agent in added:
                self._remove(agent)
            raise
        return AddedPack(tuple(map(self._view, added)), len(chosen))

    def _examine(self, open_file: OpenFile, model: LoadedModel) -> _Arrival:
        signer = self._files.check(open_file())
        if not signer.name:
            raise InvalidRequestError(
                f"the pack is signed by {signer.key}, which this server does not trust. If you "
                f"know whose key it is: semantic pack trust NAME {signer.key}",
                param="file",
            )
        head = next(self._files.read(open_file(), has_parts=False))
        assert isinstance(head, PackHead)  # noqa: S101 - the layout of the file says so
        _require_same_model(head, model)
        known_kinds = {LayerKind.FULL, *model.backend.spec.kinds}
        tokens: list[int] = []
        parent = root = BlockNamespace(*model.naming).root()
        num_blocks = 0
        for parts in self._blocks(open_file):
            block = parts[0].part
            if (block.root, block.parent, block.start) != (root, parent, len(tokens)):
                raise _malformed("its blocks do not follow each other")
            if any(i.payload.abi != head.abi or i.part.kind not in known_kinds for i in parts):
                raise _malformed("its blocks have another layout than it states")
            parent = block.name
            num_blocks += 1
            tokens += unpack_tokens(block.tokens)
        limit = min(model.backend.spec.max_context, self._device.longest_sequence)
        if len(tokens) >= limit:
            raise _malformed(f"its {len(tokens)} tokens exceed the limit of {limit} tokens")
        if len(tokens) != head.num_tokens or max(tokens) >= model.tokenizer.vocab_size:
            raise _malformed("its tokens are not those that it states")
        if _text(tokens, model) != head.text:
            raise _malformed("its text is not that of its tokens")
        return _Arrival(head, signer, tuple(tokens), num_blocks)

    def _blocks(self, open_file: OpenFile) -> Iterator[PackBlock]:
        items = self._files.read(open_file(), has_parts=True)
        parts = (item for item in items if isinstance(item, ExportPart))
        for _, group in groupby(parts, key=lambda item: item.part.name):
            block = list(group)
            if block[0].part.kind is not LayerKind.FULL:
                raise _malformed("a block has no state of its full-attention layers")
            yield block

    def _owner(self, tenant: str) -> Principal:
        known = {principal.tenant: principal for principal in self._agents.principals()}
        if tenant not in known:
            raise InvalidRequestError(
                f"there is no tenant {tenant!r}, or none of its keys was used yet.", param="tenant"
            )
        return known[tenant]

    def _keep(
        self,
        agent_id: str,
        arrival: _Arrival,
        owner: Principal,
        model: LoadedModel,
        open_file: OpenFile,
    ) -> Agent:
        """Seal the blocks for one tenant, and create the agent that keeps them."""
        root, now = model.root(owner), time.time()
        last = self._seal(root, self._blocks(open_file), len(arrival.tokens))
        turn = Turn(
            id=f"turn_{secrets.token_hex(12)}",
            parent=None,
            agent_id=agent_id,
            messages=(),
            tokens=arrival.tokens,
            num_tokens=len(arrival.tokens),
            pointer=Pointer(root, last, len(arrival.tokens)),
            usage=Usage(len(arrival.tokens)),
            created_at=now,
            model=model.id,
            num_head=len(arrival.tokens),
        )
        agent = Agent(
            agent_id,
            now,
            tenant=owner.tenant,
            head=turn.id,
            num_turns=1,
            last_used=now,
            is_pinned=True,
            labels=(("signer", arrival.signer.name), ("key", arrival.signer.key)),
            profile=AgentProfile(model=model.id),
        )
        with self._agents.log.settled():
            made = self._agents.create(agent, [turn])
        self._cache().upkeep.refresh_pins()
        return made

    def _seal(self, root: BlockName, blocks: Iterable[PackBlock], num_tokens: int) -> BlockName:
        store = self._cache().store
        parent, names, new = root, list[BlockName](), list[BlockName]()
        for parts in blocks:
            tokens = unpack_tokens(parts[0].part.tokens)
            payloads = [item.payload for item in parts]
            is_new = store.get(block_name(parent, tokens)) is None
            sealed = store.seal(root, parent, tokens, payloads)
            if sealed is None and self._disk is not None:
                self._disk.flush(_FLUSH_S)  # blocks that are written can be evicted from memory
                sealed = store.seal(root, parent, tokens, payloads)
            if sealed is None:
                nodes = [node for node in map(store.get, new) if node is not None]
                dropped = [WantedPart(node, kind) for node in nodes[::-1] for kind in LayerKind]
                store.drop_files(dropped)
                store.drop_payloads(dropped)
                raise PoolExhaustedError("the pack does not fit in the memory of the KV cache.")
            names.append(sealed)
            new += [sealed] if is_new else []
            parent = sealed
        store.settle_windows(names, parent, [num_tokens])
        return parent

    def _require_written(self, agent: Agent) -> None:
        if self._disk is None:
            return
        self._disk.flush(_FLUSH_S)
        pointer = self._agents.place(agent).pointer
        if pointer is None or not self._cache().store.is_on_disk(pointer):
            raise QuotaExceededError(
                f"the pack cannot be written to disk: {self._disk.problem or 'no room'}."
            )

    # -- list and remove ------------------------------------------------------------------------

    def packs(self, tenants: Sequence[str] = ()) -> list[PackView]:
        """Return the packs of some tenants, or of all, sorted by name."""
        packs = [agent for agent in self._agents.recent() if agent.pack]
        chosen = [agent for agent in packs if not tenants or agent.tenant in tenants]
        return [self._view(a) for a in sorted(chosen, key=lambda a: (a.pack, a.tenant))]

    def remove(self, tenants: Sequence[str], name: str) -> None:
        """Remove a pack from tenants; deletes the blocks that no agent of the tenant reaches.

        Raises:
            AgentNotFoundError: a tenant has no such pack; nothing is removed.
        """
        found = [self._agents.get_pack(tenant, name) for tenant in tenants]
        for agent in found:
            self._remove(agent)

    def _remove(self, agent: Agent) -> None:
        try:
            upkeep = self._cache().upkeep
        except ModelSwapError:  # garbage collection deletes the blocks later
            self._agents.delete_pack(agent)
            return
        upkeep.evict(agent, is_cold=True)
        self._agents.delete_pack(agent)
        upkeep.refresh_pins()

    def _view(self, agent: Agent) -> PackView:
        turn = next(iter(self._agents.turns(agent, limit=1)), None)
        pointer, model, labels = turn and turn.pointer, self._device.model, dict(agent.labels)
        owner = self._agents.principal(agent.tenant)
        chain: list[BlockNode] = []
        with contextlib.suppress(ModelSwapError):
            chain = self._cache().store.chain(pointer.block) if pointer else []
        return PackView(
            name=agent.pack,
            tenant=agent.tenant,
            model=agent.profile.model or "",
            signer=PackSigner(labels.get("key", ""), labels.get("signer", "")),
            num_tokens=turn.num_tokens if turn else 0,
            num_blocks=len(chain),
            num_bytes=sum(max(node.memory_bytes, node.disk_bytes) for node in chain),
            created_at=agent.created_at,
            is_usable=bool(model and pointer and pointer.root == model.root(owner)),
            memory_tokens=sum(n.num_tokens for n in chain if LayerKind.FULL in n.payloads),
            disk_tokens=sum(n.num_tokens for n in chain if LayerKind.FULL in n.files),
        )


def _full_nodes(plan: RestorePlan) -> list[BlockNode]:
    return [wanted.node for wanted in plan.parts if wanted.kind is LayerKind.FULL]


def _kinds_of(node: BlockNode, parts: Iterable[WantedPart]) -> list[LayerKind]:
    return [wanted.kind for wanted in parts if wanted.node is node]


def _identity(model: LoadedModel) -> tuple[str, str, str]:
    return model.naming[0], model.backend.traits.kv_abi, model.kv_format


def _require_same_model(head: PackHead, model: LoadedModel) -> None:
    fingerprint, abi, kv_format = _identity(model)
    if head.fingerprint != fingerprint:
        raise InvalidRequestError(
            f"the pack is of {head.model!r} with other weights than {model.id!r}, which is "
            "loaded; load that model, or get a pack for this one.",
            param="file",
        )
    if (head.abi, head.kv_format) != (abi, kv_format):
        change = describe_change((head.abi, head.kv_format), (abi, kv_format))
        raise InvalidRequestError(f"the pack cannot be used: {change}", param="file")


def _text(tokens: Sequence[int], model: LoadedModel) -> str:
    special = {token.id: token.text.encode() for token in model.tokenizer.special_tokens}
    pieces = (special.get(token) or model.tokenizer.token_bytes(token) for token in tokens)
    return b"".join(pieces).decode("utf-8", "replace")


def _malformed(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the pack cannot be added: {problem}.", param="file")
