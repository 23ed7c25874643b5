"""`semantic models`, `ps` and `stop`: recommend, download, show, swap, unload and delete models."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from semantic.adapters.config.settings import STARTER_MODEL, Settings
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.domain.model_names import Suggestion
from semantic.entrypoints.cli.client import Json, ServerClient, ServerError
from semantic.entrypoints.cli.flags import (
    Answer,
    Yes,
    require_confirmation,
    with_server,
    with_settings,
)
from semantic.entrypoints.cli.screen import Spinner, size, table
from semantic.ports.models import ModelEntry

if TYPE_CHECKING:
    from semantic.adapters.outbound.models.catalogue import ModelCatalogue

models_app = typer.Typer(
    help="Recommend, download, list, swap and delete models.",
    no_args_is_help=True,
)
_STARTER = "starter"
_ModelOfMachine = Annotated[str, typer.Argument(metavar="MODEL", help="a name from `models ls`")]
_Drain = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="how long running replies may take")
]
_STATES = {"loaded": "green", "ready": "green", "loading": "yellow", "failed": "red"}


@models_app.command("ls")
@models_app.command("list", hidden=True)
@with_server
def list_models(client: ServerClient) -> Answer:
    """List the models that a server serves or has on its machine (also: `list`)."""
    models = client.call("GET", "/v1/models")["data"]
    made = table("model", "state", "family", ">size", ">context", "")
    for model in models:
        state = str(model["state"])
        context = model.get("max_context")
        made.add_row(
            model["id"],
            Text(state.replace("_", " "), _STATES.get(state, "")),
            model.get("family") or "",
            size(model["size_bytes"]) if model.get("size_bytes") else "",
            f"{context:,}" if context else "",
            "" if model.get("fits", True) is not False else "does not fit",
        )
    return Answer(models, made)


@models_app.command()
@with_server
def swap(
    client: ServerClient,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="a name from `ls`, an alias, a path, a Hugging Face id"
        ),
    ],
    *,
    drain: _Drain = None,
) -> Answer:
    """Serve another model without a restart; downloads it if necessary."""
    body: Json = {"model": model, "wait": False}
    if drain is not None:
        body["drain_timeout_s"] = drain
    with Spinner(f"swapping to {model}") as status:
        with contextlib.closing(client.events("GET", "/v1/events")) as events:
            next(events)  # wait until subscribed, so that no event is missed
            answer = client.call("POST", "/admin/models/swap", json=body)
            if answer["status"] == "accepted":
                _follow(events, status)
        found = client.call("GET", "/admin/models")["models"][0]
    return Answer(found, f"{found['id']}: {found['state']}")


def _follow(events: Iterator[Json], status: Spinner) -> None:
    """Show the steps of a swap until it ends.

    Raises:
        ServerError: the swap failed; the server serves the previous model again.
    """
    for event in events:
        match event["type"]:
            case "model.failed":
                raise ServerError(event["detail"])
            case "model.ready":
                return
            case str(kind) if kind.startswith("model."):
                status.show(event.get("detail") or kind)


@models_app.command()
@with_settings("home", "backend", "device")
def recommend(settings: Settings) -> Answer:
    """Recommend models for this machine's memory and speed; needs no network and no server."""
    with Spinner("measuring this machine"):
        found = _catalogue(settings).suggestions()
    best = next((one.model.name for one in found if one.is_best), None)
    advice = "No model of this table that knows tools fits and is fast enough."
    if best:
        advice = f"Best: semantic models pull {best}; then semantic serve --model {best}."
    value = [{**asdict(one.model), **_judgement(one)} for one in found]
    note = (
        f"{advice}\nMemory holds the weights in four bits and a conversation of 16,384 tokens. "
        "Speeds are estimated from the measured memory bandwidth."
    )
    return Answer(value, _recommended(found), note)


def _judgement(one: Suggestion) -> dict[str, Any]:
    return {"fits": one.fits, "is_best": one.is_best, "tokens_per_s": one.tokens_per_s}


def _recommended(found: Sequence[Suggestion]) -> Table:
    numbers = (">download", ">memory", ">context", ">tokens/s")
    made = table("model", *numbers, "tools", "licence", "")
    for one in found:
        model, speed = one.model, one.tokens_per_s
        made.add_row(
            Text(model.name, "bold green" if one.is_best else "" if one.fits else "dim"),
            size(model.num_bytes),
            size(model.memory_bytes),
            f"{model.max_context // 1024}k",
            f"{speed:.2g}" if speed and speed < 100 else f"{speed:.0f}" if speed else "",
            "yes" if model.has_tools else "no",
            model.licence,
            "best" if one.is_best else "" if one.fits else "too large",
        )
    return made


