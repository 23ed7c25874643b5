"""A model's chat template: Jinja from a stranger, run in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from semantic.domain.chat import JsonObject
from semantic.domain.errors import InvalidRequestError

_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS_METHODS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split"})
_SWITCHES = ("enable_thinking", "thinking")


class ChatTemplate:
    """One compiled template, or the absence of one. Immutable, safe on any thread."""

    def __init__(self, source: str | None, values: Mapping[str, str]) -> None:
        """Compile.

        Args:
            source: Jinja; None for a model without a template.
            values: The texts of the special tokens that templates name.

        Raises:
            InvalidRequestError: it is not valid Jinja.
        """
        self._values = dict(values)
        self._template = _compile(source) if source is not None else None

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        *,
        add_generation_prompt: bool,
        today: date | None,
        is_thinking: bool | None,
    ) -> str:
        """Apply the template.

        Raises:
            InvalidRequestError: it refuses the conversation, or there is none.
        """
        if self._template is None:
            raise InvalidRequestError("this model has no chat template.", param="messages")
        # Models disagree about the switch's name; a template ignores what it does not know.
        switches = {} if is_thinking is None else dict.fromkeys(_SWITCHES, is_thinking)
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=_clock(today),
                **switches,
                **self._values,
            )
        except Exception as error:  # a stranger's code may raise whatever it likes
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {reason}", param="messages"
            ) from error


def template_source(directory: Path, config: JsonObject) -> str | None:
    """Find a model's template: in a file of its own, or in its tokenizer's config."""
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        by_name = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = by_name.get("default")
    return source if isinstance(source, str) else None


def _clock(today: date | None) -> Callable[[str], str]:
    """Return what templates call `strftime_now`, at a day that may be fixed."""

    def strftime_now(pattern: str) -> str:
        now = datetime.now().astimezone()
        return (datetime.combine(today, time(), now.tzinfo) if today else now).strftime(pattern)

    return strftime_now


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to what templates read most: a message's own keys."""

    def getattr(self, obj: object, attribute: str) -> object:
        """As the sandbox does; a key that is no attribute of a dict needs none of its checks."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if type(obj) is str and attribute in _HARMLESS_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _GenerationTag(Extension):
    """`{% generation %}`: marks what training counts as the model's own; here it shows its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to the end tag; variables set in between end with it."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _compile(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except Exception as error:  # Jinja raises more than it declares
        raise InvalidRequestError(
            f"the model's chat template is not valid: {error}", param="model"
        ) from error


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
