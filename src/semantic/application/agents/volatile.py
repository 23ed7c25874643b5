"""Finds what changes in an agent's prompts from turn to turn, what that costs, and the remedy."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from semantic.application.agents.ledger import AgentLedger
from semantic.domain.agents import Agent, Turn
from semantic.domain.chat import Message, Role, ToolResultPart
from semantic.domain.volatile.rules import RepairAction, RepairPlace, RepairRule
from semantic.domain.volatile.spans import (
    KIND_PATTERNS,
    SpanChange,
    SpanKind,
    VolatileSpan,
    compare_prompts,
    volatile_spans,
)
from semantic.ports.text import TokenizerPort

_MAX_TURNS = 12  # latest prompts that are compared
# Among these, prompts that start alike are searched: the latest turns of the latest agents.
_MAX_AGENTS, _MAX_TURNS_EACH = 32, 4
_LEAST_OVERLAP = 0.8  # share of equal lines in system prompts that are alike
DecodeToken: TypeAlias = Callable[[int], bytes]
FindTokenizer: TypeAlias = Callable[[str], TokenizerPort | None]


@dataclass(frozen=True, slots=True)
class Remedy:
    """How to keep a span from changing the prompt.

    Attributes:
        rule: A known rule that covers the span; empty if there is none.
        text: What to write into the file of rules, or another advice.
    """

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class SpanFinding:
    """A span that changes, its place in the request, and the remedy.

    Attributes:
        place: system, user, assistant, tool_result, tools or template.
    """

    span: VolatileSpan
    place: str
    remedy: Remedy


@dataclass(frozen=True, slots=True)
class VolatileReport:
    """What changes in the prompts of an agent.

    Attributes:
        num_compared: Comparisons of consecutive prompts.
        others: Agents of those prompts that are not the agent's own.
        note: Why prompts could not be compared; empty if they were.
    """

    agent_id: str
    num_compared: int
    findings: tuple[SpanFinding, ...] = ()
    others: tuple[str, ...] = ()
    note: str = ""

    @property
    def summary(self) -> str:
        if self.note:
            return self.note
        if not self.num_compared:
            return "There is no earlier prompt to compare the latest one with."
        compared = _counted(self.num_compared, "comparison")
        if not self.findings:
            return f"No span changed in {compared}: each prompt continues the one before it."
        spans = _counted(len(self.findings), "span")
        num_tokens = sum(finding.span.num_recomputed for finding in self.findings)
        return f"{spans} changed in {compared}; {num_tokens:,} tokens were computed again."


class VolatilePrompts:
    """Compares stored prompts. Thread-safe; reads from disk and takes up to a second."""

    def __init__(
        self,
        agents: AgentLedger,
        find_tokenizer: FindTokenizer,
        rules: Callable[[], Sequence[RepairRule]],
    ) -> None:
        """Read prompts from a ledger.

        Args:
            find_tokenizer: Returns the tokenizer of a model by its id; None if it is not available.
            rules: Returns the rules that a remedy may name, switched on or not.
        """
        self._agents = agents
        self._find_tokenizer = find_tokenizer
        self._rules = rules

    def report(self, tenant: str, agent_id: str) -> VolatileReport:
        """Compare the latest prompts of an agent, or of agents that start alike.

        A prompt that diverges is compared with the one it diverged from. A volatile system prompt
        can give each turn of a client an agent of its own; then the prompts of the latest agents
        with the same conversation, or nearly the same system prompt, are compared.

        Raises:
            AgentNotFoundError: there is no such agent.
        """
        agent = self._agents.get(tenant, agent_id)
        turns = list(self._consecutive(agent))[::-1]
        comparisons: list[tuple[SpanChange, ...]] = []
        for before, after in pairwise(turns):
            changes = self._compare(tenant, before, after)
            if changes is None:
                whose = after.model or "The model"
                note = f"{whose} is not loaded, so its prompts cannot be read."
                return VolatileReport(agent_id, 0, note=note)
            comparisons.append(changes)
        messages = self._agents.conversation(agent)
        findings = tuple(
            SpanFinding(span, place, self._remedy(span, place))
            for span in volatile_spans(comparisons)
            for place in [_place(span.latest, messages)]
        )
        others = dict.fromkeys(t.agent_id for t in turns if t.agent_id != agent_id)
        return VolatileReport(agent_id, len(comparisons), findings, tuple(others))

    # -- which prompts --------------------------------------------------------------------------

    def _consecutive(self, agent: Agent) -> Iterator[Turn]:
        """Yield the agent's latest turn, and the turns whose prompts came before, latest first."""
        tenant = agent.tenant
        turn = self._agents.turn(tenant, agent.head) if agent.head else None
        nearby = self._recent_turns(tenant)
        for _ in range(_MAX_TURNS):
            if turn is None:
                return
            yield turn
            before = turn.divergence.turn_id if turn.divergence else turn.parent
            known = self._agents.turn(tenant, before) if before else None
            turn = self._alike(tenant, turn, known, nearby) or known

    def _recent_turns(self, tenant: str) -> list[tuple[Turn, list[Message]]]:
        """Return the latest turns of the latest agents with their conversations, latest first."""
        recent = [
            turn
            for agent in self._agents.agents(tenant)[:_MAX_AGENTS]
            for turn in self._agents.turns(agent, _MAX_TURNS_EACH)
        ]
        recent.sort(key=lambda turn: turn.created_at, reverse=True)
        return [(turn, self._agents.log.messages(tenant, turn.id)) for turn in recent]

    def _alike(
        self,
        tenant: str,
        turn: Turn,
        known: Turn | None,
        nearby: Sequence[tuple[Turn, list[Message]]],
    ) -> Turn | None:
        """Return the latest turn of any agent that came after `known` and before `turn`.

        Its conversation continues in that of `turn`; without a known one, a similar system prompt
        suffices.
        """
        since = known.created_at if known else 0.0
        earlier = [(one, old) for one, old in nearby if since < one.created_at < turn.created_at]
        new = self._agents.log.messages(tenant, turn.id) if earlier else []
        for one, old in earlier:
            if _continues(old, new) or (known is None and _has_similar_system(old, new)):
                return one
        return None

    def _compare(self, tenant: str, before: Turn, after: Turn) -> tuple[SpanChange, ...] | None:
        if after.divergence is None and after.parent == before.id:
            return ()
        tokenizer = self._find_tokenizer(after.model)
        if tokenizer is None:
            return None
        if before.model != after.model:
            return ()
        decode = _decoder(tokenizer)
        old, new = (self._agents.log.tokens(tenant, turn.id) for turn in (before, after))
        num_lost = max(0, len(old) - after.reuse.reused)  # an older prompt may be reused instead
        new = new[: after.usage.prompt_tokens]
        return tuple(
            replace(change, num_recomputed=min(change.num_recomputed, num_lost))
            for change in compare_prompts([*map(decode, old)], [*map(decode, new)])
        )

    # -- the remedy -----------------------------------------------------------------------------

    def _remedy(self, span: VolatileSpan, place: str) -> Remedy:
        change = span.latest
        for rule in self._rules():
            if _covers(rule, change, place):
                if rule.is_enabled:
                    advice = f"rule {rule.name} is on, but not for this client or protocol"
                    return Remedy(rule.name, advice)
                return Remedy(rule.name, f'enable = ["{rule.name}"]')
        if change.kind is SpanKind.TOOLS:
            return Remedy(
                "", "give the client a fixed list of tools: no rule adds or removes tools"
            )
        if place not in (RepairPlace.SYSTEM.value, RepairPlace.USER.value):
            return Remedy("", "change the client: no rule covers this part of a prompt")
        return Remedy("", _own_rule(change, place))


