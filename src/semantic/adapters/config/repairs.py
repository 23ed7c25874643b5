"""Reads the rules that repair volatile prompts: those of the package, and those of a file.

Patterns run with a time limit, since clients choose the text: the module `re` has none, so they
are compiled by the package `regex`.
"""

import logging
import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from semantic.adapters.validation import plain_reason
from semantic.domain.errors import InvalidRequestError
from semantic.domain.volatile.rules import FindText, RepairAction, RepairPlace, RepairRule

_log = logging.getLogger(__name__)
_TIMEOUT_S = 0.1  # for one text
_MAX_FOUND = 4096  # characters of one match

Pattern = Annotated[str, Field(min_length=1, max_length=1000)]


class _RuleEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]{0,63}$")]
    enabled: bool = False
    client: Pattern | None = None
    protocol: Literal["anthropic", "openai", "responses", "ollama", "agents"] | None = None
    place: Literal["system", "user", "tool_result", "tools"]
    pattern: Pattern | None = None
    action: Literal["freeze", "move_to_start", "move_to_end", "sort_tools", "drop"]

    @model_validator(mode="after")
    def _require_consistency(self) -> Self:
        if (self.action == "sort_tools") != (self.place == "tools"):
            raise ValueError('place: only action = "sort_tools" has place = "tools"')
        if (self.pattern is None) != (self.action == "sort_tools"):
            need = "no pattern" if self.pattern else "a pattern"
            raise ValueError(f'pattern: action = "{self.action}" needs {need}')
        if self.action.startswith("move_") and self.place != "system":
            raise ValueError(f'place: action = "{self.action}" needs place = "system"')
        return self


class _RulesFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    enable: tuple[str, ...] = ()
    rule: tuple[_RuleEntry, ...] = ()


def load_repairs(file: Path | None) -> tuple[RepairRule, ...]:
    """Return the rules of a file and of the package; None reads those of the package only.

    A rule of the file replaces one of the package with the same name.

    Raises:
        InvalidRequestError: the file or a rule is invalid; names the rule and its field.
    """
    shipped = files(__package__) / "repairs.toml"
    entries = {entry.name: entry for entry in _read(shipped.read_text("utf-8"), "the package").rule}
    if file is not None:
        own = _read(_text(file), str(file))
        names = [entry.name for entry in own.rule]
        for name in names:
            if names.count(name) > 1:
                raise _invalid(str(file), f"two rules have the name {name!r}")
        entries = {entry.name: entry for entry in own.rule} | {
            name: entry for name, entry in entries.items() if name not in names
        }
        for name in own.enable:
            if name not in entries:
                raise _invalid(
                    str(file), f"enable: there is no rule {name!r}, only {', '.join(entries)}"
                )
            entries[name] = entries[name].model_copy(update={"enabled": True})
    where = str(file or "the package")
    return tuple(_rule(entry, where) for entry in entries.values())


def _text(file: Path) -> str:
    try:
        return file.expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise _invalid(str(file), f"it cannot be read: {error}") from error


def _read(text: str, where: str) -> _RulesFile:
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise _invalid(where, f"it is not TOML: {error}") from error
    try:
        return _RulesFile.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise _invalid(
            where, f"{_place(problem['loc'], content)}{plain_reason(problem)}"
        ) from error


def _place(location: tuple[int | str, ...], content: dict[str, Any]) -> str:
    """Name the rule and the field of a problem."""
    if location[:1] != ("rule",) or len(location) < 2:
        return f"{'.'.join(map(str, location))}: " if location else ""
    number, *field = location[1:]
    entry = content["rule"][number]
    name = entry.get("name", f"number {int(number) + 1}") if isinstance(entry, dict) else number
    return ", ".join([f"rule {name}", *map(str, field)]) + ": "


def _invalid(where: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"repairs: {where}: {reason}", param="repairs")


def _rule(entry: _RuleEntry, where: str) -> RepairRule:
    return RepairRule(
        entry.name,
        RepairAction(entry.action),
        RepairPlace(entry.place),
        _finder(entry, "pattern", where) if entry.pattern else lambda _: (),
        _is_client(_finder(entry, "client", where)) if entry.client else lambda _: True,
        entry.protocol,
        entry.enabled,
    )


def _is_client(find: FindText) -> Callable[[str], bool]:
    return lambda user_agent: bool(find(user_agent))


def _finder(entry: _RuleEntry, field: Literal["pattern", "client"], where: str) -> FindText:
    """Compile a pattern; it finds nothing, and says so in the log, where it takes too long."""
    import regex  # noqa: PLC0415 - only rules need it

    try:
        compiled = regex.compile(getattr(entry, field), regex.MULTILINE)
    except regex.error as error:
        raise _invalid(where, f"rule {entry.name}, {field}: {error}") from error
    if compiled.match("") is not None:
        raise _invalid(where, f"rule {entry.name}, {field}: it matches empty text")

    def find(text: str) -> Sequence[tuple[int, int]]:
        try:
            found = [m.span() for m in compiled.finditer(text, timeout=_TIMEOUT_S, concurrent=True)]
        except TimeoutError:
            _log.warning(
                "rule %s not applied: its %s takes more than %g s on a text of %d characters",
                entry.name,
                field,
                _TIMEOUT_S,
                len(text),
            )
            return ()
        return [(start, end) for start, end in found if start < end <= start + _MAX_FOUND]

    return find