@models_app.command()
@with_settings("home", "backend", "device")
def pull(
    settings: Settings,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="a short name, a Hugging Face id, a GGUF file"),
    ],
    *,
    full: Annotated[
        bool, typer.Option("--full", help="download the unquantised version of a short name")
    ] = False,
) -> Answer:
    """Download or convert a model now, so that a later start or swap is faster.

    A download needs no server. It says first how much disk it takes, continues where an earlier one
    stopped, and compares every file with its checksum.
    """
    from semantic.adapters.outbound.models.known import short_names
    from semantic.adapters.outbound.models.source import LocalModelSource

    source = LocalModelSource(settings.home_dir / "models", STARTER_MODEL)
    name = {_STARTER: STARTER_MODEL, **short_names(is_four_bit=not full)}.get(model, model)
    with Spinner(f"looking for {name}") as status:
        directory = source.resolve(name, status.show)
    nbytes = sum(f.stat().st_size for f in directory.iterdir())
    found = {"model": name, "directory": str(directory), "bytes": nbytes}
    return Answer(found, f"{directory}: {size(nbytes)}")


@models_app.command()
@with_settings("home", "backend", "device")
def show(settings: Settings, model: _ModelOfMachine) -> Answer:
    """Show what is known of a model on this machine; needs no server."""
    catalogue = _catalogue(settings)
    entry = _find(catalogue, model)
    told = catalogue.facts(entry)
    facts = {
        "name": entry.id,
        "source": entry.source,
        "family": told.architecture or entry.family,
        "parameters": told.num_parameters,
        "format": told.file_format,
        "weights": told.precision,
        "size_bytes": entry.num_bytes,
        "fits": entry.fits,
        "context": told.max_context,
        "layers": told.num_layers,
        "tools": "tools" in told.template if told.template else None,
        "images": told.accepts_images if told.architecture else None,
    }
    made = table("", "~")
    for name, value in facts.items():
        made.add_row(name.removesuffix("_bytes"), _shown(name, value))
    hint = f"Import the file to see the rest: semantic models pull {entry.source}"
    return Answer(facts, made, "" if told.architecture else hint)


def _shown(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not value:
        return "unknown"  # of a GGUF file before its import
    if isinstance(value, int):
        return size(value) if name == "size_bytes" else f"{value:,}"
    return str(value)


@models_app.command()
@with_settings("home", "backend", "device")
def rm(settings: Settings, model: _ModelOfMachine, *, yes: Yes = False) -> Answer:
    """Delete a model that this server downloaded or converted; agents and their KV cache stay."""
    catalogue = _catalogue(settings)
    entry = _find(catalogue, model)
    require_confirmation(f"delete {entry.id} ({size(entry.num_bytes)})?", is_given=yes)
    freed = catalogue.remove(entry)
    return Answer({"model": entry.id, "freed_bytes": freed}, f"deleted {entry.id}: {size(freed)}")


@with_server
def ps(client: ServerClient) -> Answer:
    """Show the loaded model, how it is computed, its memory, and the requests that run."""
    health, cache = client.call("GET", "/health"), client.call("GET", "/v1/cache")
    compute = health["compute"] or {}
    made = table("model", "state", "~computed", ">KV cache", ">requests")
    computed = ", ".join(str(compute[name]) for name in ("dtype", "device", "kernels") if compute)
    memory = cache["memory"]
    made.add_row(
        health["model"],
        Text(health["state"], _STATES.get(health["state"], "")),
        computed,
        f"{size(memory['used'])} of {size(memory['budget'])}",
        str(cache["live_requests"]),
    )
    return Answer({"health": health, "cache": cache}, made)


@with_server
def stop(
    client: ServerClient,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="default: the loaded model")
    ] = None,
    *,
    drain: _Drain = None,
) -> Answer:
    """Unload the model and free its memory; the server keeps running.

    The next request loads the model again. Agents and their KV cache stay.
    """
    health = client.call("GET", "/health")
    if health["state"] == "unloaded":
        raise InvalidRequestError("no model is loaded")
    if model and client.call("GET", f"/v1/models/{quote(model)}")["id"] != health["model"]:
        raise InvalidRequestError(f"{model} is not loaded; {health['model']} is")
    body = {} if drain is None else {"drain_timeout_s": drain}
    with Spinner(f"unloading {health['model']}"):
        done = client.call("POST", "/admin/models/unload", json=body)
    return Answer(done, f"unloaded {health['model']}; the next request loads it again")


def _catalogue(settings: Settings) -> "ModelCatalogue":
    from semantic.entrypoints.loading import choose_backend, local_models

    return local_models(settings, choose_backend(settings))


def _find(catalogue: "ModelCatalogue", name: str) -> ModelEntry:
    for entry in catalogue.entries():
        if name in (entry.id, entry.source):
            return entry
    here = ", ".join(entry.id for entry in catalogue.entries())
    raise ModelNotFoundError(f"there is no model {name!r} on this machine; there are: {here}.")