def _decoder(tokenizer: TokenizerPort) -> DecodeToken:
    """Decode tokens to their bytes; special ones, which separate messages, end a line."""
    special = {token.id for token in tokenizer.special_tokens}
    return lambda token: b"\n" if token in special else tokenizer.token_bytes(token)


def _covers(rule: RepairRule, change: SpanChange, place: str) -> bool:
    if change.kind is SpanKind.TOOL_ORDER:
        return rule.action is RepairAction.SORT_TOOLS
    if rule.place.value != place:
        return False
    lines = [line for line in (change.old_line, change.line) if line]
    return all(_has_change(rule, line, change) for line in lines)


def _has_change(rule: RepairRule, line: str, change: SpanChange) -> bool:
    text = change.after if line == change.line else change.before
    at = line.find(text.strip()) if text.strip() else -1
    return any(start <= at < end for start, end in rule.find(line))


def _own_rule(change: SpanChange, place: str) -> str:
    """Write a rule for a span that no known rule covers."""
    pattern = _pattern(change)
    if not pattern:
        return "change the client: the text has no pattern that a rule could find"
    kind = change.kind.value.replace("_", "-")
    return (
        f'[[rule]]\nname = "own-{kind}"\nenabled = true\nplace = "{place}"\n'
        f"pattern = '''{pattern}'''\naction = \"freeze\""
    )


def _pattern(change: SpanChange) -> str:
    """Return a pattern of the line by its constant beginning; empty if it has none."""
    shared = _common_prefix(change.old_line, change.line)
    head = shared[: len(shared) - len(shared.split(" ")[-1])]
    if change.kind not in KIND_PATTERNS or not head.strip() or "'''" in head:
        return ""
    escaped = re.escape(head).replace("\\ ", " ")
    return f"^{escaped}.*$"


def _common_prefix(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    end = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[:end]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- conversations --------------------------------------------------------------------------------


def _continues(old: Sequence[Message], new: Sequence[Message]) -> bool:
    """Whether a conversation begins with all of another, apart from system messages."""
    said = [
        [(m.role, m.text.strip()) for m in messages if m.role is not Role.SYSTEM]
        for messages in (old, new)
    ]
    return bool(said[0]) and said[1][: len(said[0])] == said[0]


def _has_similar_system(old: Sequence[Message], new: Sequence[Message]) -> bool:
    lines = [
        {line for m in messages if m.role is Role.SYSTEM for line in m.text.splitlines() if line}
        for messages in (old, new)
    ]
    most = max(map(len, lines))
    return most > 1 and len(lines[0] & lines[1]) >= _LEAST_OVERLAP * most


def _place(change: SpanChange, messages: Sequence[Message]) -> str:
    """Return the part of a request that contains a line."""
    if change.kind in (SpanKind.TOOL_ORDER, SpanKind.TOOLS):
        return RepairPlace.TOOLS.value
    wanted = change.after.strip() or change.line.strip()
    for message in messages:
        if wanted in message.text:
            return message.role.value
        results = (part for part in message.parts if isinstance(part, ToolResultPart))
        if any(wanted in str(result.content) for result in results):
            return RepairPlace.TOOL_RESULT.value
    return "template"
