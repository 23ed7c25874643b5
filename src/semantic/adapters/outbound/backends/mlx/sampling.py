"""Samples and scores tokens on the device, and waits for pending ones.

Greedy rows and rows with a plain temperature are sampled on the device, so that the next step can
be launched before their tokens are known. All others are sampled on the host from their logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import mlx.core as mx
import numpy as np

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.sampler import NOT_FINITE, sample
from semantic.domain.errors import BackendError
from semantic.domain.sampling import SamplingParams, TokenLogprob, uniform
from semantic.ports.backend import Draw, PendingTokens, RowFailed, Sampled, SequenceId

_ALMOST_ONE = 1 - 2**-24  # the largest float32 below 1
_COLDEST = 1e-30  # lower temperatures are zero in float32


class DeviceTokens:
    """Tokens of several rows that the device samples together.

    Attributes:
        tokens: Input of the next step.
        checked: The same, with -1 where the logits are NaN or infinite.
    """

    def __init__(self, tokens: Array, checked: Array) -> None:
        self.tokens = tokens
        self.checked = checked
        self._values: list[int] | None = None

    def value(self, index: int) -> int:
        """Wait for a row's token."""
        if self._values is None:
            self._values = self.checked.tolist()
        return self._values[index]


class LoopRun:
    """All tokens of a loop, by step and sequence, and its microseconds."""

    def __init__(self, tokens: Array, num_sequences: int) -> None:
        self.tokens, self.num_sequences = tokens, num_sequences
        self._values: list[int] = []

    def values(self) -> list[int]:
        """Wait for the loop."""
        if not self._values:
            self._values = self.tokens.tolist()
        return self._values


class LoopTokens(PendingTokens):
    """The first tokens that a loop samples for one sequence, with the sequence's number."""

    def __init__(self, run: LoopRun, number: int, size: int) -> None:
        self.run, self._size = run, size
        stride = run.num_sequences
        self._places = slice(number, number + size * stride, stride)
        self.number = number

    @property
    def array(self) -> Array:
        """The tokens on the device."""
        return self.run.tokens[self._places]

    @property
    def seconds(self) -> float:
        return self.run.values()[-1] / 1e6

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice) and index.start in (None, 0) and index.step is None:
            return LoopTokens(self.run, self.number, len(range(self._size)[index]))
        return self.run.values()[self._places][index]


@dataclass(slots=True, eq=False)
class PendingToken:
    """A row's token, which may still be computed on the device.

    Attributes:
        device: The tokens sampled on the device in its step; None if the host samples.
        logits: The row's logits, if the host samples.
    """

    draw: Draw
    seq: SequenceId
    known: list[int]
    position: int
    device: DeviceTokens | None = None
    index: int = 0
    logits: Array | None = None
    _answer: Sampled | RowFailed | None = None

    def answer(self) -> Sampled | RowFailed:
        """Wait for the token."""
        if self._answer is None:
            self._answer = self._wait()
            self.logits = None
        return self._answer

    def has_failed(self) -> bool:
        return isinstance(self._answer, RowFailed)

    def token_if_known(self) -> int:
        """Return the token, or -1 if it is pending on the device; host tokens are sampled now."""
        answer = None if self.device is not None and self._answer is None else self.answer()
        return answer.token if isinstance(answer, Sampled) else -1

    def _wait(self) -> Sampled | RowFailed:
        if self.device is not None:
            token = self.device.value(self.index)
            return Sampled(self.seq, token) if token >= 0 else RowFailed(self.seq, NOT_FINITE)
        logits = np.array(self.logits, np.float32)
        try:
            token, logprob = sample(logits, self.draw, self.known, self.position)
        except BackendError as error:
            return RowFailed(self.seq, error.message)
        return Sampled(self.seq, token, logprob)


