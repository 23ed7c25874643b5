"""Runs Hugging Face causal language models with PyTorch.

The modelling code is that of transformers, or of `plain` for model families that run in C. Both
call `packed_attention`: all chunks of a step are packed into one row without padding, and the
function appends each sequence's keys and values to that sequence's buffers and attends within it
only.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog
import torch

from semantic.adapters.outbound import host_memory
from semantic.adapters.outbound.backends.common import (
    EagerBackend,
    PayloadTicket,
    StepTicket,
    make_rows,
    verify,
)
from semantic.adapters.outbound.backends.pinned import shared_memory
from semantic.adapters.outbound.backends.sampler import NOT_FINITE, Logits, sample
from semantic.adapters.outbound.backends.torch import loading as torch_loading
from semantic.adapters.outbound.backends.torch.attention import ChunkSpan, TorchSequence
from semantic.adapters.outbound.backends.torch.copies import DeviceCopies
from semantic.adapters.outbound.backends.torch.decoding import Decoder
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.threads import ThreadCount
from semantic.domain.errors import BackendError, CacheCorruptionError, InvalidRequestError
from semantic.domain.sampling import TokenLogprob
from semantic.domain.spec import LayerKind, ModelCacheSpec
from semantic.ports.backend import (
    Chunk,
    Computed,
    DeviceMemory,
    HostBuffer,
    KVPayload,
    Row,
    RowFailed,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
    Traits,
)

Bits: TypeAlias = npt.NDArray[np.integer[Any]]
_BITS = {2: np.int16, 4: np.int32}
_PURGE_S, _PURGE_BYTES = 0.15, 32 * 2**20
_MAX_DRAFT = 16
_COLLECTED_AFTER, _COLLECTED_BYTES = 12_000, 4096
_GROWTH = 256  # a sequence's buffers grow by this many tokens
_LARGE_BYTES = 2 * 2**20  # larger buffers get separate (huge) pages
_MAX_DIFFERENCE = 2e-3  # largest relative difference between decoder and model

_log = structlog.get_logger()


class TorchBackend(EagerBackend[TorchSequence]):
    """`ModelBackendPort` over a Hugging Face model directory."""

    def __init__(
        self, directory: Path, spec: ModelCacheSpec, options: TorchOptions | None = None
    ) -> None:
        """Load a model.

        Raises:
            InvalidRequestError: this backend cannot run it.
        """
        options = options or TorchOptions()
        num_threads = torch_loading.choose_threads(options.num_threads)
        torch.set_num_threads(num_threads)
        plan = torch_loading.make_plan(directory, options)
        self._device, self._dtype = plan.device, plan.dtype
        self._model: Any
        self._model, decoder = torch_loading.load_model(directory, spec, plan)
        self._decoder: Decoder | None = None
        layer = spec.layers[0]
        self._layers = {kind: _layers_of(kind, spec) for kind in spec.kinds}
        self._shape = (spec.num_layers, layer.num_kv_heads)
        self._dims = (layer.key_dim, layer.value_dim)
        abi, compute = f"torch.v1.{plan.number_format}", torch_loading.describe(plan)
        traits = Traits(0, abi, self._dtype.itemsize * 8, compute, _MAX_DRAFT)
        super().__init__(spec, traits, TorchSequence)
        self._copies: DeviceCopies | None = None
        self._in_transfer: list[Sequence[KVPayload]] = []
        if self._device.type == "cuda":
            self._pin(options.pinned_bytes)
        self._check_model()
        if decoder is not None:
            self._check_decoder(decoder)
        # The decoder's threads share the work of those without a core; PyTorch's do not.
        is_adapted = self._device.type == "cpu" and self._decoder is None
        self._threads = ThreadCount(num_threads) if is_adapted else None

    def _pin(self, num_bytes: int) -> None:
        memory = shared_memory(num_bytes) if num_bytes else None
        if memory is not None:
            memory.pin_rest()
            self._copies = DeviceCopies(memory, self._device)
        host_memory.use_device_memory(None if memory is None else memory.allocate)

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        sequence, by_kind = self._sequences[seq], self._sort_parts(seq, parts, end)
        contents = [(part, self._arrays(part)) for part in (*by_kind.full, *by_kind.window)]
        self._grow(sequence, end)
        if self._device.type != "cpu":
            self._in_transfer.append(parts)  # the device still reads them
        try:
            for part, (keys, values) in contents:
                self._put(sequence.keys, keys, part, end)
                self._put(sequence.values, values, part, end)
        except RuntimeError as error:
            raise BackendError(f"copying KV cache to the device failed: {error}") from error
        if end > sequence.length:
            sequence.length, sequence.last_sampled = end, None
            sequence.window_start = end
        if by_kind.window:
            sequence.window_start = by_kind.window[0].start

    def launch(self, step: Step) -> Ticket:
        if self._threads is not None and self._threads.adapt():
            torch.set_num_threads(self._threads.number)
        try:
            plan = self._plan(step)
            spans = [span for span in plan if isinstance(span, ChunkSpan)]
            logits = self._forward(spans)
            if spans:
                self._in_transfer.clear()  # earlier copies to the device are complete
        except (RuntimeError, IndexError) as error:
            raise BackendError(f"the device failed: {error}") from error
        rows: list[Row] = []
        for entry in plan:
            if isinstance(entry, ChunkSpan):
                num_rows = _num_logits(entry.chunk)
                rows.append(_finish(entry, logits[:num_rows]))
                logits = logits[num_rows:]
            else:
                rows.append(entry)
        return StepTicket(StepOutput(tuple(rows)))

    def embed(self, seq: SequenceId, start: int, tokens: Sequence[int]) -> tuple[float, ...]:
        (span,) = self._plan(Step((Chunk(seq, start, tuple(tokens)),)))
        if isinstance(span, RowFailed):
            raise InvalidRequestError(span.reason, param="input")
        try:
            with torch.inference_mode():
                output = self._model.base_model(**self._inputs([span]))
                sums: list[float] = output.last_hidden_state[0].float().sum(dim=0).tolist()
        except (RuntimeError, IndexError) as error:
            raise BackendError(f"the device failed: {error}") from error
        _finish(span, np.empty((0, 0), np.float32))
        return tuple(sums)

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        sequence = self._sequences[seq]
        start = self._snapshot_start(sequence, start, end, kind)
        layers = self._layers[kind]
        buffers = (
            self._host_buffer("keys", sequence.keys[layers, :, start:end]),
            self._host_buffer("values", sequence.values[layers, :, start:end]),
        )
        return PayloadTicket(KVPayload(self._traits.kv_abi, kind, start, end, buffers))

    def bytes_for(self, lengths: Sequence[int]) -> int:
        # Buffers grow in steps, and window layers keep every token, too.
        per_token = math.prod(self._shape) * sum(self._dims) * self._dtype.itemsize
        return sum(_capacity(length) * per_token for length in lengths)

    def memory(self) -> int:
        tensors = [t for s in self._sequences.values() for t in (s.keys, s.values)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def device_memory(self) -> DeviceMemory | None:
        if self._device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total - free, total)

    def shutdown(self) -> None:
        self._sequences.clear()
        self._model = self._decoder = None
        if self._copies is not None:
            self._copies.finish()
        host_memory.collect_and_trim()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            # On ARM, PyTorch's allocator (mimalloc) returns large blocks at the first allocation
            # after a delay, and looks for others every 10,000 allocations of a thread.
            time.sleep(_PURGE_S)
            for _ in range(_COLLECTED_AFTER):
                torch.empty(_COLLECTED_BYTES, dtype=torch.uint8)
            torch.empty(_PURGE_BYTES, dtype=torch.uint8)

    # -- one step -------------------------------------------------------------------------------

    def _plan(self, step: Step) -> list[ChunkSpan | RowFailed]:
        """Assign each chunk a place in the packed row and room in its sequence's buffers."""
        offset = 0

        def place(chunk: Chunk) -> ChunkSpan:
            nonlocal offset
            sequence = self._sequence_of(chunk)
            tokens = (*self._tokens_of(chunk, sequence.last_sampled), *chunk.draft)
            self._grow(sequence, sequence.length + len(tokens))
            offset += len(tokens)
            return ChunkSpan(chunk, sequence, tokens, offset - len(tokens))

        return make_rows(step, place)

    def _forward(self, spans: Sequence[ChunkSpan]) -> Logits:
        """Run the model over the packed row; returns the logits after each span.

        A span with draft tokens has several rows of logits: one before each draft token, and the
        last. A span with targets has a row for each token.
        """
        if not spans:
            return np.empty((0, 0), np.float32)
        last = [
            place
            for span in spans
            for place in range(span.place.stop - _num_logits(span.chunk), span.place.stop)
        ]
        forward = self._forward_by_library if self._decoder is None else self._decoder.step
        return forward(spans, last)

    def _forward_by_library(self, spans: Sequence[ChunkSpan], last: Sequence[int]) -> Logits:
        with torch.inference_mode():
            output = self._model(
                **self._inputs(spans), logits_to_keep=torch.tensor([*last], device=self._device)
            )
            logits: Logits = output.logits[0].float().cpu().numpy()
        return logits

    def _inputs(self, spans: Sequence[ChunkSpan]) -> dict[str, Any]:
        for span in spans:
            span.make_views()
        packed = [token for span in spans for token in span.tokens]
        positions = [place for span in spans for place in range(span.sequence.length, span.end)]
        return {
            "input_ids": torch.tensor([packed], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "use_cache": False,
            "spans": spans,
        }

    def _grow(self, sequence: TorchSequence, length: int) -> None:
        """Make room for `length` tokens, and for all known tokens of the sequence."""
        if length <= sequence.capacity:
            return
        layers, heads = self._shape
        capacity = _capacity(max(length, len(sequence.known)))
        roomier = TorchSequence(sequence.known)
        roomier.keys, roomier.values = (
            _allocate_kv((layers, heads, capacity, dim), self._dtype, self._device)
            for dim in self._dims
        )
        if sequence.capacity:
            roomier.copy_state(sequence, sequence.length)
        sequence.keys, sequence.values = roomier.keys, roomier.values

    # -- lengths --------------------------------------------------------------------------------

    def _first_kept(self, sequence: TorchSequence) -> int:
        # Window layers keep all tokens that were computed here, not only the last window.
        return sequence.window_start

    def _copy(self, source: TorchSequence, target: TorchSequence, num_tokens: int) -> None:
        self._grow(target, num_tokens)
        target.copy_state(source, num_tokens)
        target.length, target.window_start = num_tokens, source.window_start

    def _cut(self, sequence: TorchSequence, num_tokens: int) -> None:
        sequence.length, sequence.last_sampled = num_tokens, None
        if num_tokens == 0:
            sequence.window_start = 0

    # -- checks ---------------------------------------------------------------------------------

    def _check_model(self) -> None:
        """Run one token, to reject a model that would fail or compute wrong results."""
        scratch = TorchSequence([0])
        self._grow(scratch, 1)
        scratch.keys.fill_(torch.nan)
        chunk = Chunk(SequenceId(0), 0, (0,))
        try:
            self._forward_by_library([ChunkSpan(chunk, scratch, (0,), 0)], [0])
        except (RuntimeError, BackendError) as error:
            raise torch_loading.refusal(self._spec, str(error)) from error
        if scratch.keys[:, :, 0].isnan().any():
            reason = "some of its layers do not use the attention interface of transformers"
            raise torch_loading.refusal(self._spec, reason)

    def _check_decoder(self, decoder: Decoder) -> None:
        spans, random = [], torch.Generator().manual_seed(0)
        for offset, (length, tokens) in enumerate(((5, (1,)), (37, (2, 3, 0)))):
            sequence = TorchSequence([0] * length)
            self._grow(sequence, length + len(tokens))
            for state in (sequence.keys, sequence.values):
                state[:, :, :length].normal_(generator=random)
            sequence.length = length
            spans.append(ChunkSpan(Chunk(SequenceId(0), length, tokens), sequence, tokens, offset))
        found = self._computed(spans, decoder.step)
        expected = self._computed(spans, self._forward_by_library)
        off = float((found - expected).norm() / expected.norm())
        if off < _MAX_DIFFERENCE:
            self._decoder = decoder
        else:
            _log.warning(
                "native decode step disagrees with PyTorch; disabled", off_by=round(off, 4)
            )

    def _computed(
        self,
        spans: Sequence[ChunkSpan],
        forward: Callable[[Sequence[ChunkSpan], Sequence[int]], Logits],
    ) -> torch.Tensor:
        """Run a step and return log-probabilities and new KV cache as one flat tensor."""
        last = range(spans[-1].place.stop)
        logits = torch.from_numpy(forward(spans, last)).log_softmax(dim=-1)
        states = [
            state[:, :, span.sequence.length : span.end].flatten()
            for span in spans
            for state in (span.sequence.keys, span.sequence.values)
        ]
        return torch.cat([logits.flatten(), *states])

    def _arrays(self, part: KVPayload) -> tuple[Bits, Bits]:
        buffers = {buffer.name: buffer for buffer in part.buffers}
        num_layers = sum(layer.kind is part.kind for layer in self._spec.layers)
        keys, values = (
            self._array(buffers.get(name), (num_layers, self._shape[1], part.end - part.start, dim))
            for name, dim in zip(("keys", "values"), self._dims, strict=True)
        )
        return keys, values

    def _array(self, buffer: HostBuffer | None, shape: tuple[int, ...]) -> Bits:
        num_bytes = math.prod(shape) * self._dtype.itemsize
        data = memoryview(b"" if buffer is None else buffer.data)
        if buffer is None or buffer.shape != shape or data.nbytes != num_bytes:
            raise CacheCorruptionError(f"KV cache payload has no keys or values of shape {shape}")
        return np.frombuffer(data, _BITS[self._dtype.itemsize]).reshape(shape)

    def _host_buffer(self, name: str, tensor: torch.Tensor) -> HostBuffer:
        """Copy to the host; on CUDA with pinned memory the copy runs in the background."""
        copy = None if self._copies is None else self._copies.copy_out(name, tensor)
        return _host_buffer(name, tensor) if copy is None else copy

    def _put(self, target: torch.Tensor, source: Bits, part: KVPayload, end: int) -> None:
        end = min(part.end, end)
        layers, content = self._layers[part.kind], source[:, :, : end - part.start]
        if isinstance(layers, slice):
            _copy(content, target[:, :, part.start : end])
            return
        for layer, layer_content in zip(layers, content, strict=True):
            _copy(layer_content, target[layer, :, part.start : end])


def _layers_of(kind: LayerKind, spec: ModelCacheSpec) -> slice | list[int]:
    """Return the layers of a kind; if all are, as a slice, which needs no gathering."""
    layers = [index for index, layer in enumerate(spec.layers) if layer.kind is kind]
    return slice(None) if len(layers) == spec.num_layers else layers


def _capacity(length: int) -> int:
    return -(-length // _GROWTH) * _GROWTH


def _allocate_kv(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate uninitialised KV cache memory, in huge pages where Linux provides them.

    Page faults of small pages take longer than copying a restored sequence into the memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LARGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(host_memory.plain_pages(num_bytes), dtype=dtype).view(shape)


def _bits(tensor: torch.Tensor) -> Bits:
    """View a host tensor as integers of the same size, sharing its memory."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits: Bits = tensor.view(integers).numpy()
    return bits


def _copy(source: Bits, target: torch.Tensor) -> None:
    """Write host data into a tensor.

    On a CPU, numpy copies: torch would wake its threads for each piece and take far longer. A CUDA
    device reads pinned memory asynchronously.
    """
    if target.is_cpu:
        _bits(target)[:] = source
    else:
        given = source if source.flags.writeable else source.copy()
        target.copy_(torch.from_numpy(given).view(target.dtype), non_blocking=True)


def _host_buffer(name: str, tensor: torch.Tensor) -> HostBuffer:
    host = tensor.cpu()
    copied = _bits(host).copy() if host is tensor or host.is_set_to(tensor) else _bits(host)
    data = np.ascontiguousarray(copied).reshape(-1).view(np.uint8).data
    return HostBuffer(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), data)


def _num_logits(chunk: Chunk) -> int:
    return chunk.num_tokens if chunk.targets else 1 + len(chunk.draft)


def _scores(logits: Logits, chunk: Chunk) -> tuple[TokenLogprob, ...]:
    """Score a chunk's targets; PyTorch's threads take the rows of large vocabularies."""
    if not chunk.targets:
        return ()
    logprobs = torch.from_numpy(logits[: len(chunk.targets)]).log_softmax(dim=-1)
    if not logprobs.amax(dim=-1).isfinite().all():
        raise BackendError(NOT_FINITE)
    chosen = logprobs.gather(1, torch.tensor(chunk.targets)[:, None])[:, 0]
    values, ids = logprobs.topk(min(chunk.num_top, logprobs.shape[1]))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    tops = (tuple(zip(*pair, strict=True)) for pair in pairs)
    return tuple(map(TokenLogprob, chunk.targets, chosen.tolist(), tops))


def _finish(span: ChunkSpan, logits: Logits) -> Row:
    """Sample if requested, then add the chunk to the sequence; a row that fails changes nothing.

    Keys and values of rejected draft tokens remain in the buffers after the sequence's end.
    """
    chunk, sequence = span.chunk, span.sequence
    try:
        scores = _scores(logits, chunk)
    except BackendError as error:
        return RowFailed(chunk.seq, error.message)
    row: Row = Computed(chunk.seq, scores)
    token, num_wrong = None, 0
    known, start = sequence.known, sequence.length
    replaced = known[start : span.end]
    known[start : span.end] = span.tokens
    if chunk.draw is not None:
        first, drawn = span.end - len(chunk.draft), logits[-1 - len(chunk.draft) :]
        try:
            row = verify(chunk, lambda i, draw: sample(drawn[i], draw, known, first + i))
            row = replace(row, scores=scores)
        except BackendError as error:
            known[start : span.end] = replaced
            return RowFailed(chunk.seq, error.message)
        token, num_wrong = row.token, len(chunk.draft) - len(row.accepted)
    end = span.end - num_wrong
    known[end : span.end] = replaced[end - start :]
    sequence.length, sequence.last_sampled = end, token
    return row
