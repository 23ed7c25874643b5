"""Runs a model over the chunks of a step: all in one call, or each sequence in a call of its own.

One call is faster. It needs a model whose only memory is the keys and values of plain attention,
and whose modules call the attention interface of transformers. All others run with the library's
own cache objects: recurrent layers, latent caches, indexers, chunked attention, older models. At
load, each way is compared with the library's own forward over a few tokens.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import structlog
import torch
from torch import nn

from semantic.adapters.outbound.backends.sampler import Logits
from semantic.adapters.outbound.backends.torch.attention import ATTENTION_NAME, packed_attention
from semantic.adapters.outbound.backends.torch.grouped import GroupedLinear
from semantic.adapters.outbound.backends.torch.kv.geometry import Geometry, read_geometry
from semantic.adapters.outbound.backends.torch.kv.library_cache import (
    SequenceCaches,
    new_library_cache,
)
from semantic.adapters.outbound.backends.torch.kv.sequences import (
    ChunkSpan,
    KVLayout,
    TorchSequence,
)
from semantic.adapters.outbound.backends.torch.vision.merging import (
    deep_features,
    merged_embeddings,
    row_ids,
    row_positions,
)
from semantic.domain.errors import BackendError
from semantic.domain.spec import LayerSpec
from semantic.ports.backend import Chunk, SequenceId

_PROBE_NAME = "semantic_probe"
_PROBE = (3, 1, 4, 1, 5, 2, 6)  # token ids of every vocabulary
_CUTS = (4, 5, 7)  # where the probe is divided
# Largest difference of log-probabilities, relative to their spread; results of other tokens differ
# by more than 1. Rounding in dtypes of 16 bits adds up to far more than in float32.
_MAX_DIFFERENCE, _MAX_DIFFERENCE_16_BITS = 2e-3, 0.25
_MAX_ROUNDING = 2e-5  # of float32, in the same measure
# What transformers and PyTorch raise for a model that they cannot run in some way.
LIBRARY_ERRORS = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError),
    *(ImportError, NotImplementedError, AssertionError),
)

_log = structlog.get_logger()


class UnsupportedModelError(Exception):
    """The model's results would be wrong; the message says why."""


class PackedForward:
    """Runs all chunks in one call, packed into one row; see `attention`.

    Attributes:
        keeps_hidden: Whether steps keep the last hidden states, for a head that drafts tokens.
    """

    def __init__(self, model: Any, order: Sequence[int] | None = None) -> None:
        self._model, self._order = model, order
        self.keeps_hidden = False

    def step(self, spans: Sequence[ChunkSpan], last: Sequence[int]) -> Logits:
        """Return the logits after the tokens at the places `last` of the row."""
        with torch.inference_mode():
            if self.keeps_hidden:
                hidden = self._model.base_model(**self._inputs(spans)).last_hidden_state[0]
                for span in spans:
                    span.hidden = hidden[span.place]
                return _logits(self._model, hidden[[*last]])
            output = self._model(**self._inputs(spans), logits_to_keep=torch.tensor([*last]))
            logits: Logits = output.logits[0].float().cpu().numpy()
        return logits

    def hidden(self, span: ChunkSpan) -> torch.Tensor:
        """Return the last hidden state of each token."""
        output = self._model.base_model(**self._inputs([span]))
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _inputs(self, spans: Sequence[ChunkSpan]) -> dict[str, Any]:
        for span in spans:
            span.make_views(self._order)
        inputs: dict[str, Any] = {
            "position_ids": row_positions(spans),
            "use_cache": False,
            "spans": spans,
        }
        if all(span.features is None for span in spans):
            return {**inputs, "input_ids": row_ids(spans)}
        embed = self._model.base_model.embed_tokens
        inputs["inputs_embeds"] = merged_embeddings(spans, embed)
        deep = deep_features(spans)
        return inputs if deep is None else {**inputs, "deep": deep}