class PendingScores:
    """Log-probabilities of given tokens, which the device may still compute.

    Attributes:
        outputs: The arrays to evaluate.
    """

    def __init__(self, logits: Array, targets: Sequence[int], num_top: int) -> None:
        """Score one target in each row of logits ``[targets, vocabulary]``."""
        self._targets = targets
        logprobs = logits.astype(mx.float32)
        logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, mx.array(targets, mx.int32)[:, None], axis=-1)
        is_finite = mx.isfinite(mx.max(logprobs, axis=-1))
        num_top = min(num_top, logprobs.shape[-1])
        ids = mx.zeros((len(targets), 0), mx.int32)
        if num_top:
            ids = mx.argpartition(-logprobs, kth=num_top - 1, axis=-1)[:, :num_top]
        values = mx.take_along_axis(logprobs, ids, axis=-1)
        self.outputs = [chosen[:, 0], is_finite, ids, values]

    def answer(self) -> tuple[TokenLogprob, ...] | None:
        """Wait for the scores; None if logits are NaN or infinite."""
        chosen, is_finite, ids, values = (array.tolist() for array in self.outputs)
        if not all(is_finite):
            return None
        tops = (
            tuple(sorted(zip(row_ids, row, strict=True), key=lambda top: (-top[1], top[0])))
            for row_ids, row in zip(ids, values, strict=True)
        )
        return tuple(map(TokenLogprob, self._targets, chosen, tops))


def is_drawn_on_device(draw: Draw) -> bool:
    """Whether a row can be sampled without its history and without the host."""
    params = draw.params
    if draw.allowed is not None or params.has_penalties or params.logit_bias:
        return False
    is_filtered = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    return params.top_logprobs is None and (params.is_greedy or not is_filtered)


def draw_rows(logits: Array, rows: Sequence[PendingToken]) -> list[Array]:
    """Sample each row from its logits ``[rows, vocabulary]``; returns the arrays to evaluate."""
    outputs: list[Array] = []
    on_device = [i for i, row in enumerate(rows) if is_drawn_on_device(row.draw)]
    for i, row in enumerate(rows):
        if not is_drawn_on_device(row.draw):
            row.logits = logits[i].astype(mx.float32)
            outputs.append(row.logits)
    if on_device:
        chosen = logits if len(on_device) == len(rows) else logits[mx.array(on_device)]
        drawn = [rows[i] for i in on_device]
        tokens = _choose(chosen, drawn)
        is_sound = mx.isfinite(mx.max(chosen, axis=-1))
        device = DeviceTokens(tokens, mx.where(is_sound, tokens, mx.array(-1, mx.int32)))
        for index, row in enumerate(drawn):
            row.device, row.index = device, index
        outputs += [device.tokens, device.checked]
    return outputs


def _choose(logits: Array, rows: Sequence[PendingToken]) -> Array:
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    params = [row.draw.params for row in rows]
    if all(p.is_greedy for p in params):
        return best
    temperatures = mx.array([1.0 if p.is_greedy else max(p.temperature, _COLDEST) for p in params])[
        :, None
    ]
    places = [row.draw.num_before + row.position for row in rows]
    numbers = [random_number(p, place) for p, place in zip(params, places, strict=True)]
    wide = logits.astype(mx.float32)
    weights = mx.exp((wide - mx.max(wide, axis=-1, keepdims=True)) / temperatures)
    sums = mx.cumsum(weights, axis=-1)
    points = mx.array(numbers)[:, None] * sums[:, -1:]
    sampled = mx.minimum(mx.sum(sums <= points, axis=-1), logits.shape[-1] - 1).astype(mx.int32)
    is_greedy = mx.array([p.is_greedy for p in params])
    return mx.where(is_greedy, best, sampled)


def random_number(params: SamplingParams, position: int) -> float:
    """Return the random number that samples the token at a position of the text."""
    return 0.0 if params.seed is None else min(uniform(params.seed, position), _ALMOST_ONE)


def input_tokens(sources: Sequence[int | PendingToken]) -> Array:
    """Return the rows' next tokens as one array, on the device where possible."""
    first = sources[0]
    device = first.device if isinstance(first, PendingToken) else None
    places = [(s.device, s.index) if isinstance(s, PendingToken) else None for s in sources]
    if device is not None and places == [(device, i) for i in range(device.tokens.shape[0])]:
        return device.tokens
    return mx.concatenate([_input_token(source) for source in sources])


def _input_token(source: int | PendingToken) -> Array:
    if isinstance(source, PendingToken) and source.device is not None:
        return source.device.tokens[source.index : source.index + 1]
    token = source.token_if_known() if isinstance(source, PendingToken) else source
    return mx.array([token], mx.int32)
