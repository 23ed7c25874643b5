"""The log of turns: finished requests become turns here, and are read back.

Until a turn is written, it is read from memory. A longer block may replace the block that a turn
points at before the turn is logged; the `Repoint` row then precedes the turn's row and misses it.
So `TurnLog` remembers recent replacements and applies them to turns logged later.
"""

import contextlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from semantic.application.agents.comparison import (
    MIN_MISSED,
    CacheFacts,
    RequestShape,
    cache_miss,
    model_change,
    request_change,
    tool_digests,
)
from semantic.domain.agents import (
    Agent,
    Divergence,
    Pointer,
    Principal,
    Reuse,
    Turn,
    conversation_digest,
)
from semantic.domain.blocks import BlockName, common_prefix
from semantic.domain.chat import Continuation, Message, Role, ToolSpec, images_in
from semantic.domain.errors import CachePersistenceError
from semantic.domain.events import CacheMiss, MissReason, ReplyTiming, Usage
from semantic.domain.sampling import FinishReason
from semantic.ports.inbound import PastTurn
from semantic.ports.storage import (
    LedgerChange,
    LedgerPort,
    PutImage,
    PutTurn,
    Repoint,
    TurnPlace,
    WriteChanges,
)

_Key: TypeAlias = tuple[str, str]  # tenant, turn id
_PAGE = 256
_MAX_LINKS = 50_000
_MAX_MOVES = 256  # few suffice: a turn is logged right after its last block is sealed
MAX_WALK = 64  # turns searched for the one a prompt continues
_UNKNOWN = ""  # no turn has this id


