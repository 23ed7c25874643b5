"""A model's chat template: untrusted Jinja, rendered in a process with limits.

A sandbox keeps a template from accessing Python's objects, but not from endless loops or
exponentially growing strings. The server therefore only parses it; a process with time and memory
limits compiles and renders it.

This module imports neither a backend nor a web framework, so that a subprocess starts quickly and
stays small.
"""

import json
import logging
import marshal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from semantic.adapters.outbound.limited_process import (
    LimitedProcesses,
    LimitExceededError,
    ProcessLimits,
    serve,
)
from semantic.domain.chat import JsonObject
from semantic.domain.errors import InvalidRequestError

_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS_METHODS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split"})
_SWITCHES = ("enable_thinking", "thinking")
_MAX_CHARS: Final = 2**25  # in a rendered text; no context is that long
_MAX_REASON: Final = 2000

_log = logging.getLogger(__name__)


class ChatTemplate:
    """One template, or the absence of one. Thread-safe."""

    def __init__(
        self,
        source: str | None,
        values: Mapping[str, str],
        limits: ProcessLimits = ProcessLimits(),  # noqa: B008 - it is immutable
    ) -> None:
        """Parse the template.

        Args:
            source: Jinja source; None for a model without a template.
            values: The texts of special tokens, by the names that templates use.

        Raises:
            InvalidRequestError: the template is not valid Jinja.
        """
        self._limits = limits
        self._processes: LimitedProcesses | None = None
        self._has_tools_in_system = False
        if source is not None:
            self._has_tools_in_system = _reads_tools_of_system(_parse(source))
            setup = source, dict(values)
            self._processes = LimitedProcesses(__name__, setup, "rendering a chat template", limits)

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] = (),
        *,
        add_generation_prompt: bool = True,
        today: date | None = None,
        is_thinking: bool | None = None,
    ) -> str:
        """Render a conversation.

        Raises:
            InvalidRequestError: the template rejects the conversation or exceeds a limit, or the
                model has no template.
            OverloadedError: no process to render it became free in time.
        """
        if self._processes is None:
            raise InvalidRequestError("this model has no chat template.", param="messages")
        # Models use different names for the switch; templates ignore unknown variables.
        switches = {} if is_thinking is None else dict.fromkeys(_SWITCHES, is_thinking)
        if tools and self._has_tools_in_system:
            messages = _with_tools(messages, tools)
        variables = {
            "messages": list(messages),
            "tools": list(tools) or None,
            **({"xml_tools": list(tools)} if tools else {}),  # the name in SmolLM3's template
            "add_generation_prompt": add_generation_prompt,
            **switches,
        }
        try:
            request = marshal.dumps((variables, today.isoformat() if today else None))
        except ValueError as error:
            raise InvalidRequestError(
                f"the chat template cannot render this conversation: {error}.", param="messages"
            ) from error
        try:
            with self._processes.reserve() as ask:
                answer = ask(request).decode("utf-8", "surrogatepass")
        except LimitExceededError as error:
            raise self._exceeded() from error
        match answer[:1], answer[1:]:
            case "=", text:
                return text
            case "!", reason:
                raise InvalidRequestError(
                    f"the model's chat template rejects this conversation: {reason}",
                    param="messages",
                )
            case _:
                raise self._exceeded()

    def _exceeded(self) -> InvalidRequestError:
        limits = f"{self._limits}, or {_MAX_CHARS} characters"
        _log.warning(
            "rejected a conversation: rendering the model's chat template exceeds %s", limits
        )
        return InvalidRequestError(
            f"rendering the model's chat template exceeds {limits}; use another model or correct "
            "the template.",
            param="messages",
        )


def template_source(directory: Path, config: JsonObject) -> str | None:
    """Find a model's template: in its own file, the processor's, or the tokenizer's config."""
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text("utf-8")
    of_processor = directory / "chat_template.json"  # of older models that take images
    if of_processor.is_file():
        config = json.loads(of_processor.read_text("utf-8"))
    source = config.get("chat_template")
    if isinstance(source, list):
        by_name = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = by_name.get("default")
    return source if isinstance(source, str) else None


