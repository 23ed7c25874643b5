"""The requests of a coding agent's conversation.

The user asks several questions, which lead to tool calls. The agent looks up a deferred tool and
uses it, system messages occur between turns, and the client sends a reply back with another order
of arguments and other number formats than the model wrote.
"""

from dataclasses import dataclass, replace

from semantic.domain.chat import (
    ChatRequest,
    JsonObject,
    Message,
    Part,
    Role,
    TextPart,
    ToolReferencePart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
)


@dataclass(frozen=True)
class Exchange:
    """A request, the reply to it, and the reply as the next request sends it back."""

    request: ChatRequest
    reply: Message
    echo: Message


def _schema(**properties: str) -> JsonObject:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }


def _turned(schema: JsonObject) -> JsonObject:
    """The same schema with its keys in reverse order."""
    turned = {k: _turned(v) if isinstance(v, dict) else v for k, v in schema.items()}
    return dict(reversed(turned.items()))


READ = ToolSpec("Read", "Read a file.", _schema(path="string", limit="number"))
SEARCH = ToolSpec("ToolSearch", "Find more tools.", _schema(query="string"))
FETCH = ToolSpec("WebFetch", "Fetch a page.", _schema(url="string"), is_deferred=True)
EDIT = ToolSpec("NotebookEdit", "Edit a notebook.", _schema(cell="number"), is_deferred=True)
EARLY = (READ, SEARCH)
# After a deferred tool was used, requests include deferred tools between the others.
LATE = (EDIT, replace(READ, parameters=_turned(READ.parameters)), SEARCH, FETCH)


def say(*parts: Part | str) -> Message:
    return Message(Role.ASSISTANT, tuple(TextPart(p) if isinstance(p, str) else p for p in parts))


def results(*parts: ToolResultPart | str) -> Message:
    return Message(Role.USER, tuple(TextPart(p) if isinstance(p, str) else p for p in parts))


def text_result(call_id: str, text: str, *, is_error: bool = False) -> ToolResultPart:
    return ToolResultPart(call_id, (TextPart(text),), is_error)


def use(call_id: str, name: str, **arguments: str | float) -> ToolUsePart:
    return ToolUsePart(call_id, name, dict(arguments))


def coding() -> list[Exchange]:
    """Make a new copy of the conversation."""
    exchanges: list[Exchange] = []
    history = [
        Message(Role.SYSTEM, (TextPart("You are a coder."), TextPart("Be terse.\n"))),
        Message(Role.USER, (TextPart("<hint>\n"), TextPart("Does client.py follow the docs?  "))),
    ]

    def turn(
        tools: tuple[ToolSpec, ...],
        reply: Message,
        *then: Message,
        echo: Message | None = None,
    ) -> None:
        request = ChatRequest("m", tuple(history), tools)
        exchanges.append(Exchange(request, reply, echo or reply))
        history.extend([exchanges[-1].echo, *then])

    found = ToolResultPart("t1", (ToolReferencePart("WebFetch"),))
    turn(EARLY, say("I need a tool.\n", use("t1", "ToolSearch", query="web")), results(found))
    turn(
        LATE,
        say(use("t2", "WebFetch", url="http://x/é", timeout=1000.0)),
        results(text_result("t2", "<html> the docs </html>\n")),
        echo=say(use("t2", "WebFetch", timeout=1000, url="http://x/\u00e9")),
    )
    turn(
        LATE,
        say("They say:\n\n```py\nf( x )\n```"),
        Message.of(Role.SYSTEM, "The user opened client.py."),
        Message.of(Role.USER, "Read both files."),
    )
    turn(
        LATE,
        say("Yes. ", use("t3", "Read", path="a.py", limit=5), use("t4", "Read", path="b.py")),
        results(
            text_result("t3", "a = 1\n" * 5),
            text_result("t4", "no such file", is_error=True),
            "<reminder>be quick</reminder>",
        ),
    )
    turn(
        LATE,
        say("Only a.py is there."),
        Message.of(Role.USER, "Thanks. What about c.py?"),
        Message.of(Role.SYSTEM, "Little context is left."),
    )
    turn(LATE, say("I have not seen c.py."), Message.of(Role.USER, "Fine."))
    turn(LATE, say("Bye."))
    return exchanges
