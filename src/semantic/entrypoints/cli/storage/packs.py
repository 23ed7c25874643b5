"""`semantic pack`: the KV cache of a client's system prompt and tools as a file, to pass on."""

import functools
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from semantic.adapters.config.settings import Settings
from semantic.domain.agents import check_agent_id
from semantic.entrypoints.cli.agents import download_file
from semantic.entrypoints.cli.client import Json, ServerClient, file_pieces
from semantic.entrypoints.cli.flags import (
    Answer,
    Yes,
    require_confirmation,
    with_server,
    with_settings,
)
from semantic.entrypoints.cli.screen import age, size, table, transfer_progress
from semantic.ports.packs import PackHead

if TYPE_CHECKING:
    from semantic.adapters.outbound.blocks.pack_keys import PackKeys

packs_app = typer.Typer(
    help="Make and add cache packs: the KV cache of a client's system prompt and tools as a signed "
    "file for one model. It has nothing of a conversation.",
    no_args_is_help=True,
)


def _checked(value: str) -> str:
    """Refuse invalid names, which could change the path of a request."""
    check_agent_id(value, "NAME", "a pack's name")
    return value


NameArgument = functools.partial(typer.Argument, metavar="NAME", callback=_checked)
PackName = Annotated[str, NameArgument(help="the pack's name")]
File = Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False)]
Tenants = Annotated[
    list[str] | None,
    typer.Option("--tenant", metavar="TENANT", help="not the key's own tenant. May be repeated"),
]


@packs_app.command()
@with_server
def make(
    client: ServerClient,
    name: PackName,
    *,
    agent: Annotated[
        str,
        typer.Option(metavar="AGENT", help="an agent of the client", callback=_checked),
    ],
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="default: NAME.pack")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> Answer:
    """Write the system prompt and tools of an agent, with their KV cache, into one file.

    The file ends before the first user message. Read it before you pass it on: `semantic pack show
    --text FILE`. A system prompt may contain paths and other details of this machine.
    """
    target = file or Path(f"{name}.pack")
    path = f"/v1/agents/{agent}/pack?name={name}"
    nbytes = download_file(client, path, target, f"making {name}", force=force)
    written = {"pack": name, "agent": agent, "file": str(target), "bytes": nbytes}
    return Answer(written, f"{target}: {size(nbytes)}")


