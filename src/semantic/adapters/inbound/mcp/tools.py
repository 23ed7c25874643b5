"""The tools that models get: list, show, ask, send, fork, compact, compare, rewind and others."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from semantic.adapters.inbound.agents.views import AgentOut, ExplanationOut, Json
from semantic.application.agents.service import AgentService
from semantic.application.requests.branches import AgentBranches, BranchReply
from semantic.domain.agents import Agent, Principal, Turn, check_agent_id
from semantic.domain.sampling import StopRules
from semantic.ports.inbound import AgentQuery, Compaction

_DEFAULT_REPLY_TOKENS = 1024
_MAX_TURN_CHARS = 4000

AgentName = Annotated[str, Field(description="the agent's id, as `list_agents` shows it")]
TurnId = Annotated[
    str | None, Field(description="a turn id from `show_agent`; absent: the latest turn")
]
MaxTokens = Annotated[int, Field(ge=1, le=32_768, description="longest reply, in tokens")]


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ListAgentsTool(_Arguments):
    """List agents of this server, those used last first."""

    prefix: str = Field("", description="only agents whose id begins with this")
    limit: int = Field(20, ge=1, le=100)


class ShowAgentTool(_Arguments):
    """Show an agent: settings, size of its conversation, and its latest turns with their text."""

    agent: AgentName
    turns: int = Field(5, ge=0, le=50, description="number of latest turns to show")


class AskAgentTool(_Arguments):
    """Ask an agent, or its earlier self at a turn, a question. The agent does not change.

    The question is answered from the agent's whole conversation, which is not computed again.
    """

    agent: AgentName
    question: str = Field(min_length=1)
    turn_id: TurnId = None
    max_tokens: MaxTokens = _DEFAULT_REPLY_TOKENS


class SendMessageTool(_Arguments):
    """Send a message to an agent as the next turn of its conversation, and return its reply."""

    agent: AgentName
    message: str = Field(min_length=1)
    max_tokens: MaxTokens = _DEFAULT_REPLY_TOKENS


class ForkAgentTool(_Arguments):
    """Fork an agent into one or more branches, to try several ways. Forks are free."""

    agent: AgentName
    names: list[str] | None = Field(
        None, min_length=1, max_length=16, description="ids of the forks"
    )
    count: int = Field(1, ge=1, le=16, description="number of forks if `names` is absent")
    turn_id: TurnId = None


class CompactAgentTool(_Arguments):
    """Make a branch of an agent that continues from a summary and its latest turns.

    The agent does not change. The branch is shorter, and is computed before its next turn.
    """

    agent: AgentName
    name: str | None = Field(None, description="id of the branch; absent: a random id")
    instructions: str | None = Field(
        None, min_length=1, description="the message that asks for the summary"
    )
    keep_turns: int | None = Field(
        None, ge=0, le=1000, description="latest turns that stay as they are"
    )
    max_tokens: MaxTokens | None = None


class CompareAgentsTool(_Arguments):
    """Compare two agents: the turns that they share, and the text of those that differ."""

    first: AgentName
    second: AgentName


class RewindAgentTool(_Arguments):
    """Go back to an earlier turn of an agent. Later turns stay, so this can be undone."""

    agent: AgentName
    turn_id: str | None = Field(description="the turn to go to; null: before the first turn")


class ExplainAgentTool(_Arguments):
    """Explain what an agent's latest prompt reused of the KV cache, and where it diverged."""

    agent: AgentName
    turn_id: TurnId = None


class PinAgentTool(_Arguments):
    """Pin an agent, so that its KV cache is evicted last, or unpin it."""

    agent: AgentName
    is_pinned: bool = True


class ExportAgentTool(_Arguments):
    """Return the path from which an agent can be downloaded as a file with its KV cache."""

    agent: AgentName


