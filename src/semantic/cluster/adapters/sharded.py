"""One model in several processes (ranks): each holds a share of its heads.

The server sends every call to every rank, in the same order, and every rank answers. Within a step
the ranks wait for each other to sum their partial results, so the loss of one rank ends the whole
group, and the model must be loaded again. The first rank's tokens are used. Saved KV cache is per
rank: a payload contains each rank's buffers, prefixed with the rank's number.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from semantic.adapters.outbound.backends.common import DoneTickets, PayloadTicket, StepTicket
from semantic.domain.errors import (
    BackendError,
    CacheCorruptionError,
    DeviceLostError,
    InvalidRequestError,
)
from semantic.domain.images.spans import ImageSpan
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.ports.backend import (
    LAST_SAMPLED,
    Chunk,
    DeviceMemory,
    HostBuffer,
    KVPayload,
    ModelBackendPort,
    Row,
    Sampled,
    SequenceId,
    Step,
    StepOutput,
    Ticket,
    Traits,
)

Answer: TypeAlias = Any  # result of a rank's call, or the exception it raised
_REST_S = 60  # timeout for the other answers after the first one
_GONE = (EOFError, OSError)


def share_of(spec: ModelCacheSpec, num_ranks: int) -> ModelCacheSpec:
    """Return the geometry of each rank's share.

    Raises:
        InvalidRequestError: the model's attention cannot be divided by this number.
    """
    if not spec.is_known:
        raise InvalidRequestError(
            f"{spec.model_type} cannot be split into shards: its config does not tell how many KV "
            "heads each layer has. Run it without shards.",
            param="shards",
        )
    if any(_is_indivisible(layer, num_ranks) for layer in spec.layers):
        heads = ", ".join(str(n) for n in sorted({layer.num_kv_heads for layer in spec.layers}))
        raise InvalidRequestError(
            f"{spec.model_type} cannot be split into {num_ranks} shards: its layers have "
            f"{heads} KV heads. Choose a number that divides them.",
            param="shards",
        )
    return _with_heads(spec, lambda heads: heads // num_ranks)


def _is_indivisible(layer: LayerSpec, num_ranks: int) -> bool:
    return layer.kind is LayerKind.STATE or layer.num_kv_heads % num_ranks != 0


def _with_heads(spec: ModelCacheSpec, change: Callable[[int], int]) -> ModelCacheSpec:
    layers = (replace(layer, num_kv_heads=change(layer.num_kv_heads)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


class ShardedBackend(DoneTickets):
    """`ModelBackendPort` that forwards each call to all ranks."""

    def __init__(self, links: Sequence[Connection], end: Callable[[], None]) -> None:
        """Take ranks that have loaded their shares.

        Args:
            links: One connection per rank, in order; `mirror` runs at the other end.
            end: Terminates the ranks, even during a call.

        Raises:
            DeviceLostError: a rank has exited.
        """
        self._links = tuple(links)
        self._end = end
        self._lost = ""
        self._last: dict[SequenceId, int] = {}  # the first rank's last sampled token
        self._bytes: dict[int, int] = {}  # KV cache size by sequence length
        share, traits = self._all("describe")[0]
        self._spec = _with_heads(share, lambda heads: heads * len(links))
        self._share_abi = traits.kv_abi
        self._traits: Traits = replace(
            traits, pipeline_depth=0, kv_abi=f"{traits.kv_abi}.shards{len(links)}"
        )

    @property
    def spec(self) -> ModelCacheSpec:
        return self._spec

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def head(self) -> None:
        return None

    @property
    def loop(self) -> None:
        return None

    def open_sequence(
        self, seq: SequenceId, tokens: Sequence[int], images: Sequence[ImageSpan] = ()
    ) -> None:
        self._all("open_sequence", seq, tuple(tokens), tuple(images))

    def load(self, seq: SequenceId, parts: Sequence[KVPayload], end: int) -> None:
        shares = [self._divided(part) for part in parts]
        arguments = [
            (seq, [share[rank] for share in shares], end) for rank in range(len(self._links))
        ]
        self._each("load", arguments)
        self._last.pop(seq, None)

    def fork(self, src: SequenceId, dst: SequenceId, num_tokens: int) -> bool:
        return bool(self._all("fork", src, dst, num_tokens)[0])

    def launch(self, step: Step) -> Ticket:
        """Compute a step on every rank and wait for it."""
        chunks = tuple(self._spelled_out(chunk) for chunk in step.chunks)
        outputs: list[StepOutput] = self._all("step", Step(chunks))
        if len({tuple(type(row) for row in output.rows) for output in outputs}) > 1:
            raise self._lose("they disagree on which rows failed")
        by_row = zip(*(output.rows for output in outputs), strict=True)
        rows = tuple(self._agreed(chunk, row) for chunk, row in zip(chunks, by_row, strict=True))
        for row in rows:
            if isinstance(row, Sampled):
                self._last[row.seq] = row.token
            else:
                self._last.pop(row.seq, None)
        return StepTicket(StepOutput(rows))

    def embed(self, seq: SequenceId, start: int, tokens: Sequence[int]) -> tuple[float, ...]:
        """Add tokens; every rank returns the whole sum."""
        sums: tuple[float, ...] = self._all("embed", seq, start, tuple(tokens))[0]
        return sums

    def snapshot(self, seq: SequenceId, start: int, end: int, kind: LayerKind) -> Ticket:
        shares: list[KVPayload] = self._all("save", seq, start, end, kind)
        buffers = tuple(
            replace(buffer, name=f"{rank}.{buffer.name}")
            for rank, share in enumerate(shares)
            for buffer in share.buffers
        )
        return PayloadTicket(replace(shares[0], abi=self._traits.kv_abi, buffers=buffers))

    def flush(self) -> None:
        """Do nothing: this backend defers no work."""

    def truncate(self, seq: SequenceId, num_tokens: int) -> int:
        length = int(self._all("truncate", seq, num_tokens)[0])
        self._last.pop(seq, None)
        return length

    def close_sequence(self, seq: SequenceId) -> None:
        """Close a sequence; if the ranks are lost, it is already gone."""
        self._last.pop(seq, None)
        with contextlib.suppress(DeviceLostError):
            self._all("close_sequence", seq)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the sum of all ranks' bytes; each length is queried once and cached."""
        for length in lengths:
            if length not in self._bytes:
                self._bytes[length] = sum(self._all("bytes_for", [length]))
        return sum(self._bytes[length] for length in lengths)

    def memory(self) -> int:
        return 0 if self._lost else sum(self._all("memory"))

    def device_memory(self) -> DeviceMemory | None:
        """Return None: only the engine's thread may call the ranks."""
        return None

    def shutdown(self) -> None:
        with contextlib.suppress(DeviceLostError):
            self._all("shutdown")
        self._lost = "the model was shut down."
        self._end()

    # -- calling the ranks ----------------------------------------------------------------------

    def _all(self, name: str, *arguments: object) -> list[Answer]:
        return self._each(name, [arguments] * len(self._links))

    def _each(self, name: str, arguments: Sequence[tuple[object, ...]]) -> list[Answer]:
        """Call every rank and wait; raises DeviceLostError if one has exited or they disagree."""
        if self._lost:
            raise DeviceLostError(self._lost)
        try:
            for link, args in zip(self._links, arguments, strict=True):
                link.send((name, args))
            answers = self._answers()
        except _GONE as error:
            raise self._lose("a shard process exited") from error
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if len({type(error) for error in errors}) > 1 or 0 < len(errors) < len(answers):
            raise self._lose(f"they disagree: {errors[0]}") from errors[0]
        if errors:
            raise errors[0]
        return answers

    def _answers(self) -> list[Answer]:
        answers: dict[Connection, Answer] = {}
        while waiting := [link for link in self._links if link not in answers]:
            ready = connection.wait(waiting, _REST_S if answers else None)
            if not ready:
                raise TimeoutError
            for link in waiting:
                if link in ready:
                    answers[link] = link.recv()
        return [answers[link] for link in self._links]

    def _lose(self, reason: str) -> DeviceLostError:
        self._lost = f"the model's {len(self._links)} shards are lost: {reason}."
        self._end()
        return DeviceLostError(self._lost)

    def _agreed(self, chunk: Chunk, by_rank: Sequence[Row]) -> Row:
        """Return the first rank's row, reduced to draft tokens that every rank accepted."""
        first = by_rank[0]
        if not isinstance(first, Sampled):
            return first
        counts = {len(row.accepted) for row in by_rank if isinstance(row, Sampled)}
        if len(counts) == 1:
            return first
        draws = (*first.accepted, first)
        num_right = min(counts)
        self._all("truncate", chunk.seq, chunk.start + chunk.num_tokens + num_right)
        return replace(draws[num_right], accepted=draws[:num_right])

    # -- arguments for each rank ----------------------------------------------------------------

    def _spelled_out(self, chunk: Chunk) -> Chunk:
        """Replace LAST_SAMPLED by the first rank's token: other ranks may have sampled another."""
        token = self._last.get(chunk.seq)
        if chunk.tokens is not LAST_SAMPLED or token is None:
            return chunk
        return replace(chunk, tokens=(token,))

    def _divided(self, part: KVPayload) -> list[KVPayload]:
        """Split a payload into each rank's share; equal forms, so all ranks accept it or none."""
        if part.abi != self._traits.kv_abi:
            raise CacheCorruptionError(f"a payload of {part.abi} cannot be loaded")
        by_rank: list[list[HostBuffer]] = [[] for _ in self._links]
        for buffer in part.buffers:
            number, _, name = buffer.name.partition(".")
            if not number.isdecimal() or int(number) >= len(by_rank):
                raise CacheCorruptionError(f"no rank has a buffer {buffer.name}")
            by_rank[int(number)].append(replace(_sendable(buffer), name=name))
        forms = {tuple((b.name, b.shape, b.dtype, b.nbytes) for b in share) for share in by_rank}
        if len(forms) > 1:
            raise CacheCorruptionError("the ranks' shares of a payload do not match")
        return [replace(part, abi=self._share_abi, buffers=tuple(share)) for share in by_rank]


