"""Flags that many commands share: settings, and the address and key of a running server."""

import inspect
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import RenderableType

from semantic.adapters.config.settings import Settings
from semantic.adapters.config.sources import load_settings, unknown_variables
from semantic.adapters.config.terminal import escape_controls
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.client import DEFAULT_URL, Json, ServerClient
from semantic.entrypoints.cli.screen import console, say

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_PATHS = ("home", "cache_dir", "config")  # they may not exist yet
Yes = Annotated[bool, typer.Option("-y", "--yes", help="do not ask for confirmation")]
# The second is the server's own setting, so that one environment serves both.
_KEY = typer.Option(
    "--key",
    envvar=["SEMANTIC_CLIENT_KEY", "SEMANTIC_API_KEY"],
    metavar="KEY",
    help="API key, if the server needs one",
)
Key = Annotated[str | None, _KEY]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command.

    Attributes:
        value: Printed as JSON with `--json`.
        shown: Printed otherwise.
        note: Printed to standard error, without `--json` only.
    """

    value: object
    shown: RenderableType = ""
    note: str = ""
    status: int = 0

    def print(self, *, as_json: bool) -> int:
        if as_json:
            print_json(self.value)
            return self.status
        if not isinstance(self.shown, str):
            console().print(self.shown)
        elif self.shown:
            say(self.shown)
        if self.note:
            say(self.note, is_error=True)
        return self.status


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """Settings, and the flags on the command line that they came from, to start a server with.

    Attributes:
        arguments: The flags with absolute paths, so that they hold in every directory.
    """

    settings: Settings
    arguments: tuple[str, ...]


# A command that returns an `Answer` gets the flag --json.
Command: TypeAlias = Callable[..., Answer | int | None]


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Add flags for these settings and `--config`; the command's first argument is `Settings`."""
    return _with_settings(names, lambda given: given.settings)


def with_given_settings(*names: str) -> Callable[[Command], Command]:
    """Like `with_settings`, but the command's first argument is `GivenSettings`."""
    return _with_settings(names, lambda given: given)


def _with_settings(
    names: Sequence[str], first: Callable[[GivenSettings], object]
) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        def prepare(options: Json) -> AbstractContextManager[object]:
            config = options.pop("config")
            given = {name: options.pop(name) for name in names}
            for warning in unknown_variables(os.environ):
                say(f"semantic: {warning}", is_error=True)
            given = {name: value for name, value in given.items() if value is not None}
            settings = load_settings(given, config=config)
            return nullcontext(first(GivenSettings(settings, _arguments(given, config))))

        option = typer.Option("--config", metavar="FILE", help="a TOML file of settings")
        config = _parameter("config", Path | None, option)
        return _with_flags(command, [*map(_setting, names), config], prepare)

    return decorate


def _arguments(given: Json, config: Path | None) -> tuple[str, ...]:
    """Write flags as they would be typed; the name of an existing file becomes its full path."""
    arguments: list[str] = []
    for name, value in {**given, **({"config": config} if config else {})}.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(flag)
            continue
        path = Path(value).expanduser()
        is_path = name in _PATHS or path.exists()
        arguments += [flag, str(path.absolute() if is_path else value)]
    return tuple(arguments)


def with_server(command: Command) -> Command:
    """Add the flags `--server` and `--key`; the command's first argument is a `ServerClient`."""
    server = typer.Option(
        "--server", envvar="SEMANTIC_URL", metavar="URL", help=f"default: {DEFAULT_URL}"
    )
    flags = [_parameter("server", str | None, server), _parameter("key", str | None, _KEY)]

    def prepare(options: Json) -> ServerClient:
        return ServerClient(options.pop("server") or DEFAULT_URL, options.pop("key"))

    return _with_flags(command, flags, prepare)


def require_confirmation(question: str, *, is_given: bool) -> None:
    """Ask on the terminal before something is deleted, unless `--yes` is given.

    Raises:
        InvalidRequestError: the answer is no, or no terminal is attached to ask.
    """
    if is_given:
        return
    try:
        if typer.confirm(question, err=True):
            return
    except typer.Abort:  # Ctrl-C, or the input has ended
        typer.echo(err=True)
    raise InvalidRequestError("nothing deleted; -y deletes without asking")


def print_json(value: object) -> None:
    """Print a value as JSON, with control characters escaped."""
    typer.echo(escape_controls(json.dumps(value, indent=2, ensure_ascii=False)))


def _with_flags(
    command: Command,
    flags: Iterable[inspect.Parameter],
    prepare: Callable[[Json], AbstractContextManager[object]],
) -> Command:
    """Add flags to a command; `prepare` turns their values into its first argument."""
    signature = inspect.signature(command, eval_str=True)
    _, *own = signature.parameters.values()
    has_answer = signature.return_annotation is Answer
    if has_answer:
        own.append(inspect.Parameter("as_json", _KEYWORD, default=False, annotation=AsJson))

    def run(**options: Any) -> int | None:
        is_json = has_answer and options.pop("as_json")
        with prepare(options) as prepared:
            answer = command(prepared, **options)
        return answer.print(as_json=is_json) if isinstance(answer, Answer) else answer

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    parameters = [*(one.replace(kind=_KEYWORD) for one in own), *flags]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _setting(name: str) -> inspect.Parameter:
    field = Settings.model_fields[name]
    choices = getattr(field.annotation, "__args__", ())
    is_switch = field.annotation is bool
    text = str(field.description).removeprefix("semantic cluster: ")
    if choices and all(isinstance(choice, str) for choice in choices):
        text = f"{text}; one of {', '.join(choices)}"
    if field.default is not None and not is_switch:
        text = f"{text} (default: {field.default})"
    metavar = None if is_switch else name.rpartition("_")[2].upper()
    option = typer.Option(
        f"--{name.replace('_', '-')}", help=text, metavar=metavar, show_default=False
    )
    return _parameter(name, bool | None if is_switch else str | None, option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, _KEYWORD, default=None, annotation=Annotated[kind, option])