class LibraryForward:
    """Runs each chunk in a call of its own, with the library's cache over the buffers.

    Attributes:
        caches: The library's caches, which hold recurrent states.
        is_stepwise: Whether later chunks run token by token, because the model extends its cache
            correctly by one token only.
        can_draft: Whether draft tokens get the same logits in one pass as one after another.
        keeps_hidden: As of `PackedForward`.
    """

    def __init__(self, model: Any, caches: SequenceCaches, order: Sequence[int]) -> None:
        self._model, self._order = model, order
        self.caches, self.is_stepwise, self.keeps_hidden = caches, False, False
        self.can_draft = False
        self._limited = [m for m in model.modules() if hasattr(m, "time_step_limit")]

    def step(self, spans: Sequence[ChunkSpan], last: Sequence[int]) -> Logits:
        """Return the logits after the tokens at the places `last`, which are each span's last."""
        rows: list[Logits] = []
        for span in spans:
            num_kept = sum(span.offset <= place < span.place.stop for place in last)
            with torch.inference_mode():
                if self.keeps_hidden:
                    span.hidden = self._run(span, run_base)
                    rows.append(_logits(self._model, span.hidden[-num_kept:]))
                    continue
                logits = self._run(span, partial(run_model, num_kept=num_kept))
                rows.append(logits[-num_kept:].float().cpu().numpy())
        return np.concatenate(rows)

    def hidden(self, span: ChunkSpan) -> torch.Tensor:
        """Return the last hidden state of each token."""
        return self._run(span, run_base)

    def _run(
        self, span: ChunkSpan, run: Callable[[Any, torch.Tensor, Any, int], torch.Tensor]
    ) -> torch.Tensor:
        sequence, start = span.sequence, span.sequence.length
        size = 1 if self.is_stepwise and start else len(span.tokens)
        outputs = []
        try:
            for first in range(0, len(span.tokens), size):
                sequence.length = start + first
                piece = ChunkSpan(span.chunk, sequence, span.tokens[first : first + size], 0)
                piece.make_views(self._order)
                tokens = torch.tensor([piece.tokens])
                cache = self.caches.begin(piece)
                with self._as_single_tokens(span):
                    outputs.append(run(self._model, tokens, cache, sequence.length))
        finally:
            sequence.length = start
            self.caches.release(sequence)
        return torch.cat(outputs)

    @contextmanager
    def _as_single_tokens(self, span: ChunkSpan) -> Iterator[None]:
        """Compute draft tokens as the library computes single ones: without limits of time steps.

        Nemotron-H and Zamba 2 limit them in passes of several tokens only.
        """
        limits = [module.time_step_limit for module in self._limited]
        for module in self._limited if span.chunk.draft else ():
            module.time_step_limit = (0.0, math.inf)
        try:
            yield
        finally:
            for module, limit in zip(self._limited, limits, strict=True):
                module.time_step_limit = limit


Forward: TypeAlias = PackedForward | LibraryForward


def _logits(model: Any, hidden: torch.Tensor) -> Logits:
    logits: Logits = model.get_output_embeddings()(hidden).float().cpu().numpy()
    return logits


def run_model(
    model: Any, tokens: torch.Tensor, cache: Any, start: int, num_kept: int = 0
) -> torch.Tensor:
    """Run the library's forward over tokens that follow a cache; returns their logits.

    Args:
        start: The number of tokens in the cache.
        num_kept: Only so many last tokens need logits; 0: all.
    """
    arguments = _arguments(model, tokens, cache, start)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = num_kept
    logits: torch.Tensor = model(tokens, **arguments).logits[0]
    return logits


