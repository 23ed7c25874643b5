"""Runs a loaded model: many tokens of one sequence, or one token of many sequences.

While a model loads, the runner compares batched rows with rows that run alone, and chooses the best
batching that gives the same results: several groups per pass, one group per pass, or one row per
pass.
"""

import enum
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import (
    Array,
    capacity_for,
    has_index,
    probe,
)
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda.decode import KernelStep
from semantic.adapters.outbound.backends.mlx.cuda.linear import MAX_ROWS, MAX_STEP_ROWS
from semantic.adapters.outbound.backends.mlx.cuda.tuning import has_only_custom_layers, untune
from semantic.adapters.outbound.backends.mlx.decode import (
    CompiledSteps,
    LastToken,
    keep_all_tokens,
    keep_last_token,
    views,
    wrap_attention,
)
from semantic.adapters.outbound.backends.mlx.groups import Group, GroupStep, MlxSequence, RowGroups
from semantic.adapters.outbound.backends.mlx.rows import PendingRow, tokens_of
from semantic.adapters.outbound.backends.mlx.sampling import (
    PendingScores,
    PendingToken,
    draw_rows,
    input_tokens,
)
from semantic.adapters.outbound.backends.mlx.vision.tower import ChunkImages, LanguageInputs
from semantic.domain.errors import InvalidRequestError
from semantic.domain.images.spans import is_image_id
from semantic.domain.spec import LayerKind

Tokens: TypeAlias = tuple[int, ...] | PendingToken

_LOG = logging.getLogger(__name__)
_ROW_COUNTS = (2, 9, 17, MAX_ROWS + 1)  # at these counts, kernels differ from those for fewer rows
_PROBLEMS = (ValueError, TypeError, AttributeError, IndexError, RuntimeError)
_PADDED = 128  # prompts are padded to a multiple of this many tokens, where that is safe
_MIN_PADDED = 256  # shorter prompts are not padded
_PADDED_ROWS = 8  # tile of the custom kernels; steps with draft tokens are padded to it
_CHUNK_COUNTS = (32, 64, 128, 256, 512, 1024)  # of an attention plan, for up to about 60,000 tokens
_TOLERANCES = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}


class Batching(enum.Enum):
    """Which rows share a pass, from the fastest to the last resort."""

    GROUPS = "all rows"
    GROUP = "rows of similar length"
    ALONE = "one row"


