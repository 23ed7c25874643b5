"""The endpoint that names what changes in an agent's prompts, and the remedy."""

from collections.abc import Callable
from typing import Literal, Self

from fastapi import APIRouter
from pydantic import Field

from semantic.adapters.inbound.agents.requests import AgentPath
from semantic.adapters.inbound.agents.views import View
from semantic.adapters.inbound.http.errors import refusals
from semantic.application.agents.volatile import SpanFinding, VolatilePrompts, VolatileReport
from semantic.domain.agents import Principal
from semantic.domain.volatile.spans import SpanKind


class RemedyOut(View):
    """How to keep a span from changing the prompt."""

    rule: str | None = Field(
        description="a rule that covers the span; null if there is none", examples=["date-freeze"]
    )
    text: str = Field(
        description="what to write into the file of rules, or another advice",
        examples=['enable = ["date-freeze"]'],
    )


class VolatileSpanOut(View):
    """A span of the prompt that changes."""

    kind: SpanKind = Field(examples=["date"])
    place: str = Field(
        description="system, user, assistant, tool_result, tools or template", examples=["system"]
    )
    volatile: bool = Field(
        description="true: it changes again and again; false: it was edited once", examples=[True]
    )
    before: str = Field(examples=["2026-11-16."])
    after: str = Field(examples=["2026-11-17."])
    line: str = Field(
        description="its line; of changed tools, their names",
        examples=["Today's date is 2026-11-17."],
    )
    index: int = Field(description="tokens before it", examples=[52])
    changes: int = Field(description="comparisons in which it changed", examples=[3])
    recomputed_tokens: int = Field(
        description="tokens computed again because of it, in all comparisons", examples=[33612]
    )
    remedy: RemedyOut

    @classmethod
    def about(cls, finding: SpanFinding) -> Self:
        span, change = finding.span, finding.span.latest
        return cls(
            kind=change.kind,
            place=finding.place,
            volatile=span.is_volatile,
            before=change.before,
            after=change.after,
            line=change.line,
            index=change.index,
            changes=span.num_changes,
            recomputed_tokens=span.num_recomputed,
            remedy=RemedyOut(rule=finding.remedy.rule or None, text=finding.remedy.text),
        )


class VolatileOut(View):
    """What changes in the latest prompts of an agent, the most expensive span first."""

    object: Literal["agent.volatile"] = "agent.volatile"
    agent_id: str = Field(examples=["coder"])
    comparisons: int = Field(description="pairs of consecutive prompts", examples=[3])
    other_agents: list[str] = Field(
        description="agents that start alike, whose prompts were compared too", examples=[[]]
    )
    spans: list[VolatileSpanOut]
    summary: str = Field(
        examples=["1 span changed in 3 comparisons; 33,612 tokens were computed again."]
    )

    @classmethod
    def about(cls, report: VolatileReport) -> Self:
        return cls(
            agent_id=report.agent_id,
            comparisons=report.num_compared,
            other_agents=list(report.others),
            spans=[VolatileSpanOut.about(finding) for finding in report.findings],
            summary=report.summary,
        )


def volatile_router(prompts: VolatilePrompts, principal: Callable[[], Principal]) -> APIRouter:
    """Serve the report; `principal` returns the caller of the current request."""
    router = APIRouter(prefix="/v1/agents", tags=["agents"])

    @router.get("/{agent_id}/volatile", responses=refusals(400, 404))
    def volatile(agent_id: AgentPath) -> VolatileOut:
        """Compare an agent's latest prompts: what changes each turn, its cost and the remedy."""
        return VolatileOut.about(prompts.report(principal().tenant, agent_id))

    return router
