"""`semantic chat`: talk to an agent from a terminal, with commands to fork and rewind it."""

import base64
import contextlib
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from semantic.adapters.config.settings import STARTER_MODEL, STARTER_NOTE
from semantic.adapters.config.terminal import printable
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.agents import AgentArgument, explanation, find_turn, turn_tree
from semantic.entrypoints.cli.client import Json, ServerClient, ServerError
from semantic.entrypoints.cli.flags import AsJson, Command, print_json, with_server
from semantic.entrypoints.cli.screen import Spinner, console, message_text, place, reuse_bar

_HELP = """\
  /fork [NAME]        continue as another agent from here
  /rewind [N]         remove the last turn, or the last N
  /retry              remove the last turn and send its message again
  /log                show the turns
  /image FILE         send a picture with the next message; repeat it for several
  /explain            show what the latest prompt reused, and where it diverged
  /model [NAME]       show the agent's model, or set another
  /system [TEXT]      show the agent's system prompt, or set another
  /set [NAME VALUE]   show the options of replies, or set one; without VALUE, its default
  /bye                exit (also /quit and Ctrl-D); the agent is kept
  A message in \"\"\" may have several lines, and so may one whose lines end with \\.
  Ctrl-C stops a reply."""
# What `/set` changes in later requests, with the type of each.
_OPTIONS: dict[str, type[int] | type[float]] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}
# Options that are flags too.
_FLAGS: dict[str, Any] = {
    "max_tokens": Annotated[int | None, typer.Option(help="longest reply")],
    "temperature": Annotated[
        float | None, typer.Option(help="0 always selects the most likely token")
    ],
}
_QUOTES = '"""'
_ERASE_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


