"""Create, list, change, fork, rewind, delete and explain agents."""

import base64
import heapq
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, islice

from semantic.application.agents.cache_admin import CacheService
from semantic.application.agents.feed import AgentAction, AgentChanged, EventFeed
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.running_turns import TurnLanes
from semantic.application.engine.device_thread import DeviceThread
from semantic.domain.agents import Agent, Principal, Turn
from semantic.domain.blocks import common_prefix
from semantic.domain.errors import ConflictError, InvalidRequestError
from semantic.domain.images.spans import is_image_id
from semantic.ports.inbound import (
    AgentPage,
    AgentQuery,
    AgentView,
    BranchComparison,
    DivergenceView,
    Explanation,
)

_SHOWN_TOKENS = 24
_SHOWN_TURNS = 100
_PAST = ("head", "num_turns", "created_at", "last_used")


class AgentService:
    """The agents of all tenants. A tenant sees only its own agents.

    Methods raise AgentNotFoundError if the agent or the turn does not exist. They may read from
    disk, and are thread-safe. If the server is configured for durability, methods that change an
    agent return when the change is written, and raise CachePersistenceError if it cannot be written
    in time.
    """

    def __init__(
        self,
        agents: AgentLedger,
        lanes: TurnLanes,
        cache: CacheService,
        feed: EventFeed,
        device: DeviceThread,
    ) -> None:
        self._agents = agents
        self._lanes = lanes
        self._cache = cache
        self._feed = feed
        self._device = device

    # -- one agent ------------------------------------------------------------------------------

    def create(self, agent: Agent) -> tuple[AgentView, bool]:
        """Create an agent; returns it, and whether it is new.

        Idempotent: an existing agent with the same settings is returned unchanged.

        Raises:
            ConflictError: an agent with this id exists and has other settings.
        """
        with self._agents.log.settled():
            try:
                made = self._agents.create(agent)
            except ConflictError:
                known = self._agents.get(agent.tenant, agent.id)
                past = {name: getattr(known, name) for name in _PAST}
                if replace(agent, **past) != known:
                    raise
                return self._view(known), False
            self._tell(made, AgentAction.CREATED)
            return self._view(made), True

    def get(self, principal: Principal, agent_id: str) -> AgentView:
        agent = self._agents.get(principal.tenant, agent_id)
        return replace(self._view(agent), history=self._history(agent, _SHOWN_TURNS))

    def update(
        self, principal: Principal, agent_id: str, edit: Callable[[Agent], Agent]
    ) -> AgentView:
        with self._agents.log.settled():
            was_pinned = self._agents.get(principal.tenant, agent_id).is_pinned
            changed = self._agents.update(principal.tenant, agent_id, edit)
            if was_pinned != changed.is_pinned:
                self._cache.repin()
            self._tell(changed, AgentAction.UPDATED)
            return self._view(changed)

    def delete(self, principal: Principal, agent_id: str) -> None:
        """Delete an agent and discard its running turn."""
        with self._agents.log.settled():
            gone = self._agents.delete(principal.tenant, agent_id)
            # Delete first: a turn that ends between the two calls then finds no agent to log to.
            self._lanes.discard(principal.tenant, agent_id)
            if gone.is_pinned:
                self._cache.repin()
            self._tell(gone, AgentAction.DELETED)

    # -- history --------------------------------------------------------------------------------

    def fork(
        self, principal: Principal, agent_id: str, new_ids: Sequence[str], turn_id: str | None
    ) -> tuple[AgentView, ...]:
        with self._agents.log.settled():
            made = self._agents.fork(principal.tenant, agent_id, new_ids, turn_id)
            for agent in made:
                self._tell(agent, AgentAction.FORKED)
            first = self._view(made[0])
            return tuple(replace(first, agent=agent) for agent in made)

    def add_branch(self, agent: Agent, turn: Turn) -> AgentView:
        """Add an agent whose head is a new turn, which continues a turn of another agent.

        Raises:
            ConflictError: an agent with this id exists.
        """
        with self._agents.log.settled():
            made = self._agents.create(agent, [turn])
            self._tell(made, AgentAction.FORKED)
            return self._view(made)

    def rewind(self, principal: Principal, agent_id: str, turn_id: str | None) -> AgentView:
        """Move an agent's head to an earlier turn, or forward again to undo a rewind.

        None moves it before the first turn. Discards the running turn.
        """
        with self._agents.log.settled():
            agent = self._agents.rewind(principal.tenant, agent_id, turn_id)
            self._lanes.discard(principal.tenant, agent_id)
            self._tell(agent, AgentAction.REWOUND)
            return self._view(agent)

    def turns(
        self, principal: Principal, agent_id: str, before: str | None, limit: int
    ) -> tuple[Turn, ...]:
        """Return an agent's turns, latest first, starting with the parent of `before` if given."""
        agent = self._agents.get(principal.tenant, agent_id)
        if before is not None:
            agent = self._agents.before(agent, before)
        return tuple(self._agents.turns(agent, limit))

    def compare(
        self, principal: Principal, first: str, second: str, limit: int | None = None
    ) -> BranchComparison:
        """Return what two agents have in common, and up to `limit` turns of each after that."""
        agents = [self._agents.get(principal.tenant, agent_id) for agent_id in (first, second)]
        paths = [self._path(agent) for agent in agents]
        num_common = common_prefix(*paths)
        one, other = (self._turns_after(principal, path, num_common, limit) for path in paths)
        fork = self._agents.turn(principal.tenant, paths[0][num_common - 1]) if num_common else None
        counts = [len(path) - num_common for path in paths]
        return BranchComparison(fork, num_common, one, other, (counts[0], counts[1]))

    def timeline(self, principal: Principal, agent_id: str, limit: int) -> tuple[Turn, ...]:
        """Return an agent's turns in the order in which they were made, latest first.

        Includes turns that the agent no longer continues, because a later prompt diverged from
        them, for as long as they are stored.
        """
        agent = self._agents.get(principal.tenant, agent_id)
        return tuple(self._agents.log.timeline(agent.tenant, agent.head, limit))

    def explain(
        self, principal: Principal, agent_id: str, turn_id: str | None = None
    ) -> Explanation:
        """Return what a turn (default: the latest) reused, and where its prompt diverged."""
        agent = self._agents.get(principal.tenant, agent_id)
        shown = turn_id or agent.head
        if turn_id is not None:
            self._agents.before(agent, turn_id)  # raises unless the turn belongs to the agent
        turn = self._agents.turn(agent.tenant, shown) if shown else None
        divergence = self._divergence(agent, turn) if turn else None
        before = self._agents.turn(agent.tenant, turn.parent) if turn and turn.parent else None
        note = self._cache.change(before, turn) if turn else ""
        return Explanation(turn, divergence, self._cache.state(agent), note)

    # -- listing --------------------------------------------------------------------------------

    def page(self, principal: Principal, query: AgentQuery) -> AgentPage:
        """Return one page of the agents; anonymous ones are listed from their second turn on.

        The cursor holds the sort key of the last agent of the previous page, so a page continues
        there even if that agent has moved or was deleted.

        Raises:
            InvalidRequestError: the cursor is invalid.
        """
        agents = self._agents.agents(principal.tenant)
        matching = rest = [agent for agent in agents if _matches(agent, query)]
        rank = _ranking(query)
        if query.after is not None:
            last = _read_cursor(query.after, query)
            is_after = operator.lt if query.is_descending else operator.gt
            rest = [agent for agent in matching if is_after(rank(agent), last)]
        # A page of many agents does not need all of them in order.
        first = heapq.nlargest if query.is_descending else heapq.nsmallest
        shown = first(query.limit, rest, key=rank)
        cursor = _write_cursor(rank(shown[-1])) if len(rest) > len(shown) and shown else None
        views = tuple(
            replace(self._view(agent), history=self._history(agent, query.num_history))
            for agent in shown
        )
        return AgentPage(views, len(matching), cursor)

    # -- inside ---------------------------------------------------------------------------------

    def _view(self, agent: Agent) -> AgentView:
        is_busy = self._lanes.num_turns(agent.tenant, agent.id) > 0
        num_tokens = self._agents.place(agent).num_tokens
        return AgentView(agent, num_tokens, self._cache.state(agent), is_busy)

    def _path(self, agent: Agent) -> list[str]:
        return [*self._agents.log.ancestry(agent.tenant, agent.head, until="")][::-1]

    def _turns_after(
        self, principal: Principal, path: Sequence[str], start: int, limit: int | None
    ) -> tuple[Turn, ...]:
        shown = path[start:][:limit]
        if not shown:
            return ()
        return tuple(self._agents.log.turns(principal.tenant, shown[-1], len(shown))[::-1])

    def _history(self, agent: Agent, num_turns: int) -> tuple[str, ...]:
        if not num_turns:
            return ()
        ids = self._agents.log.ancestry(agent.tenant, agent.head, until="")
        return tuple(islice(ids, num_turns))

    def _tell(self, agent: Agent, action: AgentAction) -> None:
        self._feed.publish(AgentChanged(agent.tenant, agent.id, action))

    def _divergence(self, agent: Agent, turn: Turn) -> DivergenceView | None:
        left = turn.divergence
        if left is None:
            return None
        old_turn = self._agents.turn(agent.tenant, left.turn_id)
        old = self._agents.log.tokens(agent.tenant, left.turn_id)
        new = self._agents.log.tokens(agent.tenant, turn.id)
        start, end = max(0, left.index - _SHOWN_TOKENS), left.index + _SHOWN_TOKENS
        return DivergenceView(
            turn_id=left.turn_id,
            index=left.index,
            before=self._detokenise(new[start : left.index], turn.model),
            expected=self._detokenise(old[left.index : end], old_turn.model if old_turn else ""),
            actual=self._detokenise(new[left.index : end], turn.model),
        )

    def _detokenise(self, tokens: Sequence[int], model_id: str) -> str:
        loaded = self._device.model
        if loaded is None or model_id not in ("", loaded.id):  # older servers logged no model
            whose = model_id or "a model"
            return f"[{len(tokens)} tokens of {whose}, which is not loaded]" if tokens else ""
        runs = groupby(tokens, is_image_id)
        pieces = (
            b"[image]" if is_image else b"".join(map(loaded.tokenizer.token_bytes, run))
            for is_image, run in runs
        )
        return b"".join(pieces).decode("utf-8", "replace")


def _matches(agent: Agent, query: AgentQuery) -> bool:
    return (
        agent.is_listed
        and agent.id.startswith(query.id_prefix)
        and all(label in agent.labels for label in query.labels)
        and query.is_pinned in (None, agent.is_pinned)
    )


_Rank = tuple[float | str, str]


def _ranking(query: AgentQuery) -> Callable[[Agent], _Rank]:
    """Return what gives the place of an agent in a list."""
    rank: Callable[[Agent], _Rank] = operator.attrgetter(query.sort, "id")
    return rank


def _write_cursor(rank: _Rank) -> str:
    return base64.urlsafe_b64encode(json.dumps(rank).encode()).decode()


def _read_cursor(cursor: str, query: AgentQuery) -> _Rank:
    kind = str if query.sort == "id" else (int, float)
    try:
        rank, agent_id = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        if isinstance(rank, kind) and isinstance(agent_id, str):
            return rank, agent_id
    except (ValueError, TypeError, RecursionError):
        pass
    raise InvalidRequestError(
        "the cursor is not from this listing; send the `next` of a page.", param="after"
    )