def run_base(model: Any, tokens: torch.Tensor, cache: Any, start: int) -> torch.Tensor:
    """Run the model without its head; returns the last hidden states."""
    base = model.base_model
    output = base(tokens, **_arguments(base, tokens, cache, start))
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def _arguments(model: Any, tokens: torch.Tensor, cache: Any, start: int) -> dict[str, Any]:
    """Return what `generate` would pass beside the tokens; not all models count the cached ones."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in parameters else "past_key_values"
    arguments = {name: cache, "use_cache": True}
    if "position_ids" in parameters:
        positions = torch.arange(start, start + tokens.shape[1])
        arguments["position_ids"] = positions[None]
    return arguments


# -- choosing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChosenForward:
    """How to run a model, and what it keeps for a sequence."""

    forward: Forward
    geometry: Geometry
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Probe:
    """The library's own results for a few tokens.

    Attributes:
        cache: The library's cache after them.
        expected: Their log-probabilities.
    """

    model: Any
    dtype: torch.dtype
    cache: Any
    expected: torch.Tensor
    geometry: Geometry
    layout: KVLayout

    def agrees(self, found: Logits, last: Sequence[int]) -> bool:
        expected = self.expected[[*last]]
        difference = torch.from_numpy(found).log_softmax(dim=-1) - expected
        limit = _MAX_DIFFERENCE if self.dtype == torch.float32 else _MAX_DIFFERENCE_16_BITS
        return bool(difference.norm() <= limit * (expected - expected.mean()).norm())

    def sequence(self) -> TorchSequence:
        buffers = self.layout.allocate(len(_PROBE), self.dtype)
        return TorchSequence([*_PROBE], buffers=buffers)


def choose_forward(model: Any, dtype: torch.dtype) -> ChosenForward:
    """Choose how to run a model, and read what it keeps for a sequence.

    Args:
        dtype: Of keys and values.

    Raises:
        UnsupportedModelError: neither way gives the library's results.
        UnknownCacheError: its cache cannot be saved and restored.
    """
    probe = _probe(model, dtype)
    packed = _try_packed(probe) if _may_pack(probe) else None
    return ChosenForward(packed or _alone(probe), probe.geometry, probe.expected.shape[-1])


def _probe(model: Any, dtype: torch.dtype) -> _Probe:
    if not model._supports_default_dynamic_cache():
        raise UnsupportedModelError("it does not use the cache interface of transformers")
    cache = new_library_cache(model)
    with torch.inference_mode():
        logits = run_model(model, torch.tensor([_PROBE]), cache, 0)
    expected = logits.float().log_softmax(dim=-1).cpu()
    idle = getattr(model.config.get_text_config(), "cross_attention_layers", None) or ()
    geometry = read_geometry(cache, len(_PROBE), dtype, idle)
    return _Probe(model, dtype, cache, expected, geometry, KVLayout(geometry.layers))


def _may_pack(probe: _Probe) -> bool:
    parameters = inspect.signature(probe.model.forward).parameters
    takes_inputs = {"position_ids", "logits_to_keep"} <= parameters.keys()
    types = set(getattr(probe.model.config.get_text_config(), "layer_types", None) or ())
    return probe.geometry.is_plain and takes_inputs and "chunked_attention" not in types


def _try_packed(probe: _Probe) -> PackedForward | None:
    """Return the packed forward if its results are the library's."""
    model, before = probe.model, probe.model.config._attn_implementation
    try:
        order = _packed_order(probe)
        _set_attention(model, ATTENTION_NAME, packed_attention)
        forward = PackedForward(model, order)
        if _is_packed_right(probe, forward):
            return forward
        reason = "the results differ"
    except (UnsupportedModelError, BackendError, *LIBRARY_ERRORS) as error:
        reason = str(error)
    _log.info("packed attention not used; each sequence runs alone", reason=reason)
    model.set_attn_implementation(before)
    return None


def _packed_order(probe: _Probe) -> tuple[int, ...] | None:
    """Let each attention module tell its window, and whose keys it uses; returns the views' order.

    Raises:
        UnsupportedModelError: a module does not use the attention interface, or has another window
            than its cache.
    """
    calls: dict[int, tuple[int, torch.Tensor]] = {}

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **o: Any
    ) -> tuple[torch.Tensor, None]:
        calls[module.layer_idx] = (o.get("sliding_window") or 0, key)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    _set_attention(probe.model, _PROBE_NAME, attention)
    tokens = torch.tensor([_PROBE[:1]])
    with torch.inference_mode():
        probe.model(tokens, position_ids=torch.zeros_like(tokens), use_cache=False)
    layers, places = probe.geometry.layers, probe.layout.order
    if calls.keys() != set(range(len(calls))) or len(calls) < len(layers):
        raise UnsupportedModelError("some layers do not use the attention interface")
    order = []
    for layer in range(len(calls)):
        window, key = calls[layer]
        # Later layers may use the keys and values of an earlier one, which alone has a cache.
        own = layer if layer < len(layers) else _owner(calls, key, len(layers))
        if layers[own].window != window:
            raise UnsupportedModelError(f"the window of layer {layer} differs from its cache's")
        order.append(places[own])
    return None if order == [*range(len(order))] else tuple(order)


def _owner(calls: dict[int, tuple[int, torch.Tensor]], key: torch.Tensor, num_caches: int) -> int:
    for layer in range(num_caches):
        if calls[layer][1] is key:
            return layer
    raise UnsupportedModelError("a layer without a cache has its own keys")


