"""Drafts tokens with the head of a model (multi-token prediction, MTP).

Entry `j` of a head takes the hidden state of position `j` after the model's last norm, and the
embedding of token `j + 1`; it predicts token `j + 2`. Both are normed and projected to one vector,
which passes a decoder layer with its own keys and values, a norm, and the model's output layer. For
the tokens after that the head runs on its own outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from semantic.adapters.outbound.backends.mtp.state import Array, Arrays, HeadState
from semantic.ports.backend import LAST_SAMPLED, Chunk, Draw, SequenceId


class HeadSequence(Protocol):
    """A backend's sequence, as far as a head needs it."""

    known: list[int]
    length: int

    @property
    def ahead(self) -> HeadState: ...


@dataclass(slots=True)
class HeadRow:
    """A sequence to draft for.

    Attributes:
        known: All tokens; the last one is not computed yet. Draft tokens may follow.
        end: Number of the tokens before the draft.
    """

    state: HeadState
    known: list[int]
    end: int
    draw: Draw


class DraftingHead(ABC):
    """Runs a head over the rows of a step; see the module's description."""

    arrays: Arrays

    @property
    @abstractmethod
    def hidden_bytes(self) -> int:
        """Size of a hidden state."""

    def draft(
        self, chunks: Sequence[Chunk], sequences: Mapping[SequenceId, HeadSequence], count: int
    ) -> list[tuple[int, ...]]:
        """As `DraftHead.draft`; the state of each row gets entries up to its last token."""
        found: dict[SequenceId, HeadRow] = {}
        for chunk in chunks:
            sequence = sequences.get(chunk.seq)
            if sequence is None or chunk.draw is None or chunk.tokens is LAST_SAMPLED:
                continue
            state = sequence.ahead
            if state.num_hidden and state.end == sequence.length == chunk.start:
                known = [*sequence.known[: chunk.start], *chunk.tokens]
                found[chunk.seq] = HeadRow(state, known, len(known), chunk.draw)
        drafted = self._draft([*found.values()], count) if found else []
        by_sequence = dict(zip(found, drafted, strict=True))
        return [by_sequence.get(chunk.seq, ()) for chunk in chunks]

    def _draft(self, rows: Sequence[HeadRow], count: int) -> list[tuple[int, ...]]:
        batch = HeadBatch([row.state for row in rows], self.arrays)
        ends = np.array([row.end - 1 for row in rows])
        first = np.zeros((len(rows), batch.num_new), np.int64)
        for places, row in zip(first, rows, strict=True):
            places[-row.state.num_hidden :] = row.known[-row.state.num_hidden :]
        tokens = self.arrays.from_host(first)
        hidden = batch.padded([row.state.hidden for row in rows])
        offsets, drawn = ends - batch.num_new, []
        for number in range(count):
            output = self._run(tokens, hidden, offsets, batch)
            if not number:
                batch.keep_new()
            hidden, offsets = output[:, -1:], ends + number
            tokens = self._sample(hidden[:, 0], rows, number)
            drawn.append(tokens)
        lists = self.arrays.concatenate(drawn, 1).tolist()
        return [tuple(takewhile(lambda token: token >= 0, tokens)) for tokens in lists]

    @abstractmethod
    def _run(
        self, tokens: Array, hidden: Array, offsets: NDArray[np.int64], batch: "HeadBatch"
    ) -> Array:
        """Return the normed outputs ``[rows, tokens, size]``; `batch` gets keys and values.

        Args:
            tokens: ``[rows, tokens]``, padded on the left.
            hidden: Hidden states before these, ``[rows, tokens, size]``.
            offsets: The position of each row's first token; negative only where that is padding.
        """

    @abstractmethod
    def _sample(self, hidden: Array, rows: Sequence[HeadRow], number: int) -> Array:
        """Sample a token of each row, ``[rows, 1]``; negative where that fails.

        Args:
            hidden: ``[rows, size]``.
            number: How many tokens of the draft were sampled before.
        """


class HeadBatch:
    """Keys and values of several rows, padded on the left.

    Attributes:
        num_new: The most new entries of a row in the first pass.
    """

    def __init__(self, states: Sequence[HeadState], arrays: Arrays) -> None:
        self._states, self._arrays = states, arrays
        self._held = [state.num_entries for state in states]
        self._new = [state.num_hidden for state in states]
        self.num_new = max(self._new)
        self._longest = max(self._held)
        self._pair: tuple[Array, Array] | None = None
        some = next((state.pair for state in states if state.pair is not None), None)
        if some is not None:
            pairs = [state.pair or tuple(part[:, :0] for part in some) for state in states]
            keys, values = (
                self._stack([self._pad(part, self._longest, axis=1) for part in parts])
                for parts in zip(*pairs, strict=True)
            )
            self._pair = keys, values

    @property
    def num_done(self) -> int:
        return 0 if self._pair is None else self._pair[0].shape[2]

    def padded(self, rows: Sequence[Array]) -> Array:
        return self._stack([self._pad(row, self.num_new, axis=0) for row in rows])

    def mask(self, num_queries: int) -> NDArray[np.bool_]:
        """Return which entries the next ones attend to, as ``[rows, 1, queries, entries]``."""
        done = self.num_done
        places = np.arange(done + num_queries)
        queries = places[done:, None]
        held, new = (np.array(n)[:, None] for n in (self._held, self._new))
        is_old = places < self._longest
        is_held = np.where(is_old, places >= self._longest - held, True)
        is_new = np.where(is_old, True, places - self._longest >= self.num_new - new)
        is_seen = (places <= queries)[None] & (is_held & is_new)[:, None]
        # Padding attends to itself, because the attention to nothing is undefined.
        mask: NDArray[np.bool_] = (is_seen | (places == queries)[None])[:, None]
        return mask

    def update(self, keys: Array, values: Array, *_: Any, **__: Any) -> tuple[Array, Array]:
        """Add keys and values, and return all, as the libraries' caches do."""
        if self._pair is not None:
            keys, values = (
                self._arrays.concatenate(both, 2)
                for both in zip(self._pair, (keys, values), strict=True)
            )
        self._pair = keys, values
        return self._pair

    def keep_new(self) -> None:
        """Let the states have the entries of the first pass."""
        if self._pair is None:
            raise RuntimeError("the head's layer keeps no keys and values")
        for index, (state, count) in enumerate(zip(self._states, self._new, strict=True)):
            keys, values = (part[index, :, -count:] for part in self._pair)
            state.keep(keys, values)
        self._arrays.start([array for state in self._states for array in state.pair or ()])

    def _stack(self, arrays: Sequence[Array]) -> Array:
        return self._arrays.concatenate([array[None] for array in arrays], 0)

    def _pad(self, array: Array, size: int, axis: int) -> Array:
        shape = [*array.shape]
        shape[axis] = size - shape[axis]
        if not shape[axis]:
            return array
        return self._arrays.concatenate([self._arrays.zeros(shape, array), array], axis)
