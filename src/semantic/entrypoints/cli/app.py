"""The commands, their help, and the mapping of errors to messages and exit statuses."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from semantic import __version__
from semantic.adapters.config.settings import Settings
from semantic.domain.errors import SemanticError
from semantic.entrypoints.cli.agents import agents_app
from semantic.entrypoints.cli.chat import chat
from semantic.entrypoints.cli.flags import (
    Answer,
    GivenSettings,
    Key,
    with_given_settings,
    with_settings,
)
from semantic.entrypoints.cli.keys import keys_app
from semantic.entrypoints.cli.launch import launch, mcp
from semantic.entrypoints.cli.models import models_app, ps, stop
from semantic.entrypoints.cli.screen import say
from semantic.entrypoints.cli.service import install, service_app
from semantic.entrypoints.cli.storage.packs import packs_app
from semantic.entrypoints.cli.watch import bench, top

_SERVE_FLAGS = (
    "host",
    "port",
    "model",
    "draft_model",
    "backend",
    "dtype",
    "device",
    "weights",
    "threads",
    "shards",
    "home",
    "cache_dir",
    "durability",
    "disk_budget_mb",
    "memory_budget_mb",
    "kv_bits",
    "tls_cert",
    "tls_key",
    "log_level",
    "repairs",
    "allow_remote",
    "ollama",
)
_CLUSTER_FLAGS = (
    "host",
    "port",
    "model",
    "draft_model",
    "backend",
    "dtype",
    "device",
    "weights",
    "shards",
    "home",
    "replicas",
    "max_replicas",
    "replica_cpus",
    "replica_gpus",
    "ray_address",
    "upscale_delay_s",
    "downscale_delay_s",
    "store",
    "database_url",
    "objects_url",
    "memory_budget_mb",
    "kv_bits",
    "log_level",
    "allow_remote",
)
# The panels of `semantic --help`.
_SERVING, _USING = "Run a server", "Use a running server"
_UPKEEP = "Maintain this machine and its files"
_USAGE_ERROR = 2
_INTERRUPTED = 130

app = typer.Typer(
    name="semantic",
    help="An inference server that keeps every agent's KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(
    help="Inspect, check or clean a cache directory, also through the server that uses it.",
    no_args_is_help=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    # Files that any library writes are readable and writable by their owner only.
    os.umask(0o077)
    try:
        status = app(args=arguments, prog_name="semantic", standalone_mode=False)
    except SemanticError as error:
        say(f"semantic: {error.message}", is_error=True)
        return _USAGE_ERROR
    except typer.TyperException as error:
        if message := error.format_message():
            say(f"semantic: {message}", is_error=True)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        say(f"semantic: {named}{error.strerror or error}", is_error=True)
        return _USAGE_ERROR
    return status if isinstance(status, int) else 0


# -- commands --------------------------------------------------------------------------------------


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"semantic {__version__}")
        raise typer.Exit


@app.callback()
def _semantic(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None: ...


@app.command(
    rich_help_panel=_SERVING,
    epilog="Every setting can also be given as SEMANTIC_<NAME> in the environment or .env, or in a "
    "TOML file; config/default.toml in the repository lists them all.",
)
@with_settings(*_SERVE_FLAGS)
def serve(settings: Settings) -> int:
    """Serve a model over HTTP."""
    # Imported here so that --help and setting errors respond at once.
    from semantic.entrypoints.loading import preload_torch

    preload_torch(settings)
    from semantic.adapters.config.logging import LogFiles, configure_logging
    from semantic.entrypoints.bootstrap import bootstrap
    from semantic.entrypoints.server import serve

    logs, size = settings.home_dir / "logs", int(settings.log_file_mb * 2**20)
    configure_logging(
        settings.runtime.log_level, settings.log_format, LogFiles(logs, size, settings.log_files)
    )
    return serve(bootstrap(settings))


@app.command(rich_help_panel=_SERVING)
@with_settings(*_CLUSTER_FLAGS)
def cluster(settings: Settings) -> int:
    """Serve a model with several servers that share their agents, on Ray Serve.

    They may run on one machine or many. On a signal, each of them finishes its replies and stops.
    """
    from semantic.entrypoints.cluster_loader import run_cluster

    return run_cluster(settings)


@app.command(rich_help_panel=_SERVING)
def shard(
    server: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="the shard_listen of the server")
    ],
) -> int:
    """Run one shard of a model for a server on another machine; needs SEMANTIC_SHARD_KEY."""
    from semantic.entrypoints.cluster_loader import join_server

    return join_server(server)


@cache_app.command()
@with_settings("cache_dir", "home")
def stats(settings: Settings, *, key: Key = None) -> Answer:
    """Show how many agents, turns and files a cache directory has."""
    return _cache("stats", settings, key=key)


@cache_app.command()
@with_settings("cache_dir", "home")
def verify(settings: Settings, *, key: Key = None) -> Answer:
    """Read every file and every turn and compare them with their checksums.

    Damaged files are moved to quarantine; the server recomputes their content when it is needed. A
    damaged ledger is restored from its backup. The exit status is 1 if anything was damaged.
    """
    return _cache("verify", settings, key=key)


@cache_app.command()
@with_settings("cache_dir", "home")
def gc(
    settings: Settings,
    *,
    orphan_age_h: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="HOURS",
            help="keep orphans that were used within this many hours; 0 keeps none "
            f"(default: the setting orphan_ttl_h, {Settings.model_fields['orphan_ttl_h'].default})",
        ),
    ] = None,
    key: Key = None,
) -> Answer:
    """Delete orphans (blocks and turns that no agent reaches) and old quarantined files.

    The exit status is 1 if something could not be deleted; the reason is printed.
    """
    return _cache("gc", settings, orphan_age_h, key)


@cache_app.command()
@with_settings("home")
def export_key(settings: Settings) -> Answer:
    """Print the key that this installation signs exported agents with.

    Add it to the setting trusted_export_keys of another server. Keep it secret: with it, anyone can
    sign agents as this installation.
    """
    return _cache("export-key", settings)


@app.command(rich_help_panel=_UPKEEP)
@with_given_settings("home", "cache_dir", "host", "port", "model", "backend", "native", "repairs")
def doctor(
    given: GivenSettings,
    *,
    report: Annotated[
        bool,
        typer.Option("--report", help="also test the server, and print all to paste into an issue"),
    ] = False,
    agent: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="instead: what changes in this agent's prompts"),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar=["SEMANTIC_CLIENT_KEY", "SEMANTIC_API_KEY"],
            metavar="KEY",
            help="with --agent: API key, if the server needs one",
        ),
    ] = None,
) -> Answer:
    """Check backends, processor, memory, disk, port, model and clients, and give advice.

    With --agent, compare the agent's latest prompts: what changes in them each turn, so that KV
    cache is computed again, and which rule repairs it. Without a server, reads the cache directory.

    With --report, also start a server of its own for about two minutes, which tests that replies
    from KV cache are exact and how fast they are. The report has no prompts, keys or names.
    """
    from semantic.entrypoints.cli.doctor.checks import run_doctor

    return run_doctor(given, has_report=report, agent=agent, key=key)


def _cache(
    action: str, settings: Settings, orphan_age_h: float | None = None, key: str | None = None
) -> Answer:
    from semantic.entrypoints.cli.storage.cache import run_cache

    return run_cache(action, settings, orphan_age_h, key)


service_app.command()(with_given_settings(*_SERVE_FLAGS)(install))
for command in (chat, ps, stop, top, bench, launch, mcp):
    app.command(rich_help_panel=_USING)(command)
app.add_typer(agents_app, name="agents", rich_help_panel=_USING)
app.add_typer(models_app, name="models", rich_help_panel=_USING)
app.add_typer(packs_app, name="pack", rich_help_panel=_USING)
app.add_typer(cache_app, name="cache", rich_help_panel=_UPKEEP)
app.add_typer(service_app, name="service", rich_help_panel=_SERVING)
app.add_typer(keys_app, name="keys", rich_help_panel=_UPKEEP)
