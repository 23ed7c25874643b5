"""Explains what a prompt reuses, for requests that ask for it."""

from dataclasses import dataclass, replace

from semantic.application.agents.comparison import (
    CacheFacts,
    RequestShape,
    cache_miss,
    tool_digests,
)
from semantic.application.agents.ledger import AgentLedger
from semantic.application.engine.request import ReplyState
from semantic.application.requests.prepare import PreparedRequest
from semantic.domain.agents import Turn
from semantic.domain.chat import CacheComparison
from semantic.domain.events import CacheMiss, CacheReport, MissReason


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """A prompt compared with an earlier turn, before it is computed.

    Attributes:
        before: The earlier turn; None if there is none.
        change: How the request differs from that of the turn; None if it does not.
    """

    prepared: PreparedRequest
    before: Turn | None
    change: CacheMiss | None

    def report(self, state: ReplyState) -> CacheReport:
        """Describe what the prompt reused, and why not more."""
        job, reuse, miss = self.prepared.job, state.reuse, self.change
        if miss is not None:
            miss = replace(miss, num_tokens=min(miss.num_tokens, reuse.computed))
        elif self.before is not None:
            facts = CacheFacts(job.root, reuse, state.num_stored, state.is_damaged)
            miss = cache_miss(self.before, self.prepared.model.id, len(job.tokens), facts)
        turn_id = self.before.id if self.before else None
        return CacheReport(turn_id, miss, reuse.hot, reuse.pool, reuse.disk, reuse.computed)


class CacheExplainer:
    """Compares prompts with earlier turns. Thread-safe; reads the ledger and changes nothing."""

    def __init__(self, agents: AgentLedger) -> None:
        self._agents = agents

    def compare(self, prepared: PreparedRequest) -> PromptComparison:
        """Compare a prompt with the turn that its request names, else with the latest turn."""
        request, tenant = prepared.request, prepared.principal.tenant
        asked = request.agent.comparison or CacheComparison()
        before = None if asked.is_first else self._before(prepared, asked)
        if before is None:
            is_lost = asked.turn_id is not None
            lost = CacheMiss(MissReason.NOT_FOUND, 0, "the turn to compare with is not stored")
            return PromptComparison(prepared, None, lost if is_lost else None)
        thinking = request.thinking.is_enabled if request.thinking else None
        messages = request.without_beginning.messages
        now = RequestShape(messages, tool_digests(request.tools), thinking)
        change = self._agents.log.change(
            tenant, before, prepared.job.tokens, prepared.model.id, now
        )
        return PromptComparison(prepared, before, change)

    def _before(self, prepared: PreparedRequest, asked: CacheComparison) -> Turn | None:
        tenant, identity = prepared.principal.tenant, prepared.identity
        if asked.turn_id is not None:
            return self._agents.turn(tenant, asked.turn_id)
        named = prepared.request.agent.agent_id  # an ephemeral request has no agent of its own
        agent = identity.fork or self._agents.find_agent(tenant, named or identity.agent_id)
        if agent is not None:
            return self._agents.turn(tenant, agent.head) if agent.head else None
        return self._agents.likely_previous(tenant, prepared.request.messages)