def _reads_tools_of_system(tree: nodes.Template) -> bool:
    """Whether a template takes tools from a message (Phi-4-mini) instead of a variable."""
    if any(name.name == "tools" for name in tree.find_all(nodes.Name)):
        return False
    items = (node.arg for node in tree.find_all(nodes.Getitem))
    names = {arg.value for arg in items if isinstance(arg, nodes.Const)}
    return "tools" in names | {node.attr for node in tree.find_all(nodes.Getattr)}


def _with_tools(messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Return messages with the tools as JSON text in the system message, the first one."""
    listed = json.dumps([tool.get("function") for tool in tools], ensure_ascii=False)
    has_system = bool(messages) and messages[0].get("role") == "system"
    system: JsonObject = messages[0] if has_system else {"role": "system", "content": ""}
    return [{**system, "tools": listed}, *messages[has_system:]]


def _parse(source: str) -> nodes.Template:
    """Reject an invalid template without compiling it, which would evaluate its constants."""
    environment = _environment()
    try:
        tree = environment.parse(source)
        for node in tree.find_all((nodes.Filter, nodes.Test)):
            known = environment.filters if isinstance(node, nodes.Filter) else environment.tests
            if node.name not in known:
                raise jinja2.TemplateAssertionError(
                    f"unknown filter or test {node.name!r}.", node.lineno
                )
    except Exception as error:  # Jinja raises more than it declares
        raise InvalidRequestError(
            f"the model's chat template is not valid: {error}", param="model"
        ) from error
    return tree


def _clock(today: date | None) -> Callable[[str], str]:
    def strftime_now(pattern: str) -> str:
        now = datetime.now().astimezone()
        return (datetime.combine(today, time(), now.tzinfo) if today else now).strftime(pattern)

    return strftime_now


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with fast paths for the most frequent attribute accesses.

    Keys that are not attributes of `dict` need none of the sandbox's checks. Neither do loops and
    namespaces, which Jinja creates for a template and which expose no Python internals.
    """

    def getattr(self, obj: object, attribute: str) -> object:
        if type(obj) is list and attribute in ("append", "pop"):
            return getattr(obj, attribute)  # every conversation has lists of its own
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if type(obj) is str and attribute in _HARMLESS_METHODS:
            return getattr(obj, attribute)
        if type(obj) in (LoopContext, Namespace) and not attribute.startswith("_"):
            with suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's own text for training; here it renders its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse up to the end tag; variables set inside are local."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _environment() -> _Environment:
    # Jinja evaluates constants while it compiles: a costly one would count against every
    # conversation, also those that never reach it. Both options below prevent that.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_finalize_at_run_time,
        extensions=[loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = json.loads
    environment.globals["raise_exception"] = _raise
    return environment


@jinja2.pass_context
def _finalize_at_run_time(_context: object, value: object) -> object:
    return value


def _to_json(value: object, *, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# -- inside the subprocess ----------------------------------------------------------------------


def _prepare(setup: tuple[str, dict[str, str]]) -> Callable[[bytes], bytes]:
    source, values = setup
    template: jinja2.Template | None = None

    def render(request: bytes) -> str:
        nonlocal template
        variables, today = marshal.loads(request)  # noqa: S302 - the server sent it
        if template is None:
            template = _environment().from_string(source)
        clock = _clock(date.fromisoformat(today) if today else None)
        return template.render(strftime_now=clock, **variables, **values)

    def answer(request: bytes) -> bytes:
        """Answer "=" and the text, "!" and an error, or nothing if a limit was exceeded."""
        answered = ""
        try:
            text = render(request)
            answered = f"={text}" if len(text) <= _MAX_CHARS else ""
        except MemoryError:
            pass
        except Exception as error:  # noqa: BLE001 - untrusted code may raise anything
            answered = f"!{str(error)[:_MAX_REASON] or type(error).__name__}"
        return answered.encode("utf-8", "surrogatepass")

    return answer


if __name__ == "__main__":
    serve(_prepare)