def turn_id(request_id: str) -> str:
    """Return the id of the turn that a request creates."""
    return f"turn_{request_id}"


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A finished request, to be logged as a turn of an agent.

    Attributes:
        messages: The whole conversation including the reply.
        turn_id: Id of the new turn; empty for a random id.
        is_stored: Whether to log messages and tokens; if False, the turn holds neither.
        continuation: The turn it continues, if the server keeps the conversation.
        epoch: Epoch of the agent's lease; None if no lease is needed.
        num_dropped: Messages dropped to make room, where the client keeps the conversation.
        tools: The tools of the request.
        is_thinking: Whether the request asks for thinking; None leaves that to the model.
        facts: What the engine found in the cache; None if unknown.
        previous: The turn that the conversation seems to continue, if its agent is new.
        num_head: See `Turn`, also for `repairs` and `timing`.
    """

    prompt: Sequence[int]
    reply: Sequence[int]
    messages: Sequence[Message]
    pointer: Pointer | None
    usage: Usage
    reuse: Reuse
    turn_id: str = ""
    is_stored: bool = True
    continuation: Continuation | None = None
    model: str = ""
    reason: FinishReason | None = None
    epoch: int | None = None
    num_dropped: int = 0
    tools: Sequence[ToolSpec] = ()
    is_thinking: bool | None = None
    facts: CacheFacts | None = None
    previous: str | None = None
    num_head: int = 0
    repairs: tuple[str, ...] = ()
    timing: ReplyTiming | None = None


class TurnLog:
    """All turns of one ledger. Thread-safe.

    The device thread calls `move`, which therefore never waits for I/O.
    """

    def __init__(
        self, ledger: LedgerPort, write: WriteChanges, settle_s: float | None = None
    ) -> None:
        """Start with the turns in the ledger.

        Args:
            write: Writes changes in order; its future resolves when they are written.
            settle_s: Longest wait of `settled`; None does not wait.
        """
        self._ledger = ledger
        self._write = write
        self._settle_s = settle_s
        # Serialises `put`, and is held while a database is written: `move` must not acquire it.
        self._order = threading.Lock()
        self._lock = threading.Lock()  # guards the fields below; never held across I/O
        self._turns: dict[_Key, Turn] = {}  # not written yet, in the order of their writes
        self._parents: dict[_Key, str | None] = {}
        self._moves: OrderedDict[BlockName, BlockName] = OrderedDict()

    # -- writing --------------------------------------------------------------------------------

    def put(self, tenant: str, turn: Turn, *changes: LedgerChange) -> tuple[Turn, Future[None]]:
        """Write a turn together with other changes.

        Returns the turn with its current pointer, and a future that resolves when it is written.
        """
        self._link(tenant, [(turn.id, turn.parent)])
        with self._order:
            with self._lock:
                turn = self._located(turn)
                self._turns.pop((tenant, turn.id), None)
                self._turns[tenant, turn.id] = turn
            try:
                done = self._write(*_new_images(tenant, turn), PutTurn(tenant, turn), *changes)
            except BaseException:
                with self._lock:
                    del self._turns[tenant, turn.id]
                raise
            with self._lock:
                moved = self._located(turn)
            if turn.pointer and moved.pointer and moved.pointer != turn.pointer:
                # The block moved during the write: its Repoint row may precede the turn's row.
                self._write(Repoint(turn.pointer.block, moved.pointer.block))
        done.add_done_callback(lambda written: self._forget(tenant, turn, written))
        return turn, done

    def move(self, old: BlockName, new: BlockName) -> None:
        """Repoint all turns from block `old` to block `new`, including turns logged later."""
        with self._lock:
            self._moves[old] = new
            if len(self._moves) > _MAX_MOVES:
                self._moves.popitem(last=False)
            self._write(Repoint(old, new))

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """On exit, wait until all changes so far, of all threads, are written.

        Does not wait if `settle_s` is None. Waits also if the body raises: the error may report
        that an agent does not exist while its deletion is still being written.

        Raises:
            CachePersistenceError: the changes are not written yet; the writer keeps retrying.
        """
        try:
            yield
        finally:
            if self._settle_s is not None:
                self._settle(self._settle_s)

    def _settle(self, timeout_s: float) -> None:
        try:
            self._write().result(timeout_s)  # an empty write resolves after all earlier ones
        except TimeoutError:
            why = f"writing takes more than {timeout_s:g} s."
        except CachePersistenceError as error:
            why = error.message
        else:
            return
        raise CachePersistenceError(
            f"the change is in memory, but not on disk yet: {why} The server keeps retrying; "
            "/health shows the problem.",
            retry_after_s=5,
        )

    # -- reading --------------------------------------------------------------------------------

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        """Return a turn, from memory if it is not written yet; None if it does not exist."""
        return self._unwritten(tenant, turn_id) or self._ledger.turn(tenant, turn_id)

    def is_durable(self, tenant: str, turn_id: str) -> bool:
        turn = self._ledger.turn(tenant, turn_id)
        return turn is not None and turn.is_durable

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        held = self._unwritten(tenant, turn_id)
        if held is not None:
            return TurnPlace(held.num_tokens, held.pointer)
        return self._ledger.place(tenant, turn_id)

    def turns(self, tenant: str, head: str | None, limit: int) -> list[Turn]:
        """Return up to `limit` turns that lead to `head`, latest first."""
        found: list[Turn] = []
        while head is not None and len(found) < limit:
            held = self._unwritten(tenant, head)
            if held is None:
                return [*found, *self._ledger.turns(tenant, head, limit=limit - len(found))]
            found.append(held)
            head = held.parent
        return found

    def timeline(self, tenant: str, head: str | None, limit: int) -> list[Turn]:
        """Return up to `limit` turns in the order in which they were made, latest first.

        Unlike `turns`, this follows a turn whose prompt diverged to the turn it diverged from, as
        long as that is stored.
        """
        found: list[Turn] = []
        while head is not None and (turn := self.turn(tenant, head)) is not None:
            found.append(turn)
            if len(found) == limit:
                break
            head = turn.divergence.turn_id if turn.divergence else turn.parent
        return found

    def ancestry(self, tenant: str, head: str | None, until: str) -> Iterator[str]:
        while head is not None:
            with self._lock:
                parent = self._parents.get((tenant, head), _UNKNOWN)
            if parent == _UNKNOWN:
                ids = self._ledger.ancestry(tenant, head, until=until)
                self._link(tenant, pairwise(ids))
                yield from ids
                return
            yield head
            head = parent if head != until else None

    def tokens(self, tenant: str, head: str | None) -> list[int]:
        turns = self._back_to(tenant, head, lambda turn: turn.holds_all_tokens)
        return [token for turn in turns for token in turn.tokens]

    def messages(self, tenant: str, head: str | None) -> list[Message]:
        turns = self._back_to(tenant, head, lambda turn: turn.holds_all_messages)
        return [message for turn in turns for message in turn.messages]

    def image_file(self, tenant: str, digest: str) -> bytes | None:
        """Return the file of an image in a turn; None if it is not stored."""
        with self._lock:
            held = [turn for (owner, _), turn in self._turns.items() if owner == tenant]
        files = {image.digest: image.data for turn in held for image in images_in(turn.messages)}
        return files.get(digest) or self._ledger.image(tenant, digest)

    # -- the next turn --------------------------------------------------------------------------

    def next_turn(
        self, agent: Agent, parent: Turn | None, finished: FinishedTurn, created_at: float
    ) -> Turn:
        """Build the turn after `parent`, with what is new, or with everything if it diverges."""
        tokens = [*finished.prompt, *finished.reply]
        going_on = finished.continuation or Continuation(parent.id if parent else None)
        is_prefix = parent is not None and _begins_with(finished.prompt, parent)
        num_said = parent.num_messages if parent and not going_on.is_edited else 0
        messages = finished.messages if finished.is_stored else finished.messages[:num_said]
        start = parent.num_tokens if parent and is_prefix else 0
        is_whole = finished.is_stored and not start
        divergence = self._divergence(agent, finished)
        turn = Turn(
            id=finished.turn_id or turn_id(secrets.token_hex(12)),
            parent=parent.id if parent else None,
            agent_id=agent.id,
            messages=tuple(messages[num_said:]),
            tokens=tuple(tokens[start:]) if finished.is_stored else (),
            num_tokens=len(tokens),
            pointer=finished.pointer,
            usage=finished.usage,
            created_at=created_at,
            reuse=finished.reuse,
            num_messages=len(messages),
            digest=conversation_digest(tokens),
            num_dropped=going_on.num_dropped + finished.num_dropped,
            num_summarised=going_on.num_summarised,
            divergence=divergence,
            model=finished.model,
            reason=finished.reason,
            tools=tool_digests(finished.tools) if is_whole else (),
            is_thinking=finished.is_thinking,
            num_head=finished.num_head,
            repairs=finished.repairs,
            timing=finished.timing,
        )
        before = parent if divergence is None else self.turn(agent.tenant, divergence.turn_id)
        miss = self._miss(agent.tenant, before, finished, divergence) if before else None
        return turn if miss is None else replace(turn, miss=miss)

    def change(
        self, tenant: str, before: Turn, prompt: Sequence[int], model: str, now: RequestShape
    ) -> CacheMiss | None:
        """Return how a request differs from that of an earlier turn; None if its prompt goes on.

        The result is `UNAVAILABLE` if the text of the earlier turn is not stored.
        """
        if _begins_with(prompt, before):
            return model_change(before.model, model, before.num_tokens)
        old = self.tokens(tenant, before.id)
        return self._change(tenant, before, common_prefix(old, prompt), prompt, model, now)

    def continued(self, agent: Agent, prompt: Sequence[int]) -> tuple[Turn | None, int]:
        """Return an agent's latest turn that a prompt continues, and the number of turns up to it.

        Of a long history, only the latest turns are searched.
        """
        head = self.turn(agent.tenant, agent.head) if agent.head else None
        if head is not None and _begins_with(prompt, head):
            return head, agent.num_turns  # the usual case; earlier turns may need disk reads
        for index, turn in enumerate(self.turns(agent.tenant, agent.head, MAX_WALK)):
            if _begins_with(prompt, turn):
                return turn, agent.num_turns - index
        return None, 0

    def _divergence(self, agent: Agent, finished: FinishedTurn) -> Divergence | None:
        before, prompt = agent.head or finished.previous, finished.prompt
        head = self.turn(agent.tenant, before) if before else None
        if head is None or _begins_with(prompt, head):
            return None
        return Divergence(head.id, common_prefix(self.tokens(agent.tenant, head.id), prompt))

    # -- cache misses ---------------------------------------------------------------------------

    def _miss(
        self, tenant: str, before: Turn, finished: FinishedTurn, divergence: Divergence | None
    ) -> CacheMiss | None:
        """Return why tokens of the turn before were computed again; None if they were not."""
        prompt, reuse, facts = finished.prompt, finished.reuse, finished.facts
        if divergence is not None:
            tools = tool_digests(finished.tools)
            now = RequestShape(finished.messages[:-1], tools, finished.is_thinking)
            found = self._change(tenant, before, divergence.index, prompt, finished.model, now)
            found = _with_dropped(found, finished)
        elif facts is None or before.num_tokens - reuse.reused < MIN_MISSED:
            return None  # the usual case
        else:
            found = cache_miss(before, finished.model, len(prompt), facts)
        if found is None or not min(found.num_tokens, reuse.computed):
            return None
        return replace(found, num_tokens=min(found.num_tokens, reuse.computed))

    def _change(
        self,
        tenant: str,
        before: Turn,
        index: int,
        prompt: Sequence[int],
        model: str,
        now: RequestShape,
    ) -> CacheMiss | None:
        """Compare with a turn whose tokens differ from the prompt at `index`."""
        other = model_change(before.model, model, min(before.num_tokens, len(prompt)))
        if other is not None:
            return other
        if (old := self._shape(tenant, before)) is None:
            detail = "the text of the previous turn is not stored"
            return CacheMiss(MissReason.UNAVAILABLE, 0, detail)
        return request_change(old, now, min(before.num_tokens, len(prompt)) - index)

    def _shape(self, tenant: str, turn: Turn) -> RequestShape | None:
        turns = self._back_to(tenant, turn.id, lambda one: one.holds_all_tokens)
        if not turns or not turns[0].holds_all_tokens:
            return None
        messages = self.messages(tenant, turn.id)
        if len(messages) != turn.num_messages:
            return None
        return RequestShape(messages, turns[0].tools, turn.is_thinking)

    # -- inside ---------------------------------------------------------------------------------

    def _back_to(
        self, tenant: str, head: str | None, is_first: Callable[[Turn], bool]
    ) -> list[Turn]:
        found: list[Turn] = []
        while head is not None:
            page = self.turns(tenant, head, _PAGE)
            for turn in page:
                found.append(turn)
                if is_first(turn):
                    return found[::-1]
            head = page[-1].parent if page else None
        return found[::-1]

    def _unwritten(self, tenant: str, turn_id: str) -> Turn | None:
        with self._lock:
            turn = self._turns.get((tenant, turn_id))
            return self._located(turn) if turn else None

    def _located(self, turn: Turn) -> Turn:
        while turn.pointer is not None and turn.pointer.block in self._moves:
            block = self._moves[turn.pointer.block]
            turn = replace(turn, pointer=replace(turn.pointer, block=block))
        return turn

    def _forget(self, tenant: str, turn: Turn, written: Future[None]) -> None:
        """Drop a written turn from memory, and all turns before it: writes happen in order."""
        if written.exception() is not None:
            return
        with self._lock:
            # If the turn was put again meanwhile, its newer version is not written yet.
            while self._turns.get((tenant, turn.id)) is turn:
                del self._turns[next(iter(self._turns))]

    def _link(self, tenant: str, links: Iterable[tuple[str, str | None]]) -> None:
        """Cache the parents of turns; a turn's parent never changes."""
        with self._lock:
            for turn_id, parent in links:
                self._parents[tenant, turn_id] = parent
            while len(self._parents) > _MAX_LINKS:
                del self._parents[next(iter(self._parents))]


