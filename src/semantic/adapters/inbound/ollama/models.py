"""Models as Ollama describes them, from what their files say."""

import time
from contextlib import suppress
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from semantic.adapters.inbound.http.streaming import Json
from semantic.adapters.inbound.ollama.events import timestamp
from semantic.adapters.inbound.wire import Count
from semantic.application.models.registry import ModelRegistry
from semantic.application.prompt.fill_in import can_fill_in
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.domain.reply_format import detect_reply_format
from semantic.ports.inbound import ImageSupport, ModelState, ModelStatus
from semantic.ports.models import ModelFacts

_LOADED = (ModelState.READY, ModelState.SWAPPING)
_FOREVER_S = 100 * 365 * 24 * 3600.0  # Ollama, too, gives a date in a distant future


class _Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: Count
    embedding_length: Count


_Capability = Literal["completion", "tools", "thinking", "insert", "vision"]


class _Model(TypedDict):
    name: str
    model: str
    size: Count
    digest: str
    details: _Details


class ListedModel(_Model):
    """A model that requests may name."""

    modified_at: str
    capabilities: list[_Capability]


class LoadedModelView(_Model):
    """A loaded model; it is unloaded at `expires_at` unless it is used."""

    size_vram: Count
    expires_at: str
    context_length: Count


class ModelTags(TypedDict):
    """The response of `/api/tags`."""

    models: list[ListedModel]


class RunningModels(TypedDict):
    """The response of `/api/ps`."""

    models: list[LoadedModelView]


class ShownModel(TypedDict):
    """The response of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: _Details
    model_info: Json
    capabilities: list[_Capability]
    modified_at: str
    license: NotRequired[str]


class OllamaModels:
    """Finds and describes models. Reads the disk: do not call it on the event loop's thread."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def find(self, name: str) -> ModelStatus:
        """Return the model with this name, which is not case-sensitive; see `ModelNames` for tags.

        Raises:
            InvalidRequestError: there is no name.
            ModelNotFoundError: no model has this name. Clients compare the message.
        """
        if not name:
            raise InvalidRequestError("model is required", param="model")
        with suppress(ModelNotFoundError):
            return self._models.find(name)
        bare = name.lower().removesuffix(":latest")
        for status in self._models.models():
            if status.id.lower() == bare:
                return status
        raise ModelNotFoundError(f"model '{name}' not found")

    def can_think(self, model_id: str) -> bool:
        return "thinking" in _capabilities(self._models.facts(model_id))

    def tags(self) -> ModelTags:
        """List the models that requests may name: others only if requests may swap models."""
        found = self._models.models()
        if not self._models.policy.swap_on_request:
            found = found[:1]
        return {"models": [self._listed(status) for status in found]}

    def running(self) -> RunningModels:
        status = self._models.current()
        if status.state not in _LOADED:
            return {"models": []}
        left_s = self._models.unloads_in_s
        shown: LoadedModelView = {
            **self._named(status, self._models.facts(status.id)),
            "size_vram": status.num_bytes,
            "expires_at": timestamp(time.time() + (_FOREVER_S if left_s is None else left_s)),
            "context_length": status.max_context,
        }
        return {"models": [shown]}

    def show(self, name: str) -> ShownModel:
        status = self.find(name)
        facts = self._models.facts(status.id)
        context = status.max_context or facts.max_context
        return {
            "modelfile": f"FROM {status.id}\n",
            "parameters": f"num_ctx {context}",
            "template": facts.template,
            "details": _details(status, facts),
            "model_info": _model_info(status, facts, context),
            "capabilities": _capabilities(facts, status),
            "modified_at": timestamp(facts.modified_at or status.created_at),
        }

    def _listed(self, status: ModelStatus) -> ListedModel:
        facts = self._models.facts(status.id)
        return {
            **self._named(status, facts),
            "modified_at": timestamp(facts.modified_at or status.created_at),
            "capabilities": _capabilities(facts, status),
        }

    def _named(self, status: ModelStatus, facts: ModelFacts) -> _Model:
        return {
            "name": status.id,
            "model": status.id,
            "size": status.num_bytes,
            "digest": facts.digest,
            "details": _details(status, facts),
        }


def _family(status: ModelStatus, facts: ModelFacts) -> str:
    return facts.architecture or status.family or "unknown"


def _details(status: ModelStatus, facts: ModelFacts) -> _Details:
    family = _family(status, facts)
    return {
        "parent_model": "",
        "format": facts.file_format or "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _shortened(facts.num_parameters),
        "quantization_level": facts.precision or "unknown",
        "context_length": status.max_context or facts.max_context,
        "embedding_length": facts.hidden_size,
    }


def _model_info(status: ModelStatus, facts: ModelFacts, context: int) -> Json:
    """The metadata of a GGUF file; clients read the context's length from it."""
    family = _family(status, facts)
    return {
        "general.architecture": family,
        "general.basename": status.id,
        "general.parameter_count": facts.num_parameters,
        f"{family}.context_length": context,
        f"{family}.embedding_length": facts.hidden_size,
        f"{family}.block_count": facts.num_layers,
        f"{family}.attention.head_count": facts.num_heads,
        f"{family}.attention.head_count_kv": facts.num_kv_heads,
        f"{family}.vocab_size": facts.vocab_size,
    }


def _capabilities(facts: ModelFacts, status: ModelStatus | None = None) -> list[_Capability]:
    """What requests may ask for; for a model without tools of its own, the prompt explains them."""
    reply_format = detect_reply_format(facts.template, facts.special_tokens)
    found: list[_Capability] = ["completion", "tools"]
    if reply_format.thinking_markers is not None:
        found.append("thinking")
    if can_fill_in(facts.special_tokens):
        found.append("insert")
    images = None if status is None else status.images  # None if the model is not loaded
    if images is ImageSupport.VISION or (images is None and facts.accepts_images):
        found.append("vision")
    return found


def _shortened(number: int) -> str:
    """Format a number of parameters.

    Example:
        >>> _shortened(134_515_008), _shortened(8_030_261_248)
        ('134.52M', '8.0B')
    """
    if number >= 1e9:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.2f}M" if number else "unknown"
