"""Export and import of agents as files, between servers and between models.

Block names depend on the tenant, so imported KV cache is sealed again under the names of its new
tenant, whose agents with the same prefix all share it. It is therefore accepted only from a file
signed by this server or by a trusted one. From any other file only the messages are imported;
tokens and KV cache are computed again. Blocks that do not fit into memory are dropped and
recomputed when needed.
"""

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from semantic.application.agents.cache_admin import ModelCache
from semantic.application.agents.feed import AgentAction, AgentChanged, EventFeed
from semantic.application.agents.ledger import AgentLedger
from semantic.application.cache.index import BlockNode
from semantic.application.cache.writer import DiskTier
from semantic.application.engine.device_thread import DeviceThread
from semantic.application.engine.model import LoadedModel
from semantic.application.prompt.replay import PromptDigest, ReplayStore, keys_to_remember
from semantic.domain.agents import Agent, Pointer, Principal, Turn, check_agent_id
from semantic.domain.blocks import BlockName, describe_change, unpack_tokens
from semantic.domain.chat import images_in
from semantic.domain.errors import (
    CacheCorruptionError,
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
)
from semantic.domain.sampling import FinishReason
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload
from semantic.ports.inbound import ImportedAgent
from semantic.ports.storage import (
    AgentFilePort,
    ExportHead,
    ExportImage,
    ExportItem,
    ExportPart,
    PutAgent,
    PutTurn,
)

_NO_MODEL = "none"  # in the head of a file exported while no model was loaded

# Limits on concurrent imports: each needs memory for its turns, and disk for its file.
MAX_IMPORTS = 4
MAX_TENANT_IMPORTS = 2
_BUSY_RETRY_S = 5.0

OpenFile = Callable[[], Iterable[bytes]]


@dataclass(slots=True)
class _Arrival:
    """The content of an import file, without its payloads."""

    head: ExportHead
    turns: list[Turn] = field(default_factory=list)
    images: set[str] = field(default_factory=set)  # digests
    num_parts: int = 0