class MlxRunner:
    """A model and the arrays of its sequences.

    Attributes:
        latest: Output of the last decode pass; once it is evaluated, all its writes are complete.
        can_draft: Whether draft tokens can be rows of a pass, and be dropped afterwards.
    """

    def __init__(
        self,
        model: Any,
        make_caches: Callable[[], list[Any]],
        inputs: LanguageInputs | None = None,
    ) -> None:
        """Inspect the model's caches and determine how it can be batched.

        Args:
            model: Of mlx-lm.
            make_caches: Returns its caches, empty.
            inputs: Gives it features of images; None if it takes none.

        Raises:
            UnsupportedCacheError: it keeps something that cannot be saved and restored.
        """
        self._model, self._inputs = model, inputs
        self._last = LastToken()
        self._nesting = make_caches()
        self.layout, logits = probe(model, make_caches)
        self.vocab_size: int = logits.shape[-1]
        self._body = keep_last_token(model, self._last)
        if not _is_close(probe(model, make_caches)[1], logits):
            keep_all_tokens(model)
            self._body = None
        self.groups = RowGroups(self.layout)
        self.latest: Array | None = mx.zeros(1)
        self._step = 0
        self._max_short = 1  # prompts up to this length run as rows of a decode pass
        self._compiled = CompiledSteps(model, self.layout, self._nesting)
        wrap_attention()
        self.batching = self._choose_batching()
        self.can_draft = self._is_draft_sound()
        has_rings = any(part.window for part in self.layout.parts)  # slots are not positions there
        if (
            self.can_draft
            and not has_rings
            and has_only_custom_layers(model, len(self.layout.parts))
        ):
            self._max_short = MAX_ROWS
            self.groups.are_joined = False  # the kernels take a table of addresses instead
        self._warm_up()
        if self.batching is not Batching.GROUPS:
            _LOG.info("mlx batches %s in one pass with this model", self.batching.value)

    def run(self, rows: Sequence[PendingRow]) -> list[Array]:
        """Build a step's computation and return the arrays to evaluate; mutates the sequences."""
        outputs: list[Array] = []
        by_sequence: dict[MlxSequence, PendingRow] = {}
        last: dict[MlxSequence, Tokens] = {}
        for row in rows:
            chunk, sequence = row.chunk, row.sequence
            if chunk.draw is not None:
                end = chunk.start + chunk.num_tokens
                row.token, *row.later = (
                    PendingToken(draw, chunk.seq, sequence.known, end + place)
                    for place, draw in enumerate(chunk.draws[: 1 + len(row.draft)])
                )
            by_sequence[sequence] = row
            tokens = tokens_of(row)
            is_plain = sequence.length and not chunk.targets and row.images is None
            most = self._max_short if is_plain else 0
            if isinstance(tokens, PendingToken) or len(tokens) <= most:
                last[sequence] = tokens
                continue
            num_kept = len(tokens) if chunk.targets else 1
            ids = [0 if is_image_id(token) else token for token in tokens]
            logits = self.extend(sequence, mx.array(ids, mx.int32), num_kept, row.images)
            if chunk.targets:
                scored = logits[: len(chunk.targets)]
                row.scores = PendingScores(scored, chunk.targets, chunk.num_top)
                outputs += row.scores.outputs
            arrays = [array for part in sequence.group_row()[0].arrays for array in part]
            outputs += arrays
            if row.token is not None:
                outputs += draw_rows(logits[-1:], [row.token])
            else:
                row.mark = mx.contiguous(arrays[-1].reshape(-1)[:1])
                outputs.append(row.mark)
        most = sys.maxsize if self.groups.are_joined else MAX_STEP_ROWS
        num_drafts = {sequence: len(row.draft) for sequence, row in by_sequence.items()}
        for batch in _batches(last, num_drafts, most):
            outputs += self._run_together(batch, by_sequence)
        for row in rows:
            row.sequence.last_token = row.token
        return outputs

    def _run_together(
        self, given: Mapping[MlxSequence, Tokens], rows: Mapping[MlxSequence, PendingRow]
    ) -> list[Array]:
        """Build a pass over one token per sequence and its draft tokens, or over short prompts."""
        firsts: dict[MlxSequence, int | PendingToken] = {}
        more: dict[MlxSequence, tuple[int, ...]] = {}
        for sequence, tokens in given.items():
            if isinstance(tokens, PendingToken) or len(tokens) == 1:
                firsts[sequence] = tokens if isinstance(tokens, PendingToken) else tokens[0]
                more[sequence] = rows[sequence].draft
            else:
                # The rest of a prompt runs like draft tokens, but is always accepted.
                firsts[sequence], more[sequence] = tokens[0], tokens[1:]
                self.groups.make_room(sequence, sequence.length + len(tokens))
        order, logits = self._decode(
            [*given],
            lambda ordered: input_tokens([firsts[sequence] for sequence in ordered]),
            self.batching,
            more,
        )
        drawn: list[PendingToken | None] = []
        for sequence, draft_number in order:
            row = rows[sequence]
            row.mark = logits
            if _count(given[sequence]) > 1:
                is_last = draft_number == len(more[sequence])
                drawn.append(row.token if is_last else None)
                sequence.length += bool(draft_number)
            else:
                drawn.append(row.later[draft_number - 1] if draft_number else row.token)
        return [*_draw(logits, drawn), logits]  # also computes the rows that sample no token

    def extend(
        self,
        sequence: MlxSequence,
        tokens: Array,
        num_kept: int = 1,
        images: ChunkImages | None = None,
    ) -> Array:
        """Compute tokens of one sequence; returns the logits after the last ones, lazily."""
        self._last.num_kept = num_kept
        return self._through(self._model, sequence, tokens, images)[0, -num_kept:]

    def hidden(self, sequence: MlxSequence, tokens: Array) -> Array:
        """Compute tokens of one sequence; returns the last hidden state of each, lazily.

        Raises:
            InvalidRequestError: the model does not have the usual structure.
        """
        if self._body is None:
            raise InvalidRequestError(
                "the mlx backend cannot compute embeddings with this model", param="model"
            )
        return self._through(self._body, sequence, tokens)[0, : tokens.shape[0]]

    def _through(
        self,
        run: Callable[..., Array],
        sequence: MlxSequence,
        tokens: Array,
        images: ChunkImages | None = None,
    ) -> Array:
        """Run tokens of one sequence through the model or a part of it; mutates the sequence."""
        length, num_tokens = sequence.length, tokens.shape[0]
        capacity = capacity_for(max(length + num_tokens, len(sequence.known)))
        if sequence.group is None:
            group = Group(capacity, [], [sequence])
        else:
            group = self.groups.isolate(sequence, capacity)
        room = 0 if images else group.capacity - length
        self._last.num_padding = self._num_padding(num_tokens, room)
        if self._last.num_padding:
            tokens = mx.pad(tokens, (0, self._last.num_padding))
        caches = self.layout.thaw(group.arrays or None, length, group.capacity)
        if self._inputs is not None:
            self._inputs.set_lags([sequence.lag])
        if images is not None and self._inputs is not None:
            output = self._inputs.run(run, tokens[None], caches, images)
        else:
            output = run(tokens[None], cache=caches)
        group.arrays = self.layout.freeze(caches, length + num_tokens, group.capacity)
        sequence.group = group
        sequence.length += num_tokens
        return output

    def _num_padding(self, num_tokens: int, room: int) -> int:
        """Return how many tokens to append to a prompt; the next tokens overwrite them.

        On CUDA, MLX allocates memory of a new size from the device, and frees other memory once its
        limit is reached. That waits for all running work: 60 to 100 ms per prompt. With few sizes
        this is rare. A multiplication takes no longer with padding.
        """
        num_padding = -num_tokens % _PADDED
        is_harmless = self._body is not None and not self.layout.not_full
        is_worth_it = cuda.is_in_use() and num_tokens >= _MIN_PADDED
        fits = num_tokens + num_padding <= room
        return num_padding if is_harmless and is_worth_it and fits else 0

    def _decode(
        self,
        sequences: Sequence[MlxSequence],
        feed: Callable[[Sequence[MlxSequence]], Array],
        batching: Batching,
        drafts: Mapping[MlxSequence, tuple[int, ...]] | None = None,
    ) -> tuple[list[tuple[MlxSequence, int]], Array]:
        """Compute one token per sequence, and draft tokens after it.

        Args:
            sequences: Each holds at least one token.
            feed: Returns the tokens of sequences, in their order.
            drafts: Draft tokens by sequence; only with `Batching.GROUPS`.

        Returns:
            Each row's sequence with the number of its draft token (0 for the first token), and the
            rows' logits.
        """
        if batching is Batching.ALONE:
            rows = [self.extend(sequence, feed([sequence])) for sequence in sequences]
            return [(sequence, 0) for sequence in sequences], mx.concatenate(rows)
        self._step += 1
        wanted = set(sequences)
        batches: list[list[Group]] = [self.groups.assemble(sequences, self._step)]
        if batching is Batching.GROUP:
            batches = [[group] for group in batches[0]]
        order: list[tuple[MlxSequence, int]] = []
        outputs = []
        for batch in batches:
            members = [[m for m in group.members if m and m in wanted] for group in batch]
            rows = [member for group in members for member in group]
            if drafts and any(drafts[row] for row in rows):
                outputs.append(
                    self._pass(batch, members, _drafted_tokens(members, feed, drafts), drafts)
                )
                order += [row for group in members for row in _drafted_rows(group, drafts)]
            else:
                outputs.append(self._pass(batch, members, feed(rows)))
                order += [(row, 0) for row in rows]
        return order, outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _pass(
        self,
        groups: Sequence[Group],
        members: Sequence[Sequence[MlxSequence]],
        tokens: Array,
        drafts: Mapping[MlxSequence, tuple[int, ...]] | None = None,
    ) -> Array:
        steps: list[GroupStep] = []
        start = 0
        for group, rows in zip(groups, members, strict=True):
            sizes = tuple(len(drafts[row]) for row in rows) if drafts else ()
            steps.append(GroupStep(group, tuple(row.length for row in rows), start, sizes))
            start = steps[-1].place.stop
        has_custom_layers, num_padding = self._max_short > 1, _padded(start) - start
        if has_custom_layers and drafts and num_padding and steps[-1].pad(num_padding):
            tokens = mx.pad(tokens, (0, num_padding))
        positions = [position for step in steps for position in step.all_positions]
        kernels = KernelStep(steps, mx.array(positions), self.groups.table)
        if has_custom_layers:
            logits = self._compiled.run(kernels, tokens)
            logits = logits[:start] if steps[-1].num_padding else logits
        else:
            if self._inputs is not None:
                order = (row for rows in members for row, _ in _drafted_rows(rows, drafts or {}))
                self._inputs.set_lags([row.lag for row in order])
            caches = views(self.layout, self._nesting, steps, kernels)
            logits = self._model(tokens[:, None], cache=caches)[:, -1]
        self.latest = logits
        for rows in members:
            for row in rows:
                row.length += 1
        return logits

    def release(self) -> None:
        self._model = self._body = self._inputs = None
        self._compiled.release()
        self.latest = None
        self.layout.release()

    # -- the choice of batching -----------------------------------------------------------------

    def _choose_batching(self) -> Batching:
        if any(map(has_index, self._nesting)):
            return (
                Batching.ALONE
            )  # an index selects tokens in long contexts only: no probe shows it
        if self._is_sound(Batching.GROUPS):
            return Batching.GROUPS
        if num_layers := untune(self._model):
            _LOG.warning("custom kernels disagree on %d layers; disabled", num_layers)
            return self._choose_batching()
        return Batching.GROUP if self._is_sound(Batching.GROUP) else Batching.ALONE

    def _warm_up(self) -> None:
        """Compile all kernels that a step may need, so that no request waits for them."""
        if not cuda.is_available() or self.batching is not Batching.GROUPS:
            return
        for count in _ROW_COUNTS:
            rows = [MlxSequence([]) for _ in range(1 if self.can_draft else count)]
            for row in rows:
                self.extend(row, mx.arange(2))
            drafts = {rows[0]: (0,) * (count - 1)} if self.can_draft else None
            _, logits = self._decode(
                rows, lambda given: mx.zeros(len(given), mx.int32), Batching.GROUPS, drafts
            )
            mx.eval(logits)
        if self._max_short > 1:
            self._prepare_short()

    def _prepare_short(self) -> None:
        row = MlxSequence([])
        self.extend(row, mx.arange(2))
        table = self.groups.table([row.group_row()[0]])
        for num_rows in range(_PADDED_ROWS, MAX_ROWS + 1, _PADDED_ROWS):
            for num_chunks in _CHUNK_COUNTS:
                self._compiled.prepare(num_rows, num_chunks, table)

    def _is_sound(self, batching: Batching) -> bool:
        """Whether rows batched this way get the same logits as alone."""
        token = mx.array([1], mx.int32)
        alone = [self.extend(row, token) for row in self._rows()]
        try:
            given = self._rows()
            rows, logits = self._decode(given, lambda rows: mx.repeat(token, len(rows)), batching)
            expected = mx.concatenate([alone[given.index(row)] for row, _ in rows])
            return _is_close(logits, expected)
        except _PROBLEMS as error:
            _LOG.debug("batching %s in one pass fails: %s", batching.value, error)
            return False

    def _is_draft_sound(self) -> bool:
        """Whether draft tokens get the same logits as when computed one after another."""
        if self.batching is not Batching.GROUPS or self.layout.of_kind(LayerKind.STATE):
            return False
        tokens = [mx.array([token], mx.int32) for token in (1, 2, 3)]
        alone = [[self.extend(row, token) for token in tokens] for row in self._rows()]
        given = self._rows()
        drafts = dict(zip(given, ((2, 3), (), (2,)), strict=True))
        try:
            rows, logits = self._decode(
                given, lambda some: mx.repeat(tokens[0], len(some)), Batching.GROUPS, drafts
            )
            expected = mx.concatenate([alone[given.index(row)][number] for row, number in rows])
            return _is_close(logits, expected)
        except _PROBLEMS as error:
            _LOG.debug("draft tokens cannot be verified: %s", error)
            return False

    def _rows(self) -> list[MlxSequence]:
        """Create two sequences of different length in one group, and one in another."""
        rows = [MlxSequence([]) for _ in range(3)]
        for row, length in zip(rows, (3, 6, 4), strict=True):
            self.extend(row, mx.arange(length))
        self.groups.isolate(rows[-1], capacity_for(rows[-1].group_row()[0].capacity + 1))
        return rows


