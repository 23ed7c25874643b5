"""Small values for tests of the ledger, and a ledger made of dictionaries to compare with."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import BlockName, BlockPart, PartKey, block_name, pack_tokens
from semantic.domain.chat import ImagePart, Message, Role, ToolResultPart
from semantic.domain.events import Usage
from semantic.domain.sampling import FinishReason
from semantic.domain.spec import LayerKind
from semantic.ports.storage import (
    AdvanceHead,
    DropAgent,
    DropPart,
    LedgerChange,
    LedgerState,
    MarkDurable,
    MarkIndexWhole,
    PutAgent,
    PutImage,
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Repoint,
    Tenant,
    TouchParts,
)

ROOT = BlockName(bytes(32))


def name_of(*tokens: int) -> BlockName:
    """The name of a block that follows `ROOT`."""
    return block_name(ROOT, tokens)


def turn_of(
    turn_id: str,
    parent: str | None = None,
    *,
    text: str = "hello",
    block: BlockName | None = None,
    at: float = 1.0,
) -> Turn:
    """A turn in which little was said."""
    pointer = Pointer(ROOT, block, 3) if block else None
    said = (Message.of(Role.USER, text),)
    return Turn(
        turn_id,
        parent,
        "coder",
        said,
        (1, 2, 3),
        3,
        pointer,
        Usage(3),
        at,
        model="m",
        reason=FinishReason.END_TURN,
    )


def image_of(data: bytes) -> ImagePart:
    """An image that a client sent."""
    return ImagePart(hashlib.sha256(data).hexdigest(), "image/png", 8, 6, data)


def turn_with(turn_id: str, *images: ImagePart, parent: str | None = None, at: float = 1.0) -> Turn:
    """A turn with images, one of them in a tool result."""
    inner = (ToolResultPart("call", images[1:]),) if images[1:] else ()
    said = (Message(Role.USER, (*images[:1], *inner)),)
    return replace(turn_of(turn_id, parent, at=at), messages=said)


def part_of(*tokens: int, kind: LayerKind = LayerKind.FULL, last_used: float = 0.0) -> BlockPart:
    """A part of a block that follows `ROOT`."""
    return BlockPart(ROOT, name_of(*tokens), ROOT, kind, 0, pack_tokens(tokens), 99, last_used)


def agent_of(agent_id: str, head: str | None, num_turns: int = 1, tenant: str = "local") -> Agent:
    """An agent somewhere in its log."""
    return Agent(agent_id, 1.0, tenant, head=head, num_turns=num_turns, last_used=1.0)


class LedgerModel:
    """What a ledger should say, without regard to files."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.agents: dict[tuple[str, str], Agent] = {}
        self.turns: dict[tuple[str, str], Turn] = {}
        self.parts: dict[PartKey, BlockPart] = {}
        self.replays: dict[tuple[str, bytes], PutReplay] = {}
        self.images: dict[tuple[str, str], bytes] = {}
        self.is_index_lost = True

    def copy(self) -> "LedgerModel":
        copied = LedgerModel()
        for name, value in vars(self).items():
            setattr(copied, name, value.copy() if isinstance(value, dict) else value)
        return copied

    def lose_index(self) -> None:
        self.parts.clear()
        self.is_index_lost = True

    def mend_agents(self) -> None:
        for key, agent in self.agents.items():
            log = self.log(agent.tenant, agent.head)
            if agent.head is not None and (not log or log[-1].parent is not None):
                self.agents[key] = replace(agent, head=None, num_turns=0)

    def apply(self, changes: Sequence[LedgerChange]) -> None:
        for change in changes:
            self.change(change)

    def change(self, change: LedgerChange) -> None:
        match change:
            case PutPart() | DropPart() | TouchParts() | MarkIndexWhole():
                self.change_index(change)
            case PutTenant(tenant):
                self.tenants.setdefault(tenant.id, tenant)
            case PutAgent(agent) | AdvanceHead(agent):
                self.agents[agent.tenant, agent.id] = agent
            case DropAgent(tenant_id, agent_id):
                self.agents.pop((tenant_id, agent_id), None)
            case PutTurn(tenant_id, turn):
                # A turn that is put again is the latest.
                self.turns.pop((tenant_id, turn.id), None)
                self.turns[tenant_id, turn.id] = turn
            case PutReplay():
                self.replays[change.tenant, change.key] = change
            case PutImage():
                self.images[change.tenant, change.digest] = change.data
            case MarkDurable() | Repoint():
                self.turns = {key: changed(turn, change) for key, turn in self.turns.items()}
            case _:
                assert_never(change)

    def change_index(self, change: PutPart | DropPart | TouchParts | MarkIndexWhole) -> None:
        match change:
            case PutPart(part):
                self.parts[part.key] = part
            case DropPart(key):
                self.parts.pop(key, None)
            case TouchParts(keys, at):
                for key in keys:
                    if key in self.parts:
                        self.parts[key] = replace(self.parts[key], last_used=at)
            case MarkIndexWhole():
                self.is_index_lost = False

    def log(self, tenant: str, head: str | None) -> list[Turn]:
        found: list[Turn] = []
        while head is not None and (tenant, head) in self.turns:
            turn = self.turns[tenant, head]
            if turn in found:
                break
            found.append(turn)
            head = turn.parent
        return found

    def reached(self, before: float = float("inf")) -> set[tuple[str, str]]:
        heads = [(agent.tenant, agent.head) for agent in self.agents.values()]
        heads += [(key[0], key[1]) for key, turn in self.turns.items() if turn.created_at >= before]
        return {(tenant, turn.id) for tenant, head in heads for turn in self.log(tenant, head)}

    def pointers(self) -> set[Pointer]:
        turns = (self.turns[key] for key in self.reached())
        return {turn.pointer for turn in turns if turn.pointer}

    def forget(self, before: float, replays_before: float) -> int:
        size = len(self.turns) + len(self.replays)
        kept = self.reached(before)
        self.turns = {key: turn for key, turn in self.turns.items() if key in kept}
        self.replays = {key: put for key, put in self.replays.items() if put.at >= replays_before}
        return size - len(self.turns) - len(self.replays)

    def check(self, state: LedgerState) -> None:
        assert {tenant.id: tenant for tenant in state.tenants} == self.tenants
        assert {(agent.tenant, agent.id): agent for agent in state.agents} == self.agents
        assert {part.key: part for part in state.parts} == self.parts
        assert len(state.parts) == len(self.parts)
        assert state.is_index_lost == self.is_index_lost


def changed(turn: Turn, change: MarkDurable | Repoint) -> Turn:
    match change:
        case MarkDurable(turn_id):
            return replace(turn, is_durable=True) if turn.id == turn_id else turn
        case Repoint(old, new):
            if turn.pointer and turn.pointer.block == old:
                return replace(turn, pointer=replace(turn.pointer, block=new))
            return turn
