"""Samples a token from a row of logits in host memory, with numpy.

Rows are independent: the result depends on the row, its parameters and the tokens before it.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from semantic.domain.errors import BackendError, InvalidRequestError
from semantic.domain.sampling import SamplingParams, TokenLogprob, uniform
from semantic.ports.backend import Draw

Logits = NDArray[np.float32]
NOT_FINITE = "the model returned logits that are NaN or infinite"


def sample(
    logits: Logits, draw: Draw, known: Sequence[int], position: int | None = None
) -> tuple[int, TokenLogprob | None]:
    """Sample the token at a position.

    Args:
        logits: One row of the model's logits; not modified.
        known: The sequence's tokens; penalties read those before `position`.
        position: Of the token to sample; None means after all known tokens.

    Raises:
        BackendError: the row contains NaN, or the mask allows no token.
    """
    _require_finite(logits)
    position = len(known) if position is None else position
    adjusted = _adjust(logits, draw, known, position)
    if adjusted.max() == -np.inf:
        raise BackendError("the grammar or mask allows no token")
    if draw.params.is_greedy:
        token = int(adjusted.argmax())
    else:
        token = _pick(adjusted, draw.params, draw.num_before + position)
    num_top = draw.params.top_logprobs
    return token, None if num_top is None else _logprob(logits, token, num_top)


def score(logits: Logits, targets: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Return each target's log-probability in its row of logits, with the most likely tokens.

    Raises:
        BackendError: a row contains NaN.
    """
    for row in logits:
        _require_finite(row)
    rows = zip(logits, targets, strict=True)
    return tuple(_logprob(row, target, num_top) for row, target in rows)


def _require_finite(logits: Logits) -> None:
    if not np.isfinite(logits.max()):
        raise BackendError(NOT_FINITE)


def check_draw(draw: Draw, vocab_size: int) -> None:
    """Reject parameters that no logits could satisfy.

    Raises:
        InvalidRequestError: the mask allows no token, or there is no seed to sample with.
    """
    allowed = draw.allowed
    if allowed is not None and not int.from_bytes(allowed, "little") & ((1 << vocab_size) - 1):
        raise InvalidRequestError("the grammar or mask allows no token")
    if draw.params.seed is None and not draw.params.is_greedy:
        raise InvalidRequestError("sampling with a temperature requires a seed")


def _adjust(logits: Logits, draw: Draw, known: Sequence[int], position: int) -> Logits:
    params = draw.params
    if not (params.has_penalties or params.logit_bias or draw.allowed is not None):
        return logits
    adjusted = logits.copy()
    if params.has_penalties:
        _penalise(adjusted, params, known[:position], draw.num_prompt)
    for token, bias in params.logit_bias:
        if 0 <= token < len(adjusted):
            adjusted[token] += bias
    if draw.allowed is not None:
        bits = np.unpackbits(np.frombuffer(draw.allowed, np.uint8), bitorder="little")
        allowed = np.zeros(len(adjusted), bool)
        allowed[: len(bits)] = bits[: len(adjusted)]
        adjusted[~allowed] = -np.inf
    return adjusted


def _penalise(
    logits: Logits, params: SamplingParams, history: Sequence[int], num_prompt: int
) -> None:
    if params.repetition_penalty != 1:
        seen = np.unique(np.asarray(history, np.int64))
        seen = seen[seen < len(logits)]  # without the key ids of images
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    generated = np.asarray(history[num_prompt:], np.int64)
    if generated.size:
        tokens, counts = np.unique(generated, return_counts=True)
        taken_off = params.presence_penalty + params.frequency_penalty * counts
        logits[tokens] -= taken_off.astype(np.float32)


def _pick(logits: Logits, params: SamplingParams, position: int) -> int:
    if params.seed is None:
        raise BackendError("sampling with a temperature requires a seed")
    tokens, weights = _candidates(logits, params)
    cumulative = np.cumsum(weights)
    # Always below the last sum, even after rounding: a uniform number is at most 1 - 2**-53.
    point = uniform(params.seed, position) * cumulative[-1]
    return int(tokens[np.searchsorted(cumulative, point, side="right")])


def _candidates(
    logits: Logits, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the tokens that may be sampled, and their weights."""
    top = float(logits.max())
    with np.errstate(over="ignore"):  # with a tiny temperature only the best token remains
        weights = np.exp((logits.astype(np.float64) - top) / params.temperature)
    tokens = np.arange(len(weights))
    if params.min_p > 0:
        tokens = np.flatnonzero(weights >= params.min_p)
    if 0 < params.top_k < len(tokens):
        # Ties go to the lower id, so that the result is the same on every machine.
        order = np.argsort(-weights[tokens], kind="stable")[: params.top_k]
        tokens = tokens[order]
    if params.top_p < 1:
        order = np.argsort(-weights[tokens], kind="stable")
        tokens = tokens[order]
        cumulative = np.cumsum(weights[tokens])
        num_kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        tokens = tokens[:num_kept]
    return tokens, weights[tokens]


def _logprob(logits: Logits, token: int, num_top: int) -> TokenLogprob:
    wide = logits.astype(np.float64)
    log_total = float(wide.max()) + math.log(np.exp(wide - wide.max()).sum())
    best = _most_likely(wide, num_top)
    return TokenLogprob(
        token,
        float(wide[token]) - log_total,
        tuple((int(i), float(wide[i]) - log_total) for i in best),
    )


def _most_likely(logits: NDArray[np.float64], num_top: int) -> NDArray[np.int64]:
    """Return the tokens with the highest logits, best first; ties go to the lower id."""
    if not num_top:
        return np.empty(0, np.int64)
    num_top = min(num_top, len(logits))
    # Sorting only the candidates takes a tenth of the time of sorting the whole vocabulary.
    candidates = np.flatnonzero(logits >= np.partition(logits, -num_top)[-num_top])
    best: NDArray[np.int64] = candidates[np.argsort(-logits[candidates], kind="stable")[:num_top]]
    return best