def _padded(num_rows: int) -> int:
    """Round up the rows of a step with draft tokens, so that few sizes occur."""
    size = _PADDED_ROWS if num_rows <= MAX_ROWS else MAX_ROWS
    return -(-num_rows // size) * size


def _count(tokens: Tokens) -> int:
    return 1 if isinstance(tokens, PendingToken) else len(tokens)


def _batches(
    given: Mapping[MlxSequence, Tokens], num_drafts: Mapping[MlxSequence, int], most: int
) -> list[dict[MlxSequence, Tokens]]:
    """Split sequences into passes of at most `most` rows; decoding sequences come first."""
    batches: list[dict[MlxSequence, Tokens]] = []
    num_rows = most
    for sequence in sorted(given, key=lambda sequence: _count(given[sequence]) > 1):
        size = _count(given[sequence]) + num_drafts[sequence]
        if num_rows + size > most:
            batches.append({})
            num_rows = 0
        batches[-1][sequence] = given[sequence]
        num_rows += size
    return batches


def _drafted_rows(
    group: Sequence[MlxSequence], drafts: Mapping[MlxSequence, tuple[int, ...]]
) -> list[tuple[MlxSequence, int]]:
    """Return a group's rows in step order: all sequences, then all draft tokens from 1 on."""
    drafted = [(row, n) for row in group for n in range(1, len(drafts.get(row, ())) + 1)]
    return [*((row, 0) for row in group), *drafted]


def _drafted_tokens(
    members: Sequence[Sequence[MlxSequence]],
    feed: Callable[[Sequence[MlxSequence]], Array],
    drafts: Mapping[MlxSequence, tuple[int, ...]],
) -> Array:
    pieces = []
    for group in members:
        pieces.append(feed(group))
        draft_tokens = [token for row in group for token in drafts[row]]
        pieces += [mx.array(draft_tokens, mx.int32)] if draft_tokens else []
    return mx.concatenate(pieces)


def _draw(logits: Array, rows: Sequence[PendingToken | None]) -> list[Array]:
    places = [place for place, row in enumerate(rows) if row is not None]
    drawn = [row for row in rows if row is not None]
    if not drawn:
        return []
    return draw_rows(logits if len(places) == len(rows) else logits[mx.array(places)], drawn)


def _is_close(logits: Array, expected: Array) -> bool:
    tolerance = _TOLERANCES.get(expected.dtype, 1e-1)
    wide, other = logits.astype(mx.float32), expected.astype(mx.float32)
    limit = tolerance * mx.maximum(mx.max(mx.abs(other)), 1e-3)
    # A model with NaN logits cannot be compared; its rows fail when they are sampled.
    is_judged = mx.all(mx.isfinite(other))
    return bool(mx.logical_or(mx.max(mx.abs(wide - other)) <= limit, ~is_judged).item())