def _sendable(buffer: HostBuffer) -> HostBuffer:
    return replace(buffer, source=bytes(buffer.data))


# -- a rank's side ---------------------------------------------------------------------------------


def mirror(link: Connection, backend: ModelBackendPort) -> None:
    """Execute calls from the other end until it sends `shutdown` or the connection ends."""
    try:
        while True:
            name, arguments = link.recv()
            if name == "shutdown":
                break
            link.send(_answer(backend, name, arguments))
    except _GONE:
        return
    finally:
        backend.shutdown()
    with contextlib.suppress(*_GONE):
        link.send(None)


def _answer(backend: ModelBackendPort, name: str, arguments: tuple[Any, ...]) -> Answer:
    try:
        return _do(backend, name, arguments)
    except (BackendError, InvalidRequestError, CacheCorruptionError) as error:
        return error
    except (ValueError, KeyError, TypeError) as error:
        return type(error)(str(error))
    except Exception as error:  # noqa: BLE001 - the other end raises it
        return BackendError(f"{type(error).__name__}: {error}")


def _do(backend: ModelBackendPort, name: str, arguments: tuple[Any, ...]) -> Answer:
    match name:
        case "describe":
            return backend.spec, backend.traits
        case "step":
            output = backend.collect(backend.launch(*arguments))
            backend.flush()
            return output
        case "save":
            ticket = backend.snapshot(*arguments)
            backend.flush()
            payload = backend.payload(ticket)
            return replace(payload, buffers=tuple(_sendable(b) for b in payload.buffers))
        case _:
            return getattr(backend, name)(*arguments)