class AgentTransfer:
    """Exports and imports agents. Thread-safe; reads from disk.

    Attributes:
        check_image: Called with each imported image file; raises InvalidRequestError to refuse it.
    """

    def __init__(
        self,
        agents: AgentLedger,
        cache: Callable[[], ModelCache],
        device: DeviceThread,
        disk: DiskTier | None,
        files: AgentFilePort,
        feed: EventFeed,
        replays: ReplayStore,
    ) -> None:
        self._agents = agents
        self._cache = cache
        self._replays = replays
        self._device = device
        self._disk = disk
        self._files = files
        self._feed = feed
        self.check_image: Callable[[bytes], object] = lambda _: None
        self._lock = threading.Lock()
        self._importing: Counter[str] = Counter()

    # -- export ---------------------------------------------------------------------------------

    def export(self, principal: Principal, agent_id: str) -> Iterator[bytes]:
        """Export an agent with its turns and KV cache as one file; yields the file in pieces.

        While no model is loaded the file has no KV cache, since the head of the file must name the
        model that computed it.

        Raises:
            AgentNotFoundError: the agent does not exist; raised before the first piece.
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
        yield from self._images(agent.tenant, turns)
        if model is not None and turns and turns[0].pointer is not None:
            yield from self._parts(turns[0].pointer)

    def _images(self, tenant: str, turns: Sequence[Turn]) -> Iterator[ExportImage]:
        messages = (message for turn in turns for message in turn.messages)
        for digest in dict.fromkeys(image.digest for image in images_in(messages)):
            data = self._agents.image_file(tenant, digest)
            if data is not None:
                yield ExportImage(digest, data)

    def _parts(self, pointer: Pointer) -> Iterator[ExportPart]:
        for node in self._cache().store.chain(pointer.block):
            kinds = [kind for kind in LayerKind if node.has(kind)]
            try:
                payloads = [(kind, stored_payload(node, kind, self._disk)) for kind in kinds]
            except CacheCorruptionError:
                return
            if LayerKind.FULL not in kinds:
                return
            for kind, payload in payloads:
                yield ExportPart(node.part(kind), payload)

    # -- import ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def admit_import(self, principal: Principal) -> Iterator[None]:
        """Count an import against the limits while its file is uploaded and read.

        Raises:
            RateLimitedError: `MAX_TENANT_IMPORTS` imports of this tenant are in progress.
            OverloadedError: `MAX_IMPORTS` imports of all tenants are in progress.
        """
        tenant = principal.tenant
        with self._lock:
            if self._importing[tenant] >= MAX_TENANT_IMPORTS:
                raise RateLimitedError(
                    f"{MAX_TENANT_IMPORTS} imports of this tenant are in progress, which is the "
                    "limit; try again.",
                    retry_after_s=_BUSY_RETRY_S,
                )
            if self._importing.total() >= MAX_IMPORTS:
                raise OverloadedError(
                    f"{MAX_IMPORTS} imports are in progress, which is the limit; try again.",
                    retry_after_s=_BUSY_RETRY_S,
                )
            self._importing[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._importing[tenant] -= 1
                if not self._importing[tenant]:
                    del self._importing[tenant]

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
            open_file: Returns the file's content from its beginning, on every call.
            new_id: Id of the imported agent; None keeps the id in the file.
            is_messages_only: Import the messages without tokens and KV cache.

        Raises:
            ConflictError: an agent with this id exists.
            InvalidRequestError: the file is damaged, or was exported from another model.
            ModelSwapError: `is_messages_only` is False, and no model is ready to compare with.
            QuotaExceededError: the import exceeds the tenant's disk quota.
        """
        signer = self._files.check(open_file())
        is_trusted = bool(signer) and not is_messages_only
        arrival = _checked(self._files.read(open_file(), has_parts=is_trusted))
        if arrival.head.abi == _NO_MODEL:
            is_messages_only, is_trusted = True, False
        known = arrival.head.agent.with_id(new_id) if new_id else arrival.head.agent
        check_agent_id(known.id, "id", is_new=False)  # a file may name it as packs are named
        if self._agents.find_agent(principal.tenant, known.id) is not None:
            raise ConflictError(f"agent {known.id!r} already exists.", param="id")
        logged = (PutTurn(principal.tenant, turn) for turn in arrival.turns)
        self._agents.check_storage(principal.tenant, PutAgent(known), *logged)
        names, root = dict[BlockName, BlockName](), BlockName()
        if not is_messages_only:
            model = self._device.ready_model()
            _require_same_model(arrival.head, model)
            root = model.root(principal)
            self._remember_replies(model.text_root(principal), arrival.turns if is_trusted else ())
        self._store_images(principal, arrival, open_file)
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
        with self._agents.log.settled():
            made = self._agents.create(agent, turns)
            self._feed.publish(AgentChanged(made.tenant, made.id, AgentAction.IMPORTED))
        reason = _reason(
            signer, arrival.head, is_messages_only=is_messages_only, has_state=bool(names)
        )
        return ImportedAgent(made, has_state=bool(names), reason=reason)

    def _remember_replies(self, root: BlockName, turns: Sequence[Turn]) -> None:
        """Remember the tokens of replies: encoding their text again may give others.

        A reply that a stop string ended was encoded again by the server that made it.
        """
        digest, num_before = PromptDigest(root), 0
        for turn in turns:
            if turn.num_tokens != num_before + len(turn.tokens):
                digest, num_before = PromptDigest(root), 0  # it holds the whole conversation
            num_asked = turn.usage.prompt_tokens - num_before
            if turn.messages and turn.reason is not FinishReason.STOP_SEQUENCE and num_asked > 0:
                prompt = digest.followed_by(turn.tokens[:num_asked])
                for key in keys_to_remember(prompt, turn.messages[-1]):
                    self._replays.remember(key, turn.tokens[num_asked:])
            digest.update(turn.tokens)
            num_before += len(turn.tokens)

    def _store_images(self, principal: Principal, arrival: _Arrival, open_file: OpenFile) -> None:
        """Store the file's images one by one: together they may not fit into memory."""
        for item in self._files.read(open_file(), has_parts=False) if arrival.images else ():
            if not isinstance(item, ExportImage):
                continue
            try:
                self.check_image(item.data)
            except InvalidRequestError as error:
                why = f"the file's image {item.digest[:12]} is refused: {error.message}"
                raise InvalidRequestError(why, param="file") from error
            self._agents.store_image(principal.tenant, item.digest, item.data)

    def _seal(self, root: BlockName, items: Iterator[ExportItem]) -> dict[BlockName, BlockName]:
        """Seal blocks under names of the new owner; returns a map from old names to new ones."""
        store = self._cache().store
        parts = (item for item in items if isinstance(item, ExportPart))
        names: dict[BlockName, BlockName] = {}
        is_room = True
        for name, group in groupby(parts, key=lambda item: item.part.name):
            block = list(group)  # consume every item, so that the file is checked to its end
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
                store.settle_windows([sealed], sealed, [end])
        return names