def _new_images(tenant: str, turn: Turn) -> list[PutImage]:
    """Return the image files of a turn; those that were read from the ledger have no data."""
    files = {image.digest: image.data for image in images_in(turn.messages) if image.data}
    return [PutImage(tenant, *file, turn.created_at) for file in files.items()]


def _begins_with(prompt: Sequence[int], turn: Turn) -> bool:
    if turn.num_tokens > len(prompt):
        return False
    return conversation_digest(prompt[: turn.num_tokens]) == turn.digest


def _with_dropped(miss: CacheMiss | None, finished: FinishedTurn) -> CacheMiss | None:
    """Name the cause if messages differ because the server dropped the oldest ones."""
    going_on = finished.continuation
    num_dropped = finished.num_dropped + (going_on.num_dropped if going_on else 0)
    if miss is None or miss.reason is not MissReason.MESSAGES_CHANGED or not num_dropped:
        return miss
    return replace(miss, detail=f"{num_dropped} of the oldest messages were dropped to make room")


class PastTurns:
    """The content of finished turns.

    Thread-safe; do not call it on the event loop's thread, since it may read from disk.
    """

    def __init__(self, log: TurnLog) -> None:
        self._log = log

    def find_turn(self, request_id: str, principal: Principal) -> PastTurn | None:
        """Return the turn a request created; None if it is unknown or has no stored text."""
        turn = self._turn(request_id, principal)
        if turn is None:
            return None
        messages = self._log.messages(principal.tenant, turn.id)
        return PastTurn(
            turn_id=turn.id,
            messages=tuple(message for message in messages if not message.is_instruction),
            reply=turn.messages[-1],
            usage=turn.usage,
            created_at=turn.created_at,
            model=turn.model,
            reason=turn.reason,
            is_whole=len(messages) == turn.num_messages,
        )

    def find_reply(self, request_id: str, principal: Principal) -> Message | None:
        """Return the model's message in the turn a request created; see `find_turn`."""
        turn = self._turn(request_id, principal)
        return turn.messages[-1] if turn else None

    def forget_text(self, request_id: str, principal: Principal) -> bool:
        """Remove the messages and tokens of a turn; returns False if it has none.

        The turn's place in the history and its KV cache stay.

        Raises:
            CachePersistenceError: the text is removed in memory, but not on disk yet.
        """
        with self._log.settled():
            turn = self._turn(request_id, principal)
            if turn is not None:
                bare = replace(turn, messages=(), tokens=(), tools=(), miss=None)
                self._log.put(principal.tenant, bare)
            return turn is not None

    def _turn(self, request_id: str, principal: Principal) -> Turn | None:
        turn = self._log.turn(principal.tenant, turn_id(request_id))
        is_told = turn is not None and bool(turn.messages)
        return turn if is_told and turn and turn.messages[-1].role is Role.ASSISTANT else None