@packs_app.command()
@with_server
def add(
    client: ServerClient,
    file: File,
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="another name for the pack")
    ] = None,
    tenant: Tenants = None,
    sample: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, metavar="SHARE", help="share of the blocks to compute again"
        ),
    ] = 0.1,
) -> Answer:
    """Add a pack for all agents of a tenant.

    A trusted key must have signed it (`semantic pack trust`). The server computes random blocks
    again, at least four, and compares them before it uses any.
    """
    query: Json = {"sample": sample, "tenant": tenant or []}
    if name:
        query["name"] = _checked(name)
    with transfer_progress() as progress:
        pieces = progress.track(
            file_pieces(file), total=-(-file.stat().st_size // 2**20), description="adding"
        )
        added = client.call("POST", "/admin/packs", content=iter(pieces), params=query)
    lines = [
        f"{pack['name']}: {pack['tokens']:,} tokens for all agents of {pack['tenant']}"
        for pack in added["data"]
    ]
    signer = added["data"][0]["signer"]
    checked = f"signed by {signer}; computed {added['checked_blocks']} blocks again: they agree"
    return Answer(added, "\n".join([*lines, checked]))


@packs_app.command("ls")
@with_server
def list_packs(client: ServerClient, *, tenant: Tenants = None) -> Answer:
    """List the packs that were added."""
    packs = client.call("GET", "/admin/packs", params={"tenant": tenant or []})["data"]
    made = table("name", "tenant", "model", "tokens", "size", "signer", "added", "usable")
    for pack in packs:
        made.add_row(
            pack["name"],
            pack["tenant"],
            pack["model"],
            f"{pack['tokens']:,}",
            size(pack["bytes"]),
            pack["signer"],
            f"{age(pack['created_at'])} ago",
            "yes" if pack["usable"] else "not by the loaded model",
        )
    return Answer(packs, made if packs else "no packs; `semantic pack add FILE` adds one")


packs_app.command("list", hidden=True)(list_packs)


@packs_app.command()
@with_settings("home")
def show(
    settings: Settings,
    file: File,
    *,
    text: Annotated[
        bool, typer.Option("--text", help="also print the whole text that the pack contains")
    ] = False,
) -> Answer:
    """Verify a pack's file and show what it contains, without a server."""
    from semantic.adapters.outbound.blocks.format import KVCodec
    from semantic.adapters.outbound.blocks.pack_archive import PackFile

    archive = PackFile(KVCodec(), _keys(settings))
    signer = archive.check(file_pieces(file))
    head = next(archive.read(file_pieces(file), has_parts=False))
    assert isinstance(head, PackHead)  # noqa: S101 - the layout of the file says so
    made_at = datetime.fromtimestamp(head.created_at, UTC)
    facts = {
        "name": head.name,
        "model": head.model,
        "weights": head.fingerprint,
        "KV cache": f"{head.abi}, {head.kv_format}",
        "tokens": f"{head.num_tokens:,}",
        "size": size(file.stat().st_size),
        "made": f"{made_at:%Y-%m-%d %H:%M} UTC",
        "key": signer.key,
        "signer": signer.name or "not trusted; `semantic pack trust NAME KEY` trusts the key",
    }
    made = table("", "~")
    for name, value in facts.items():
        made.add_row(Text(name, "dim"), value)
    found = {
        "name": head.name,
        "model": head.model,
        "fingerprint": head.fingerprint,
        "abi": head.abi,
        "kv_format": head.kv_format,
        "tokens": head.num_tokens,
        "created_at": head.created_at,
        "key": signer.key,
        "signer": signer.name or None,
        "text": head.text,
    }
    return Answer(found, Group(made, Text(f"\n{head.text}")) if text else made)


@packs_app.command("rm")
@with_server
def remove(
    client: ServerClient, name: PackName, *, tenant: Tenants = None, yes: Yes = False
) -> Answer:
    """Remove a pack and its blocks, except those that conversations are built on."""
    require_confirmation(f"remove the pack {name}?", is_given=yes)
    client.call("DELETE", f"/admin/packs/{name}", params={"tenant": tenant or []})
    return Answer({"removed": name}, f"removed {name}")


# -- keys ------------------------------------------------------------------------------------------


def _keys(settings: Settings) -> "PackKeys":
    # Imported here so that --help responds at once.
    from semantic.adapters.outbound.blocks.pack_keys import PackKeys

    return PackKeys(*settings.pack_key_files)


@packs_app.command()
@with_settings("home")
def key(settings: Settings) -> Answer:
    """Print the public key that this installation signs packs with, and the keys that it trusts."""
    keys = _keys(settings)
    trusted = keys.trusted()
    lines = [keys.public, *(f"{known}  trusted as {name}" for name, known in trusted.items())]
    return Answer({"key": keys.public, "trusted": trusted}, "\n".join(lines))


@packs_app.command()
@with_settings("home")
def trust(
    settings: Settings,
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a name for the key's owner")],
    public_key: Annotated[
        str, typer.Argument(metavar="KEY", help="as the owner's `semantic pack key` prints it")
    ],
) -> Answer:
    """Accept packs that a key has signed, from now on; a running server needs no restart.

    Ask the owner for the key, not the sender of a file: with a trusted key, a forger can put false
    KV cache into packs, of which a check of random blocks finds only a part.
    """
    _keys(settings).trust(name, public_key)
    return Answer({"name": name, "key": public_key}, f"packs signed by {name} are accepted")


@packs_app.command()
@with_settings("home")
def untrust(
    settings: Settings,
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="as `semantic pack key` lists it")],
) -> Answer:
    """Accept no further packs of a key; those that were added stay until `semantic pack rm`."""
    _keys(settings).untrust(name)
    return Answer({"name": name}, f"packs signed by {name} are refused")
