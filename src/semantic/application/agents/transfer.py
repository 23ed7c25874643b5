"""Agents that leave as a file and come back: here, on another server, or to another model.

Block names depend on the tenant, so KV cache that comes in is sealed again under names of
its new owner, and all agents with the same beginning share it. So it is taken only from a file that
this server signed, or one it trusts: of a stranger's file what was said is taken, and tokens and
state are made again. State is only a cache: what finds no room is computed when it is needed.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from semantic.application.agents.cache_admin import ModelCache
from semantic.application.agents.feed import AgentAction, AgentChanged, EventFeed
from semantic.application.agents.ledger import AgentLedger
from semantic.application.cache.index import BlockNode
from semantic.application.cache.writer import DiskTier
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.domain.agents import Agent, Pointer, Principal, Turn
from semantic.domain.blocks import BlockName, unpack_tokens
from semantic.domain.errors import CacheCorruptionError, ConflictError, InvalidRequestError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload
from semantic.ports.inbound import ImportedAgent
from semantic.ports.storage import AgentFilePort, ExportHead, ExportItem, ExportPart

_NO_MODEL = "none"  # in the head of a file that was written while none was loaded

OpenFile = Callable[[], Iterable[bytes]]


@dataclass(slots=True)
class _Arrival:
    """What a file was found to hold."""

    head: ExportHead
    turns: list[Turn] = field(default_factory=list)
    num_parts: int = 0


class AgentTransfer:
    """Agents as files. Any thread; reads from disk."""

    def __init__(
        self,
        agents: AgentLedger,
        cache: Callable[[], ModelCache],
        device: DeviceThread,
        disk: DiskTier | None,
        files: AgentFilePort,
        feed: EventFeed,
    ) -> None:
        self._agents = agents
        self._cache = cache
        self._device = device
        self._disk = disk
        self._files = files
        self._feed = feed

    # -- out ------------------------------------------------------------------------------------

    def export(self, principal: Principal, agent_id: str) -> Iterator[bytes]:
        """Write an agent with its turns and KV cache as one file, piece by piece.

        While no model is loaded only what was said is written: nobody knows whose state it is.

        Raises:
            AgentNotFoundError: there is no such agent; before the first piece.
        """
        agent = self._agents.get(principal.tenant, agent_id)
        return self._files.write(self._items(agent, self._device.model))

    def _items(self, agent: Agent, model: LoadedModel | None) -> Iterator[ExportItem]:
        if model is None:
            yield ExportHead(agent, _NO_MODEL, _NO_MODEL, _NO_MODEL)
        else:
            yield ExportHead(agent, model.id, _fingerprint(model), model.backend.traits.kv_abi)
        turns = self._agents.turns(agent, limit=max(agent.num_turns, 1))
        yield from reversed(turns)
        if model is not None and turns and turns[0].pointer is not None:
            yield from self._parts(turns[0].pointer)

    def _parts(self, pointer: Pointer) -> Iterator[ExportPart]:
        """The parts of all blocks on the way to a pointer, as far as they are available."""
        for node in self._cache().store.chain(pointer.block):
            kinds = [kind for kind in LayerKind if node.has(kind)]
            try:
                payloads = [(kind, self._payload(node, kind)) for kind in kinds]
            except CacheCorruptionError:
                return
            if LayerKind.FULL not in kinds:
                return
            for kind, payload in payloads:
                yield ExportPart(node.part(kind), payload)

    def _payload(self, node: BlockNode, kind: LayerKind) -> KVPayload:
        payload, part = node.payloads.get(kind), node.files.get(kind)
        if payload is not None:
            return payload
        if part is None or self._disk is None:
            raise CacheCorruptionError(f"block {node.name.short} is gone")
        return self._disk.read(part).result()

    # -- in -------------------------------------------------------------------------------------

    def import_agent(
        self,
        principal: Principal,
        open_file: OpenFile,
        new_id: str | None,
        *,
        is_messages_only: bool,
    ) -> ImportedAgent:
        """Import an exported agent; the whole file is checked before anything is changed.

        Args:
            principal: Whose it becomes.
            open_file: Gives the file's content from its beginning, each time.
            new_id: Its name from now on; None keeps the one in the file.
            is_messages_only: Take what was said and leave tokens and KV cache.

        Raises:
            ConflictError: the name is taken.
            InvalidRequestError: the file is damaged, or another model's.
        """
        signer = self._files.check(open_file())
        is_trusted = bool(signer) and not is_messages_only
        arrival = _checked(self._files.read(open_file(), has_parts=is_trusted))
        if arrival.head.abi == _NO_MODEL:
            is_messages_only, is_trusted = True, False
        known = arrival.head.agent
        known = known.with_id(new_id) if new_id else known
        if self._agents.find(principal.tenant, known.id) is not None:
            raise ConflictError(f"agent {known.id!r} already exists.", param="id")
        names: dict[BlockName, BlockName] = {}
        root = BlockName()
        if not is_messages_only:
            model = self._device.ready_model()
            _require_same_model(arrival.head, model)
            root = model.root(principal)
        if is_trusted and arrival.num_parts:
            names = self._seal(root, self._files.read(open_file(), has_parts=True))
        now = time.time()
        turns = _renamed(arrival.turns, known.id, now)
        turns = _placed(turns, root, names) if is_trusted else _unplaced(turns)
        agent = replace(
            known,
            tenant=principal.tenant,
            head=turns[-1].id if turns else None,
            num_turns=len(turns),
            created_at=now,
            last_used=now,
            is_pinned=False,
        )
        made = self._agents.create(agent, turns)
        self._feed.publish(AgentChanged(made.tenant, made.id, AgentAction.IMPORTED))
        reason = _reason(
            signer, arrival.head, is_messages_only=is_messages_only, has_state=bool(names)
        )
        return ImportedAgent(made, has_state=bool(names), reason=reason)

    def _seal(self, root: BlockName, items: Iterator[ExportItem]) -> dict[BlockName, BlockName]:
        """Keep blocks under names of their new owner; returns which became which."""
        store = self._cache().store
        parts = (item for item in items if isinstance(item, ExportPart))
        names: dict[BlockName, BlockName] = {}
        is_room = True
        for name, group in groupby(parts, key=lambda item: item.part.name):
            block = list(group)  # all items are read: the file is checked to its end
            part = block[0].part
            parent = root if part.parent == part.root else names.get(part.parent)
            if not is_room or parent is None:
                continue
            payloads = [item.payload for item in block]
            sealed = store.seal(root, parent, unpack_tokens(part.tokens), payloads)
            is_room = sealed is not None
            if sealed is not None:
                names[name] = sealed
                end = part.start + part.num_tokens
                store.settle([sealed], sealed, [end])
        return names


def _checked(items: Iterator[ExportItem]) -> _Arrival:
    """Read a file to its end and see that its turns follow one another."""
    first = next(items, None)
    if not isinstance(first, ExportHead):
        raise InvalidRequestError("the file does not begin with an agent.", param="file")
    arrival = _Arrival(first)
    for item in items:
        if isinstance(item, Turn) and not arrival.num_parts:
            parent = arrival.turns[-1].id if arrival.turns else None
            if item.parent != parent:
                raise InvalidRequestError(
                    "the file's turns do not follow each other.", param="file"
                )
            arrival.turns.append(item)
        elif isinstance(item, ExportPart):
            if item.payload.abi != first.abi:
                raise InvalidRequestError("the file mixes KV cache formats.", param="file")
            arrival.num_parts += 1
        else:
            raise InvalidRequestError("the file's entries are out of order.", param="file")
    return arrival


def _require_same_model(head: ExportHead, model: LoadedModel) -> None:
    served = _fingerprint(model), model.backend.traits.kv_abi
    if (head.fingerprint, head.abi) != served:
        raise InvalidRequestError(
            f"the file's KV cache is of {head.model!r}, and {model.id!r} cannot use it. "
            "Import what was said alone, with messages_only=true.",
            param="messages_only",
        )


def _reason(signer: str, head: ExportHead, *, is_messages_only: bool, has_state: bool) -> str:
    if head.abi == _NO_MODEL:
        return "the file was exported while no model was loaded"
    if is_messages_only:
        return "messages_only was asked for"
    if not signer:
        return "the file is not signed by this server or one of trusted_export_keys"
    return f"signed by {signer}" if has_state else "the file held no state that found room"


def _renamed(turns: Iterable[Turn], agent_id: str, now: float) -> list[Turn]:
    """Give turns ids of their own; none is of the future."""
    renamed: list[Turn] = []
    for turn in turns:
        taken = replace(
            turn,
            id=f"turn_{secrets.token_hex(12)}",
            parent=renamed[-1].id if renamed else None,
            agent_id=agent_id,
            created_at=min(turn.created_at, now),
            is_durable=False,
        )
        renamed.append(taken)
    return renamed


def _placed(
    turns: Iterable[Turn], root: BlockName, names: dict[BlockName, BlockName]
) -> list[Turn]:
    """Let turns point at the blocks that were kept."""
    placed = []
    for turn in turns:
        block = names.get(turn.pointer.block) if turn.pointer else None
        pointer = Pointer(root, block, turn.pointer.num_tokens) if turn.pointer and block else None
        placed.append(replace(turn, pointer=pointer))
    return placed


def _unplaced(turns: Iterable[Turn]) -> list[Turn]:
    """Leave only what was said: tokens and places of another model, or a stranger's claims."""
    unplaced: list[Turn] = []
    num_messages = 0
    for turn in turns:
        # Counted again, since everything that is read of a log later relies on it.
        num_messages = len(turn.messages) + (0 if turn.holds_all_messages else num_messages)
        bare = replace(turn, tokens=(), num_tokens=0, digest="", pointer=None)
        unplaced.append(replace(bare, num_messages=num_messages))
    return unplaced


def _fingerprint(model: LoadedModel) -> str:
    return model.fingerprint or model.id
