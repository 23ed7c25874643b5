"""`semantic models`: list, download and swap models."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from semantic.adapters.config.settings import STARTER_MODEL, Settings
from semantic.domain.model_names import SHORT_NAMES
from semantic.entrypoints.cli.client import Json, ServerClient, ServerError
from semantic.entrypoints.cli.flags import Answer, with_server, with_settings
from semantic.entrypoints.cli.screen import Spinner, size, table

models_app = typer.Typer(
    help="List, swap and download models.",
    no_args_is_help=True,
)
_STATES = {"loaded": "green", "ready": "green", "loading": "yellow", "failed": "red"}


@models_app.command("ls")
@with_server
def list_models(client: ServerClient) -> Answer:
    """List the models that a server serves or has on its machine."""
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
    drain: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="how long running replies may take")
    ] = None,
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
@with_settings("home")
def pull(
    settings: Settings,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="a short name, a Hugging Face id, a GGUF file"),
    ],
    *,
    mlx: Annotated[
        bool, typer.Option("--mlx", help="download the 4-bit MLX version of a short name")
    ] = False,
) -> Answer:
    """Download or convert a model now, so that a later start or swap is faster."""
    from semantic.adapters.outbound.models.source import LocalModelSource

    published, four_bit = SHORT_NAMES.get(model, (model, model))
    source = LocalModelSource(settings.home_dir / "models", STARTER_MODEL)
    name = STARTER_MODEL if model == "starter" else four_bit if mlx else published
    with Spinner(f"looking for {name}") as status:
        directory = source.resolve(name, status.show)
    nbytes = sum(f.stat().st_size for f in directory.iterdir())
    found = {"model": name, "directory": str(directory), "bytes": nbytes}
    return Answer(found, f"{directory}: {size(nbytes)}")