def _set_attention(model: Any, name: str, function: Callable[..., Any]) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise UnsupportedModelError("its attention cannot be replaced")


def _is_packed_right(probe: _Probe, forward: PackedForward) -> bool:
    whole, divided = probe.sequence(), probe.sequence()
    cut, end = _CUTS[0], len(_PROBE)
    spans = [_span(whole, end), _span(divided, cut, offset=end)]
    found = forward.step(spans, [end - 1, end + cut - 1])
    if not probe.agrees(found, [end - 1, cut - 1]):
        return False
    divided.length = cut
    return probe.agrees(forward.step([_span(divided, end)], [end - cut - 1]), [end - 1])


def _alone(probe: _Probe) -> LibraryForward:
    caches = SequenceCaches(probe.model, probe.geometry, probe.cache)
    forward = LibraryForward(probe.model, caches, probe.layout.order)
    if not _is_alone_right(probe, forward):
        forward.is_stepwise = True
        if not _is_alone_right(probe, forward):
            raise UnsupportedModelError(
                "a prompt in parts gives other results than the whole prompt, so it is not causal, "
                "or keeps state outside its cache"
            )
    forward.can_draft = not forward.is_stepwise and _is_draft_right(probe, forward)
    return forward


def _is_draft_right(probe: _Probe, forward: LibraryForward) -> bool:
    """Compare more closely than `agrees`: some recurrent layers compute one token in another way.

    A difference beyond rounding would change replies.
    """
    first, end = _CUTS[0], len(_PROBE)
    found: list[torch.Tensor] = []
    for size in (1, end - first):
        sequence, rows = probe.sequence(), list[Logits]()
        forward.step([_span(sequence, first)], [first - 1])
        for start in range(first, end, size):
            sequence.length = start
            span = draft_span(sequence, _PROBE[start : start + size])
            rows.append(forward.step([span], range(size)))
        found.append(torch.from_numpy(np.concatenate(rows)).log_softmax(dim=-1))
    single, together = found
    limit = _MAX_ROUNDING if probe.dtype == torch.float32 else _MAX_DIFFERENCE_16_BITS
    if any(isinstance(module, GroupedLinear) for module in probe.model.modules()):
        limit = max(limit, _MAX_DIFFERENCE)  # these round activations to 16 bits
    return bool((together - single).norm() <= limit * (single - single.mean()).norm())


def _is_alone_right(probe: _Probe, forward: LibraryForward) -> bool:
    sequence, found = probe.sequence(), []
    for cut in _CUTS:
        # Another sequence in between would disturb state that the model keeps outside its cache.
        forward.step([_span(probe.sequence(), 2)], [1])
        num_tokens = cut - sequence.length
        found.append(forward.step([_span(sequence, cut)], [num_tokens - 1]))
        sequence.length = cut
    return probe.agrees(np.concatenate(found), [cut - 1 for cut in _CUTS])


def run_one_token(forward: Forward, layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
    """Run a token on a CPU; raises what the library raises if the model does not run."""
    buffers = KVLayout(layers).allocate(1, dtype)
    forward.step([_span(TorchSequence([*_PROBE], buffers=buffers), 1)], [0])


def _span(sequence: TorchSequence, end: int, offset: int = 0) -> ChunkSpan:
    tokens = _PROBE[sequence.length : end]
    chunk = Chunk(SequenceId(0), sequence.length, tokens)
    return ChunkSpan(chunk, sequence, tokens, offset)


def draft_span(sequence: TorchSequence, tokens: tuple[int, ...]) -> ChunkSpan:
    """Return a span of a token and draft tokens after it."""
    chunk = Chunk(SequenceId(0), sequence.length, tokens[:1], draft=tokens[1:])
    return ChunkSpan(chunk, sequence, tokens, 0)


def bypass_hooks(model: nn.Module) -> None:
    """Give each module a class whose call is its `forward`, without torch's hook machinery.

    With one row an operation takes microseconds, and calling its module takes as long; a decode
    step makes several hundred of these calls. The computation does not change.
    """
    for module in model.modules():
        # As plain attributes, children are found without a search of parameters and buffers.
        vars(module).update(module.named_children())
        module.__class__ = _direct(type(module))  # type: ignore[arg-type]  # a class is hashable


class _Direct:
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


@cache
def _direct(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Direct, kind), {"__module__": kind.__module__})
