"""Clients that compact by themselves: how they ask for a summary, and what they send after it.

Their request for a summary is an ordinary one, so it reuses the KV cache of the conversation where
its prompt begins with the same tokens. What the client sends next is known up to the user's
message, and is computed while the client prepares it. A wrong prediction costs nothing but
background time: the request computes what differs.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from semantic.application.prompt.renderer import BEGINNINGS
from semantic.application.prompt.replay import LruCache
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest, Message, Part, Role, TextPart, ToolSpec, ToolUsePart

# A summary's text goes on in the same message, in a way that depends on the client's settings.
_GOES_ON = ("\n\nI", "\n\n1", "\n")
_MAX_SESSIONS = 256
_ANALYSIS = re.compile(r"<analysis>.*?</analysis>", re.DOTALL)
_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ClientCompaction:
    """How one client compacts.

    Attributes:
        marker: Text in the message that asks for the summary.
        opening: Text before the summary in the next request; `{tools}` are the names of the tools
            that were called.
        is_tagged: Whether the summary is taken out of its tags.
        keeps_users: Whether the user's messages stay, with the client's own before the last one.
    """

    marker: str
    opening: str
    is_tagged: bool = False
    keeps_users: bool = False

    def expected(self, request: ChatRequest, reply: Message) -> list[list[ChatRequest]]:
        """Return what the next request may begin with; empty if the reply is no summary.

        Each is given by requests that begin with it, and with nothing more, in common.
        """
        text = _untagged(reply.text) if self.is_tagged else reply.text
        if not text:
            return []
        written = self.opening.format(tools=", ".join(_used_tools(request.messages))) + text
        before = self._kept(request.messages[:-1])
        if self.keeps_users:
            before.append(Message.of(Role.USER, written))
            variants: list[Sequence[Message]] = [BEGINNINGS]
        else:
            # Reminders come first where Claude Code keeps no message behind the summary.
            starts = dict.fromkeys(((), _reminders(request.messages[len(before)])))
            variants = [
                [Message(Role.USER, (*start, TextPart(written + words))) for words in _GOES_ON]
                for start in starts
            ]
        return [
            [replace(request, messages=(*before, ending)) for ending in endings]
            for endings in variants
        ]

    def _kept(self, messages: Sequence[Message]) -> list[Message]:
        if not self.keeps_users:
            heads = (i for i, message in enumerate(messages) if message.role is not Role.SYSTEM)
            return list(messages[: next(heads, len(messages))])
        first, *others = messages
        asked = [message for message in others if message.role in (Role.SYSTEM, Role.USER)]
        context = [message for message in asked if _is_context(message)]
        users = [
            message
            for message in asked
            if not _is_context(message) and not message.text.startswith(self.opening)
        ]
        return [first, *users[:-1], *context, *users[-1:]]


CLIENTS = (
    ClientCompaction(  # Claude Code
        marker="Your task is to create a detailed summary of the conversation so far",
        opening=(
            "This session is being continued from a previous conversation that ran out of context. "
            "The summary below covers the earlier portion of the conversation.\n\n"
            "<system-reminder>\n<tools-used-before-summary>{tools}</tools-used-before-summary>\n"
            "</system-reminder>\n"
        ),
        is_tagged=True,
    ),
    ClientCompaction(  # Codex
        marker="You are performing a CONTEXT CHECKPOINT COMPACTION.",
        opening=(
            "Another language model started to solve this problem and produced a summary of its "
            "thinking process. You also have access to the state of the tools that were used by "
            "that language model. Use this to build on the work that has already been done and "
            "avoid duplicating work. Here is the summary produced by the other language model, use "
            "the information in this summary to assist with your own analysis:\n"
        ),
        keeps_users=True,
    ),
)


class ClientCompactions:
    """Has the next request of a client computed after it has compacted its conversation."""

    def __init__(self, expect: Callable[[Sequence[ChatRequest], Principal], None]) -> None:
        """`expect` computes what all of some requests begin with, in the background."""
        self._expect = expect
        # Codex asks for a summary without its tools, and sends them again afterwards.
        self._tools: LruCache[tuple[str, str], tuple[ToolSpec, ...]] = LruCache(_MAX_SESSIONS)

    def note(self, request: ChatRequest, reply: Message, principal: Principal) -> None:
        """Take note of a finished turn of a client that names its session."""
        session = principal.tenant, request.agent.client_key or ""
        if request.tools:
            self._tools.put(session, request.tools)
        asked = request.messages[-1].text if request.messages else ""
        client = next((known for known in CLIENTS if known.marker in asked), None)
        if client is not None:
            tools = request.tools or self._tools.get(session) or ()
            for expected in client.expected(replace(request, tools=tools), reply):
                self._expect(expected, principal)


def _untagged(text: str) -> str:
    text = _SUMMARY.sub(
        lambda found: f"Summary:\n{found[1].strip()}", _ANALYSIS.sub("", text, 1), 1
    )
    return re.sub(r"\n\n+", "\n\n", text).strip()


def _reminders(message: Message) -> tuple[Part, ...]:
    """Return what Claude Code wrote before the user's words: rules, git's status and others."""

    def is_reminder(part: Part) -> bool:
        return isinstance(part, TextPart) and part.text.startswith("<system-reminder>")

    return tuple(takewhile(is_reminder, message.parts))


def _used_tools(messages: Sequence[Message]) -> list[str]:
    parts = (part for message in messages for part in message.parts)
    return sorted({part.name for part in parts if isinstance(part, ToolUsePart)})


def _is_context(message: Message) -> bool:
    """Whether the client wrote a message by itself, to describe its surroundings."""
    first = next((part.text for part in message.parts if isinstance(part, TextPart)), "")
    return message.role is Role.SYSTEM or first.startswith(("<", "# AGENTS.md"))
