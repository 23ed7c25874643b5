"""`semantic launch` and `semantic mcp`: connect clients to a running server.

A launched client receives the server's address, the model and its context length by environment
variables, flags, or a file in a temporary directory. The user's configuration of the client is not
changed.
"""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.client import Json, ServerClient, ServerError
from semantic.entrypoints.cli.flags import print_json, with_server

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, WriteStream
    from mcp.shared.message import SessionMessage

# Clients are configured to request at most 1/4 of the context in one reply.
_REPLY_SHARE = 4


@dataclass(frozen=True, slots=True)
class Target:
    """The connection parameters that a client needs."""

    url: str
    key: str
    model: str
    context: int

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def reply(self) -> int:
        """The maximum number of tokens in a reply."""
        return self.context // _REPLY_SHARE


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a client.

    Attributes:
        command: The program and its first arguments; `{dir}` stands for the temporary directory.
        env: Additional environment variables; `{dir}` is replaced here too.
        files: JSON files to write into the temporary directory, by name.
    """

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, Json] = field(default_factory=dict)


def _claude(target: Target) -> Launch:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    return Launch(
        ("claude",),
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_API_KEY": target.key,
            **dict.fromkeys(models, target.model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.reply),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def _codex(target: Target) -> Launch:
    provider = (
        f'{{name="semantic",base_url="{target.openai_url}",wire_api="responses",'
        'env_key="SEMANTIC_CLIENT_KEY"}'
    )
    settings = {
        "model": json.dumps(target.model),
        "model_provider": '"semantic"',
        "model_context_window": str(target.context),
        "model_providers.semantic": provider,
    }
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return Launch(("codex", *flags), {"SEMANTIC_CLIENT_KEY": target.key})


def _opencode(target: Target) -> Launch:
    config = {
        "model": f"semantic/{target.model}",
        "small_model": f"semantic/{target.model}",
        "provider": {
            "semantic": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Semantic",
                "options": {"baseURL": target.openai_url, "apiKey": target.key},
                "models": {
                    target.model: {"limit": {"context": target.context, "output": target.reply}}
                },
            }
        },
    }
    return Launch(("opencode",), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _pi(target: Target) -> Launch:
    model = {"id": target.model, "contextWindow": target.context, "maxTokens": target.reply}
    provider = {
        "baseUrl": target.openai_url,
        "api": "openai-completions",
        "apiKey": target.key,
        "models": [model],
    }
    # Its sessions would go to the temporary directory, and --continue would not find them.
    sessions = Path.home() / ".pi" / "agent" / "sessions"
    return Launch(
        ("pi", "--provider", "semantic", "--model", target.model, "--session-dir", str(sessions)),
        {"PI_CODING_AGENT_DIR": "{dir}"},
        {"models.json": {"providers": {"semantic": provider}}},
    )


def _qwen(target: Target) -> Launch:
    return Launch(
        ("qwen",),
        {
            "OPENAI_BASE_URL": target.openai_url,
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
        },
    )


def _aider(target: Target) -> Launch:
    model = f"openai/{target.model}"
    known = {
        "max_input_tokens": target.context,
        "max_output_tokens": target.reply,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return Launch(
        ("aider", "--model", model, "--model-metadata-file", "{dir}/models.json"),
        {"OPENAI_API_BASE": target.openai_url, "OPENAI_API_KEY": target.key},
        {"models.json": {model: known}},
    )


def _continue(target: Target) -> Launch:
    model = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": target.openai_url,
        "apiKey": target.key,
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": target.context, "maxTokens": target.reply},
    }
    config = {"name": "semantic", "version": "0.0.1", "schema": "v1", "models": [model]}
    # Written as JSON, which is valid YAML.
    return Launch(("cn", "--config", "{dir}/config.yaml"), {}, {"config.yaml": config})


CLIENTS: dict[str, Callable[[Target], Launch]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "pi": _pi,
    "qwen": _qwen,
    "aider": _aider,
    "continue": _continue,
}
# How to install each client.
INSTALL = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "pi": "npm install -g @mariozechner/pi-coding-agent",
    "qwen": "npm install -g @qwen-code/qwen-code",
    "aider": "pipx install aider-chat",
    "continue": "npm install -g @continuedev/cli",
}

# About how many tokens the first request of each client has, with the starter model's tokenizer.
PROMPT_TOKENS = {
    "claude": 19_000,  # 11,600 to 19,000, by its tools and settings
    "codex": 6_200,
    "opencode": 7_000,
    "pi": 1_400,
    "qwen": 14_200,
    "aider": 1_000,
    "continue": 1_400,
}
# An argument with which a client sends a shorter prompt, and about how many tokens that has.
_SHORTER = {"claude": ("--bare", 1_100)}
_ROOM = 1_000  # the least room for a reply


def _begin_with(incomplete: str) -> list[str]:
    return [name for name in CLIENTS if name.startswith(incomplete)]


@with_server
def launch(
    client: ServerClient,
    name: Annotated[
        str,
        typer.Argument(
            metavar="CLIENT",
            help=f"one of {', '.join(CLIENTS)}",
            autocompletion=_begin_with,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARG", help="passed to the client")
    ] = None,
    *,
    model: Annotated[str | None, typer.Option(help="default: the one that is loaded")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be run, as JSON")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="run it even if the model's context is too short for it")
    ] = False,
) -> int:
    """Run a client against this server, without changing the client's configuration."""
    if name not in CLIENTS:
        raise InvalidRequestError(f"unknown client {name!r}; choose one of {', '.join(CLIENTS)}")
    target = find_target(client, model)
    if not force:
        require_context(name, target, arguments or [])
    plan = CLIENTS[name](target)
    if dry_run:
        command = [*plan.command, *(arguments or [])]
        print_json({"command": command, "env": plan.env, "files": plan.files})
        return 0
    program = shutil.which(plan.command[0])
    if program is None:
        raise InvalidRequestError(f"{plan.command[0]} is not installed: {INSTALL[name]}")
    with tempfile.TemporaryDirectory(prefix="semantic-") as directory:
        for file, content in plan.files.items():
            (Path(directory) / file).write_text(json.dumps(content))
        own = [word.replace("{dir}", directory) for word in plan.command[1:]]
        env = {key: value.replace("{dir}", directory) for key, value in plan.env.items()}
        return _run([program, *own, *(arguments or [])], {**os.environ, **env})