class DeleteAgentTool(_Arguments):
    """Delete an agent, for instance a branch that was not kept."""

    agent: AgentName


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool, the model of its arguments, and what it does.

    Attributes:
        is_read_only: It changes no agent.
    """

    name: str
    arguments: type[_Arguments]
    run: Callable[[Principal, Any], Awaitable[Json]]
    is_read_only: bool

    @property
    def description(self) -> str:
        return " ".join((self.arguments.__doc__ or "").split())

    async def call(self, principal: Principal, arguments: Json) -> Json:
        """Check the arguments and run; raises ValidationError or SemanticError."""
        return await self.run(principal, self.arguments.model_validate(arguments))


class McpTools:
    """The tools over the services of this server. A principal reaches only its own agents."""

    def __init__(self, agents: AgentService, branches: AgentBranches) -> None:
        self._agents = agents
        self._branches = branches

    def all(self) -> tuple[McpTool, ...]:
        return (
            McpTool("list_agents", ListAgentsTool, self._list, is_read_only=True),
            McpTool("show_agent", ShowAgentTool, self._show, is_read_only=True),
            McpTool("ask_agent", AskAgentTool, self._ask, is_read_only=True),
            McpTool("send_message", SendMessageTool, self._send, is_read_only=False),
            McpTool("fork_agent", ForkAgentTool, self._fork, is_read_only=False),
            McpTool("compact_agent", CompactAgentTool, self._compact, is_read_only=False),
            McpTool("compare_agents", CompareAgentsTool, self._compare, is_read_only=True),
            McpTool("rewind_agent", RewindAgentTool, self._rewind, is_read_only=False),
            McpTool("explain_agent", ExplainAgentTool, self._explain, is_read_only=True),
            McpTool("pin_agent", PinAgentTool, self._pin, is_read_only=False),
            McpTool("export_agent", ExportAgentTool, self._export, is_read_only=True),
            McpTool("delete_agent", DeleteAgentTool, self._delete, is_read_only=False),
        )

    async def _list(self, principal: Principal, ask: ListAgentsTool) -> Json:
        query = AgentQuery(limit=ask.limit, id_prefix=ask.prefix)
        page = await asyncio.to_thread(self._agents.page, principal, query)
        agents = [
            {
                "agent": view.agent.id,
                "turns": view.agent.num_turns,
                "tokens": view.num_tokens,
                "tier": view.state.tier.value,
                "is_busy": view.is_busy,
                "labels": dict(view.agent.labels),
            }
            for view in page.agents
        ]
        return {"agents": agents, "total": page.num_matching}

    async def _show(self, principal: Principal, ask: ShowAgentTool) -> Json:
        view = await asyncio.to_thread(self._agents.get, principal, ask.agent)
        shown = AgentOut.of(view).model_dump(mode="json", exclude={"history"})
        if ask.turns:
            turns = await asyncio.to_thread(
                self._agents.turns, principal, ask.agent, None, ask.turns
            )
            shown["turns_shown"] = [_turn(turn) for turn in reversed(turns)]
        return shown

    async def _ask(self, principal: Principal, ask: AskAgentTool) -> Json:
        stop = StopRules(max_tokens=ask.max_tokens)
        reply = await self._branches.ask(principal, ask.agent, ask.question, ask.turn_id, stop)
        return _reply(ask.agent, reply)

    async def _send(self, principal: Principal, ask: SendMessageTool) -> Json:
        stop = StopRules(max_tokens=ask.max_tokens)
        return _reply(ask.agent, await self._branches.send(principal, ask.agent, ask.message, stop))

    async def _fork(self, principal: Principal, ask: ForkAgentTool) -> Json:
        names = ask.names or [f"{ask.agent}-{secrets.token_hex(3)}" for _ in range(ask.count)]
        made = await asyncio.to_thread(
            self._branches.fork, principal, ask.agent, names, ask.turn_id
        )
        return {"agents": [view.agent.id for view in made]}

    async def _compact(self, principal: Principal, ask: CompactAgentTool) -> Json:
        if ask.name is not None:
            check_agent_id(ask.name, "name")
        wanted = Compaction(ask.name, ask.instructions, ask.keep_turns, ask.max_tokens)
        made = await self._branches.compact(principal, ask.agent, wanted)
        return {
            "agent": made.view.agent.id,
            "summary": made.summary,
            "tokens_before": made.num_before,
            "tokens_after": made.num_after,
            "summarised_messages": made.num_summarised,
            "reused_tokens": made.summary_usage.cache_read_tokens,
        }

    async def _compare(self, principal: Principal, ask: CompareAgentsTool) -> Json:
        found = await asyncio.to_thread(self._agents.compare, principal, ask.first, ask.second)
        return {
            "common_turns": found.num_common,
            ask.first: [_turn(turn) for turn in found.first],
            ask.second: [_turn(turn) for turn in found.second],
        }

    async def _rewind(self, principal: Principal, ask: RewindAgentTool) -> Json:
        view = await asyncio.to_thread(self._agents.rewind, principal, ask.agent, ask.turn_id)
        return {"agent": view.agent.id, "turns": view.agent.num_turns, "turn_id": view.agent.head}

    async def _explain(self, principal: Principal, ask: ExplainAgentTool) -> Json:
        found = await asyncio.to_thread(self._agents.explain, principal, ask.agent, ask.turn_id)
        return ExplanationOut.about(ask.agent, found).model_dump(mode="json")

    async def _pin(self, principal: Principal, ask: PinAgentTool) -> Json:
        def pin(agent: Agent) -> Agent:
            return replace(agent, is_pinned=ask.is_pinned)

        await asyncio.to_thread(self._agents.update, principal, ask.agent, pin)
        return {"agent": ask.agent, "is_pinned": ask.is_pinned}

    async def _export(self, principal: Principal, ask: ExportAgentTool) -> Json:
        view = await asyncio.to_thread(self._agents.get, principal, ask.agent)
        path = f"/v1/agents/{view.agent.id}/export"
        command = f"semantic agents export {view.agent.id}"
        return {"agent": view.agent.id, "path": path, "command": command}

    async def _delete(self, principal: Principal, ask: DeleteAgentTool) -> Json:
        await asyncio.to_thread(self._agents.delete, principal, ask.agent)
        return {"deleted": ask.agent}


def _reply(agent_id: str, reply: BranchReply) -> Json:
    usage = reply.usage
    return {
        "agent": agent_id,
        "reply": reply.message.text,
        "prompt_tokens": usage.prompt_tokens,
        "reused_tokens": usage.cache_read_tokens,
    }


def _turn(turn: Turn) -> Json:
    text = "\n".join(f"{one.role.value}: {one.text}" for one in turn.messages)
    if len(text) > _MAX_TURN_CHARS:
        text = f"{text[:_MAX_TURN_CHARS]}… ({len(text) - _MAX_TURN_CHARS:,} more characters)"
    return {"turn_id": turn.id, "text": text}