def _with_options(command: Command) -> Command:
    """Add the flags of `_FLAGS`; the command's argument `options` has those that are given."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.name != "options"]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _FLAGS.items()
    ]

    def run(client: ServerClient, **given: Any) -> Any:
        options = {name: given.pop(name) for name in _FLAGS}
        set_ones = {name: value for name, value in options.items() if value is not None}
        return command(client, options=set_ones, **given)

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    run.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    return run


@with_server
@_with_options
def chat(
    client: ServerClient,
    agent: Annotated[str, AgentArgument(help="created if it does not exist")] = "me",
    *,
    message: Annotated[
        str | None, typer.Option("-m", "--message", help="send this, print the reply and exit")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", metavar="FILE", help="send a picture too; may be repeated"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="system prompt of a new agent")] = None,
    options: Json,
    as_json: AsJson = False,
) -> int | None:
    """Talk to an agent. It keeps the conversation, even across restarts of the server."""
    if as_json and message is None:
        raise InvalidRequestError("--json needs --message: it prints one reply")
    if message is not None and not message.strip():
        raise InvalidRequestError("--message is empty; give it a text, or leave it out to chat")
    images = [_read_image(path) for path in image or ()]
    session = ChatSession(client, agent, console(), options, images)
    session.open(system)
    if as_json and message is not None:
        with Spinner(f"waiting for {agent}"):
            reply = client.call("POST", f"{session.path}/generate", json=session.body(message))
        print_json(reply)
    elif message is not None:
        session.say(message)
    else:
        session.run()
    return None


@dataclass
class ChatSession:
    """One conversation at a terminal.

    Attributes:
        images: Pictures to send with the next message: data URIs, or digests of earlier ones.
    """

    client: ServerClient
    agent: str
    screen: Console
    options: Json = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    _is_reading: bool = False  # whether the screen shows a line of prefill progress

    def open(self, system: str | None = None) -> None:
        """Find the agent, or create it with this system prompt.

        Raises:
            InvalidRequestError: it exists with another system prompt.
            ServerError: the server refused, or did not answer.
        """
        try:
            found = self.client.call("GET", self.path)
        except ServerError as error:
            if error.status != 404:
                raise
            body = {"id": self.agent, **({"system": system} if system else {})}
            found = self.client.call("POST", "/v1/agents", json=body)
        else:
            if system is not None and found["settings"]["system"] != system:
                raise InvalidRequestError(
                    f"{self.agent} already exists with another system prompt; choose another name"
                )
        if found["turns"] and self.screen.is_terminal:
            turns = "1 turn" if found["turns"] == 1 else f"{found['turns']:,} turns"
            cache = place(found["state"]).plain
            self.screen.print(f"{turns}, {found['tokens']:,} tokens, {cache}", style="dim")

    @property
    def path(self) -> str:
        return f"/v1/agents/{self.agent}"

    def run(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a history
        if self.screen.is_terminal:
            self.screen.print(f"talking to {self.agent}; /help lists commands", style="dim")
            if self.client.call("GET", "/health")["model"] == STARTER_MODEL:
                self.screen.print(STARTER_NOTE, style="dim")
        while (line := self._read()) is not None:
            try:
                if not self._run_line(line):
                    return
            except (ServerError, InvalidRequestError) as error:
                self.screen.print(error.message, style="red")

    def _read(self) -> str | None:
        prompt = f"{self.agent}> " if sys.stdin.isatty() else ""
        while True:
            try:
                if text := _read_message(prompt).strip():
                    return text
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.screen.print()

    def _run_line(self, line: str) -> bool:
        if not line.startswith("/"):
            self.say(line)
            return True
        name, _, argument = line.removeprefix("/").partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "fork": self._fork,
            "rewind": self._rewind,
            "retry": self._retry,
            "log": self._log,
            "image": self._image,
            "explain": self._explain,
            "model": self._model,
            "system": self._system,
            "set": self._set,
            "help": lambda _: self.screen.print(_HELP),
        }
        if name in ("bye", "quit", "exit", "q"):
            return False
        if name not in commands:
            raise InvalidRequestError(f"unknown command /{name}; /help lists them")
        commands[name](argument.strip())
        return True

    # -- messages ---------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Send a message and stream the reply to the screen; Ctrl-C stops it."""
        started, first = time.monotonic(), None
        body = self.body(text) | {"stream": True}
        events = self.client.events("POST", f"{self.path}/generate", json=body)
        try:
            for event in events:
                if event["type"] in ("text", "thinking", "tool_call") and first is None:
                    first = time.monotonic()
                self._show(event, started, first)
        except KeyboardInterrupt:
            kept = "nothing is kept" if first is None else "the reply so far is kept"
            self.screen.print(f"\nstopped; {kept}", style="dim")
        finally:
            events.close()

    def body(self, text: str) -> Json:
        """Return the request for a message, with the pictures that wait for it."""
        said: Json = {"message": text}
        if self.images:
            parts = [{"type": "image", "source": image} for image in self.images]
            content = [*parts, {"type": "text", "text": text}]
            said = {"messages": [{"role": "user", "content": content}]}
            self.images = []
        return {**said, **self.options}

    def _show(self, event: Json, started: float, first: float | None) -> None:
        if self._is_reading:
            self.screen.control(_ERASE_LINE)
            self._is_reading = False
        match event["type"]:
            case "text":
                self._write(event["text"])
            case "thinking":
                self.screen.print(event["text"], style="dim italic", end="")
            case "tool_call":
                self.screen.print(f"\ncalls {event['name']} ", style="cyan", end="")
            case "tool_arguments":
                self._write(event["arguments"])
            case "prefill" if self.screen.is_terminal and event["done"] < event["total"]:
                self.screen.print(f"reading {event['done']}/{event['total']}", style="dim", end="")
                self._is_reading = True
            case "finished":
                self._conclude(event, started, first)
            case "error":
                self.screen.print()
                raise ServerError(event["error"]["message"])

    def _write(self, text: str) -> None:
        self.screen.out(printable(text), end="", highlight=False)
        self.screen.file.flush()

    def _conclude(self, reply: Json, started: float, first: float | None) -> None:
        self.screen.print()
        if not self.screen.is_terminal:
            return
        usage, now = reply["usage"], time.monotonic()
        parts = []
        if first is not None:
            parts.append(f"first token after {first - started:.2f} s")
            if usage["completion_tokens"] > 1:
                rate = (usage["completion_tokens"] - 1) / max(now - first, 1e-9)
                parts.append(f"{rate:.0f} tokens/s")
        if reply["finish_reason"] not in ("end_turn", "stop_sequence"):
            parts.append(f"ended by {reply['finish_reason']}")
        self.screen.print(reuse_bar(reply["reuse"]).append(f"  {'; '.join(parts)}", "dim"))

    # -- commands ---------------------------------------------------------------------------------

    def _image(self, name: str) -> None:
        if not name:
            raise InvalidRequestError("/image needs the name of a file")
        self.images.append(_read_image(Path(name)))
        number = len(self.images)
        what = "1 picture" if number == 1 else f"{number} pictures"
        self.screen.print(f"{what} will be sent with the next message", style="dim")

    def _fork(self, name: str) -> None:
        body = {"ids": [name]} if name else {"n": 1}
        self.agent = self.client.call("POST", f"{self.path}/fork", json=body)["data"][0]["id"]
        self.screen.print(f"now talking to {self.agent}", style="dim")

    def _rewind(self, back: str) -> None:
        turn = find_turn(self.client, self.agent, back or "1")
        found = self.client.call("POST", f"{self.path}/rewind", json={"turn_id": turn})
        self.screen.print(f"rewound to turn {found['turns']}", style="dim")

    def _log(self, _: str) -> None:
        turns = {t["id"]: t for t in self.client.pages(f"{self.path}/turns", "before")}
        head = self.client.call("GET", self.path)["head"]
        self.screen.print(turn_tree(turns, {self.agent: head}, self.agent))

    def _explain(self, _: str) -> None:
        self.screen.print(explanation(self.client.call("GET", f"{self.path}/explain")))

    def _retry(self, _: str) -> None:
        turn = next(self.client.pages(f"{self.path}/turns", "before"), None)
        asked = [m for m in turn["messages"] if m["role"] == "user"] if turn else []
        if turn is None or not asked:
            raise InvalidRequestError(f"{self.agent} has no message to send again")
        self.client.call("POST", f"{self.path}/rewind", json={"turn_id": turn["parent"]})
        content = asked[-1]["content"]
        self.images = [f"sha256:{p['sha256']}" for p in content if p["type"] == "image"]
        texts = [part for part in content if part["type"] != "image"]
        self.say(message_text({"content": texts}))

    def _system(self, text: str) -> None:
        if text:
            self.client.call("PATCH", self.path, json={"system": text})
        system = self.client.call("GET", self.path)["settings"]["system"]
        self.screen.print(f"system prompt: {system}" if system else "no system prompt")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if name and name not in _OPTIONS:
            raise InvalidRequestError(f"unknown option {name!r}; there are {', '.join(_OPTIONS)}")
        if value:
            self.options[name] = _number(name, value)
        elif name:
            self.options.pop(name, None)
        for option in _OPTIONS:
            self.screen.print(f"  {option:<18}  {self.options.get(option, 'default')}")

    def _model(self, name: str) -> None:
        listed = self.client.call("GET", "/v1/models")["data"]
        if name:
            self._require_model(name, [model["id"] for model in listed])
            self.client.call("PATCH", self.path, json={"model": name})
        wanted = self.client.call("GET", self.path)["settings"]["model"] or "the served model"
        self.screen.print(f"uses {wanted}; the server has:")
        for model in listed:
            self.screen.print(Text(f"  {model['id']}  ").append(str(model["state"]), "dim"))

    def _require_model(self, name: str, known: list[str]) -> None:
        """Check a name with the server, which knows aliases.

        An agent accepts any name; a wrong one would fail only at its next turn.
        """
        try:
            self.client.call("GET", f"/v1/models/{quote(name)}")
        except ServerError as error:
            if error.status != 404:
                raise
            there_are = ", ".join(known)
            raise InvalidRequestError(
                f"model {name!r} not found; the server has: {there_are}"
            ) from error


def _read_image(path: Path) -> str:
    """Return a file as a data URI; the server recognises its format."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error
    return f"data:;base64,{base64.b64encode(data).decode()}"


def _read_message(prompt: str) -> str:
    """Read a line, or the lines between two triple quotes, or those that end with a backslash."""
    text = input(prompt)
    if text.lstrip().startswith(_QUOTES):
        text = text.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += f"\n{_more(prompt)}"
        return text.rstrip().removesuffix(_QUOTES)
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{_more(prompt)}"
    return text


def _more(prompt: str) -> str:
    return input("... " if prompt else "")


def _number(name: str, value: str) -> float:
    kind = _OPTIONS[name]
    try:
        return kind(value)
    except ValueError as error:
        needed = "an integer" if kind is int else "a number"
        raise InvalidRequestError(f"{name} needs {needed}, not {value!r}") from error