def find_target(client: ServerClient, model: str | None = None) -> Target:
    """Look up a model and its context length on a server; by default the loaded model.

    Raises:
        InvalidRequestError: the server has no such model, or has not loaded it yet.
        ServerError: the server does not answer.
    """
    listed = {entry["id"]: entry for entry in client.call("GET", "/v1/models")["data"]}
    loaded = [name for name, entry in listed.items() if entry["state"] in ("ready", "loaded")]
    name = model or next(iter(loaded or listed))
    if name not in listed:
        raise InvalidRequestError(f"{name!r} is unknown; the server has {', '.join(listed)}")
    context = listed[name].get("max_context") or 0
    if not context:
        raise InvalidRequestError(f"{name!r} is not loaded yet, so its context length is unknown")
    return Target(client.url, client.key or "none", name, context)


def require_context(name: str, target: Target, arguments: list[str]) -> None:
    """Refuse to run a client whose first prompt does not fit the model's context.

    Raises:
        InvalidRequestError: it does not fit; says what to do.
    """
    shorter, num_shorter = _SHORTER.get(name, ("", 0))
    num_tokens = num_shorter if shorter and shorter in arguments else PROMPT_TOKENS[name]
    if num_tokens + _ROOM <= target.context:
        return
    less = f"; or send less: semantic launch {name} -- {shorter}" if shorter else ""
    raise InvalidRequestError(
        f"{name} begins with a prompt of about {num_tokens:,} tokens, and {target.model} has a "
        f"context of {target.context:,}. Serve a model with a context of at least "
        f"{num_tokens + _ROOM:,} tokens: `semantic models recommend` lists some{less}; "
        "or run it anyway with --force"
    )


def _run(command: list[str], env: dict[str, str]) -> int:
    """Run a program in the foreground; the program handles Ctrl-C itself."""
    with subprocess.Popen(command, env=env) as process:  # noqa: S603 - the user requested it
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


# -- MCP ----------------------------------------------------------------------------------------


@with_server
def mcp(client: ServerClient) -> int:
    """Serve this server's agents as MCP tools on standard input and output.

    For clients such as Claude Code: `claude mcp add semantic -- semantic mcp`. The server must run.
    """
    from semantic.entrypoints.mcp_loader import MCP_PATH, missing_mcp

    try:
        import mcp.client.streamable_http  # noqa: F401
    except ModuleNotFoundError as error:
        raise ServerError(missing_mcp()) from error
    client.call("GET", "/health/live")  # a clear message if no server answers
    asyncio.run(_bridge(client.url + MCP_PATH, client.key))
    return 0


async def _bridge(url: str, key: str | None) -> None:
    """Copy messages between standard input and output and the server's endpoint, both ways."""
    from mcp.client.streamable_http import streamable_http_client
    from mcp.server.stdio import stdio_server
    from mcp.shared._httpx_utils import create_mcp_http_client

    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        create_mcp_http_client(headers=headers) as http,
        streamable_http_client(url, http_client=http) as (from_server, to_server),
        stdio_server() as (from_client, to_client),
    ):
        answering = asyncio.create_task(_copy(from_server, to_client))
        await _copy(from_client, to_server)  # until standard input ends
        answering.cancel()


async def _copy(source: "ReadStream[Any]", target: "WriteStream[SessionMessage]") -> None:
    async for message in source:
        if isinstance(message, Exception):
            raise ServerError(f"a message cannot be read: {message}")
        await target.send(message)
