"""`semantic keys`: create, list and revoke API keys."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

import typer
from pydantic import ValidationError

from semantic.adapters.config.keys import (
    KeyEntry,
    KeyFile,
    RateEntry,
    TenantEntry,
    edit_key_file,
    read_key_file,
)
from semantic.adapters.config.settings import Settings
from semantic.adapters.validation import plain_reason
from semantic.domain.agents import LOCAL_TENANT
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.flags import Answer, with_settings

_RELOAD = "A running server reads the file again on SIGHUP: kill -HUP <its process id>"
_Limits = TypeVar("_Limits", RateEntry, TenantEntry)


keys_app = typer.Typer(
    help="Create, list or revoke API keys. Without keys, the server listens on this machine only "
    "and requires no key.",
    no_args_is_help=True,
)


@keys_app.command()
@with_settings("key_file", "home")
def add(
    settings: Settings,
    *,
    tenant: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="the owner of the key, its agents and their KV cache. The default tenant owns "
            "what was created without keys",
        ),
    ] = LOCAL_TENANT,
    admin: Annotated[
        bool,
        typer.Option("--admin", help="allow /admin, /v1/cache and /metrics too"),
    ] = False,
    note: Annotated[
        str, typer.Option(metavar="TEXT", help="purpose of the key, shown by `semantic keys ls`")
    ] = "",
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="a limit of this key: requests_per_minute or tokens_per_minute. May be repeated",
        ),
    ] = None,
    tenant_limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="a limit of the tenant: weight, disk_quota_mb, max_concurrent, max_connections; "
            "of each of its keys: key.requests_per_minute, key.tokens_per_minute; of each of its "
            "agents: agent.requests_per_minute, agent.tokens_per_minute. May be repeated",
        ),
    ] = None,
) -> Answer:
    """Create a key and print it, once: only its hash is stored.

    A running server reads the key file again on SIGHUP.
    """
    made: list[tuple[KeyEntry, str]] = []

    def add_to(file: KeyFile) -> KeyFile:
        rate = _read_limits(RateEntry(), limit) if limit else None
        limits = _read_limits(file.tenants.get(tenant, TenantEntry()), tenant_limit or ())
        file, key, secret = file.with_key(tenant, limits, is_admin=admin, note=note, rate=rate)
        made.append((key, secret))
        return file

    edit_key_file(settings.effective_key_file, add_to)
    ((key, secret),) = made
    kind = "an admin key" if key.admin else "a key"
    return Answer(
        {"id": key.id, "key": secret, "tenant": key.tenant, "admin": key.admin},
        secret,
        note=f"{key.id}: {kind} of tenant {key.tenant}, shown this once. {_RELOAD}",
    )


@keys_app.command("ls")
@keys_app.command("list", hidden=True)
@with_settings("key_file", "home")
def list_keys(settings: Settings) -> Answer:
    """List keys, and the limits of tenants (also: `list`)."""
    file = read_key_file(settings.effective_key_file)
    lines = [] if file.keys else ["no keys; `semantic keys add` creates one"]
    for key in file.keys:
        kind, state = "admin" if key.admin else "user", "revoked" if key.revoked else "valid"
        rate = _limits_text(key.rate) if key.rate else ""
        line = f"{key.id}  {key.tenant:<16}  {kind:<5}  {key.created:%Y-%m-%d}  {state:<7}  "
        lines.append(f"{line}{rate}  {key.note}".rstrip())
    for name, tenant in file.tenants.items():
        lines.append(f"tenant {name}: {_limits_text(tenant) or 'no limits'}")
    lines.append(f"all keys together: {_limits_text(file.limits) or 'no limits'}")
    found = file.model_dump(mode="json", exclude={"keys": {"__all__": {"hash"}}})
    return Answer(found, "\n".join(lines))


@keys_app.command()
@with_settings("key_file", "home")
def revoke(
    settings: Settings,
    *,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="as `semantic keys ls` shows it")],
) -> Answer:
    """Revoke a key; the agents and KV cache of its tenant stay.

    To replace a key, add one for the same tenant and revoke the old one. A running server reads the
    key file again on SIGHUP.
    """
    edit_key_file(settings.effective_key_file, lambda file: file.without_key(key_id))
    return Answer({"id": key_id, "revoked": True}, note=f"{key_id} is revoked. {_RELOAD}")


def _read_limits(entry: _Limits, given: Sequence[str]) -> _Limits:
    """Return the limits with those given as NAME=N replaced."""
    values = entry.model_dump()
    for text in given:
        name, _, number = text.partition("=")
        *group, last = name.split(".")
        inner = values[group[0]] if group and isinstance(values.get(group[0]), dict) else values
        inner[last] = number
    try:
        return type(entry).model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise InvalidRequestError(f"limit {name}: {plain_reason(problem)}", param=name) from error


def _limits_text(entry: RateEntry | TenantEntry) -> str:
    values = entry.model_dump(exclude_defaults=True)
    flat = {
        f"{name}.{inner}" if inner else name: number
        for name, value in values.items()
        for inner, number in (value.items() if isinstance(value, dict) else [("", value)])
    }
    return ", ".join(f"{name}={number:g}" for name, number in flat.items())
