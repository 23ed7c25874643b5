"""The `semantic` command."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semantic import __version__
from semantic.adapters.config.settings import Settings, load_settings, misspelled
from semantic.domain.errors import SemanticError

_FLAGS = (
    *("host", "port", "model", "backend", "dtype", "device", "weights", "threads"),
    *("home", "cache_dir", "durability", "disk_budget_mb", "memory_budget_mb", "kv_bits"),
    "log_level",
)
_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = vars(_parser().parse_args(arguments))
    # Whatever is written here is its owner's alone, by whichever library.
    os.umask(0o077)
    command = options.pop("command")
    config = options.pop("config")
    try:
        return _COMMANDS[command](options, config)
    except SemanticError as error:
        sys.stderr.write(f"semantic: {error.message}\n")
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED


def _settings(options: dict[str, Any], config: Path | None) -> Settings:
    for warning in misspelled(os.environ):
        sys.stderr.write(f"semantic: {warning}\n")
    given = {name: value for name, value in options.items() if value is not None}
    return load_settings(given, config=config)


def _cache(options: dict[str, Any], config: Path | None) -> int:
    from semantic.entrypoints.cache_cli import run_cache

    action, age_h = options.pop("action"), options.pop("orphan_age_h", None)
    return run_cache(action, _settings(options, config), age_h)


def _serve(options: dict[str, Any], config: Path | None) -> int:
    settings = _settings(options, config)
    # Imported here so that --help and a wrong setting answer at once.
    from semantic.adapters.config.logging import configure_logging
    from semantic.entrypoints.bootstrap import bootstrap
    from semantic.entrypoints.server import serve

    configure_logging(settings.log_level, settings.log_format, settings.home_dir / "logs")
    return serve(bootstrap(settings))


_COMMANDS = {"serve": _serve, "cache": _cache}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="semantic",
        description="An inference server that keeps every agent's attention state.",
    )
    parser.add_argument("--version", action="version", version=f"semantic {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP.",
        epilog="Every setting can also be given as SEMANTIC_<NAME> in the environment or .env, "
        "or in a TOML file; config/default.toml lists them all.",
    )
    for name in _FLAGS:
        _add_flag(serve, name)
    serve.add_argument(
        "--allow-remote",
        action="store_true",
        default=None,
        help=Settings.model_fields["allow_remote"].description,
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings")
    cache = commands.add_parser(
        "cache",
        help="look at, check or clean the cache directory",
        description="Look at, check or clean a cache directory, while no server uses it.",
    )
    _add_cache_commands(cache)
    return parser


def _add_cache_commands(parser: argparse.ArgumentParser) -> None:
    """Add `stats`, `verify`, `gc` and `export-key`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    stats = actions.add_parser(
        "stats",
        help="say what is there",
        description="Say how many agents, turns and files a cache directory holds.",
    )
    verify = actions.add_parser(
        "verify",
        help="read and check everything",
        description="Read every file and every turn and compare them with their checksums. Bad "
        "files are moved to quarantine: what they held is computed anew when it is needed. A "
        "damaged ledger is restored from its backup. The exit status is 1 if anything was bad.",
    )
    gc = actions.add_parser(
        "gc",
        help="delete what no agent reaches",
        description="Delete attention state and turns that no agent reaches, and what has been in "
        "quarantine for as long.",
    )
    gc.add_argument(
        "--orphan-age-h",
        type=float,
        metavar="HOURS",
        help="spare what was used within so many hours; 0 spares nothing "
        f"(default: the setting orphan_ttl_h, {Settings.model_fields['orphan_ttl_h'].default})",
    )
    key = actions.add_parser(
        "export-key",
        help="print the key that this installation signs exported agents with",
        description="Print the key that this installation signs exported agents with, for the "
        "setting trusted_export_keys of another server. It is a secret: whoever has it can sign "
        "in this one's name.",
    )
    for action in (stats, verify, gc):
        action.add_argument("--cache-dir", metavar="DIR", help="default: HOME/cache")
    for action in (stats, verify, gc, key):
        action.add_argument("--home", metavar="HOME", help="the server's --home")
        action.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings")


def _add_flag(parser: argparse.ArgumentParser, name: str) -> None:
    field = Settings.model_fields[name]
    choices = getattr(field.annotation, "__args__", ())
    is_choice = bool(choices) and all(isinstance(choice, str) for choice in choices)
    options: dict[str, Any] = {"choices": choices} if is_choice else {"metavar": name.upper()}
    default = "" if field.default is None else f" (default: {field.default})"
    parser.add_argument(
        f"--{name.replace('_', '-')}", help=f"{field.description}{default}", **options
    )