def stored_payload(node: BlockNode, kind: LayerKind, disk: DiskTier | None) -> KVPayload:
    """Return a part of a block, from memory or disk.

    Raises:
        CacheCorruptionError: the part was evicted meanwhile, or its file is damaged.
    """
    payload, part = node.payloads.get(kind), node.files.get(kind)
    if payload is not None:
        return payload
    if part is None or disk is None:
        raise CacheCorruptionError(f"block {node.name.short} was evicted")
    return disk.read(part).result()


def _checked(items: Iterator[ExportItem]) -> _Arrival:
    first = next(items, None)
    if not isinstance(first, ExportHead):
        raise InvalidRequestError("the file does not begin with an agent.", param="file")
    arrival = _Arrival(first)
    for item in items:
        if isinstance(item, Turn) and not (arrival.images or arrival.num_parts):
            parent = arrival.turns[-1].id if arrival.turns else None
            if item.parent != parent:
                raise InvalidRequestError(
                    "the file's turns do not follow each other.", param="file"
                )
            arrival.turns.append(item)
        elif isinstance(item, ExportImage) and not arrival.num_parts:
            arrival.images.add(item.digest)
        elif isinstance(item, ExportPart):
            if item.payload.abi != first.abi:
                raise InvalidRequestError("the file mixes KV cache formats.", param="file")
            arrival.num_parts += 1
        else:
            raise InvalidRequestError("the file's entries are out of order.", param="file")
    messages = (message for turn in arrival.turns for message in turn.messages)
    if not arrival.images.issubset(image.digest for image in images_in(messages)):
        raise InvalidRequestError(
            "the file has an image that none of its messages contains.", param="file"
        )
    return arrival


def _require_same_model(head: ExportHead, model: LoadedModel) -> None:
    served = _fingerprint(model), model.backend.traits.kv_abi
    if (head.fingerprint, head.abi) != served:
        reason = f"the file's KV cache is of {head.model!r}, and {model.id!r} cannot use it."
        if head.fingerprint == served[0]:
            rest = model.kv_format
            reason = f"the file's {describe_change((head.abi, rest), (served[1], rest))}"
        raise InvalidRequestError(
            f"{reason} To import only the messages, set messages_only=true.",
            param="messages_only",
        )


def _reason(signer: str, head: ExportHead, *, is_messages_only: bool, has_state: bool) -> str:
    if head.abi == _NO_MODEL:
        return "the file was exported while no model was loaded"
    if is_messages_only:
        return "messages_only was set"
    if not signer:
        return "the file is not signed by this server or one of trusted_export_keys"
    return (
        f"signed by {signer}"
        if has_state
        else "the file has no KV cache, or there is no room for it"
    )


def _renamed(turns: Iterable[Turn], agent_id: str, now: float) -> list[Turn]:
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
    """Point turns at the sealed blocks; a turn whose block is missing gets no pointer."""
    placed = []
    for turn in turns:
        block = names.get(turn.pointer.block) if turn.pointer else None
        pointer = Pointer(root, block, turn.pointer.num_tokens) if turn.pointer and block else None
        placed.append(replace(turn, pointer=pointer))
    return placed


def _unplaced(turns: Iterable[Turn]) -> list[Turn]:
    """Keep only the messages: tokens and pointers are of another model, or not trusted."""
    unplaced: list[Turn] = []
    num_messages = 0
    for turn in turns:
        # Do not trust the file's count: later reads of the log rely on it.
        num_messages = len(turn.messages) + (0 if turn.holds_all_messages else num_messages)
        bare = replace(turn, tokens=(), num_tokens=0, num_head=0, digest="", pointer=None)
        unplaced.append(replace(bare, num_messages=num_messages))
    return unplaced


def _fingerprint(model: LoadedModel) -> str:
    return model.fingerprint or model.id
