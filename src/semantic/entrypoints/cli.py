"""The `semantic` command."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semantic import __version__
from semantic.adapters.config.settings import Settings, load_settings
from semantic.domain.errors import SemanticError

_FLAGS = (
    *("host", "port", "model", "backend", "dtype", "device", "weights", "threads"),
    *("home", "cache_dir", "log_level"),
)
_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = vars(_parser().parse_args(arguments))
    options.pop("command")
    config = options.pop("config")
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return _serve(load_settings(given, config=config))
    except SemanticError as error:
        sys.stderr.write(f"semantic: {error.message}\n")
        return _USAGE_ERROR


def _serve(settings: Settings) -> int:
    # Imported here so that --help and a wrong setting answer at once.
    from semantic.adapters.config.logging import configure_logging
    from semantic.entrypoints.bootstrap import bootstrap
    from semantic.entrypoints.server import serve

    configure_logging(settings.log_level, settings.log_format, settings.home_dir / "logs")
    return serve(bootstrap(settings))


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
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str) -> None:
    field = Settings.model_fields[name]
    choices = getattr(field.annotation, "__args__", ())
    is_choice = bool(choices) and all(isinstance(choice, str) for choice in choices)
    options: dict[str, Any] = {"choices": choices} if is_choice else {"metavar": name.upper()}
    default = "" if field.default is None else f" (default: {field.default})"
    parser.add_argument(
        f"--{name.replace('_', '-')}", help=f"{field.description}{default}", **options
    )
