"""Models as Anthropic's clients list them."""

from collections.abc import Sequence
from datetime import UTC, datetime

from semantic.ports.inbound import ModelStatus


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
