"""Models as Anthropic's clients list them, and the names they may ask for."""

from collections.abc import Sequence
from datetime import UTC, datetime

from semantic.domain.errors import ModelNotFoundError
from semantic.ports.inbound import ModelStatus

# Clients made for Anthropic's models ask for them by name, in the background too.
_SERVED_PREFIX = "claude"


def served_model(name: str, models: Sequence[ModelStatus]) -> ModelStatus:
    """The model that serves a name: its own, or the current one for any of Anthropic's.

    Raises:
        ModelNotFoundError: it is neither.
    """
    for status in models:
        if status.id == name:
            return status
    if name.lower().startswith(_SERVED_PREFIX):
        return models[0]
    raise ModelNotFoundError(
        f"the model {name!r} is not served here; this server serves {models[0].id!r} "
        "and answers to every name that starts with 'claude'."
    )


def model_info(status: ModelStatus) -> dict[str, object]:
    """One model."""
    created = datetime.fromtimestamp(int(status.created_at), UTC)
    return {
        "type": "model",
        "id": status.id,
        "display_name": status.id,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": status.max_context or None,
        "max_tokens": status.max_context or None,
    }


def models_page(models: Sequence[ModelStatus]) -> dict[str, object]:
    """All of them, on one page."""
    return {
        "data": [model_info(status) for status in models],
        "has_more": False,
        "first_id": models[0].id,
        "last_id": models[-1].id,
    }
