"""Runs a loaded model: many tokens of one sequence, or one token of many sequences."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.drafting import Checkpoint
from semantic.adapters.outbound.backends.mlx.caches import (
    Array,
    capacity_for,
    has_index,
    probe,
)
from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
from semantic.adapters.outbound.backends.mlx.cuda.decode import KernelStep
from semantic.adapters.outbound.backends.mlx.cuda.linear import MAX_ROWS, MAX_STEP_ROWS
from semantic.adapters.outbound.backends.mlx.cuda.tuning import has_only_custom_layers
from semantic.adapters.outbound.backends.mlx.decode import (
    CompiledSteps,
    LastToken,
    keep_all_tokens,
    keep_last_token,
    views,
    wrap_attention,
)
from semantic.adapters.outbound.backends.mlx.groups import Group, GroupStep, MlxSequence, RowGroups
from semantic.adapters.outbound.backends.mlx.loop import kernel as loop_kernel
from semantic.adapters.outbound.backends.mlx.loop.kernel import LoopKernel
from semantic.adapters.outbound.backends.mlx.probing import Batching, Probes, is_close
from semantic.adapters.outbound.backends.mlx.rows import (
    PendingRow,
    Tokens,
    drafted_rows,
    drafted_tokens,
    num_given,
    split_passes,
    tokens_of,
)
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

_LOG = logging.getLogger(__name__)
_ROW_COUNTS = (2, 9, 17, MAX_ROWS + 1)  # at these counts, kernels differ from those for fewer rows
_PADDED = 128  # prompts are padded to a multiple of this many tokens, where that is safe
_MIN_PADDED = 256  # shorter prompts are not padded
_PADDED_ROWS = 8  # tile of the custom kernels; steps with draft tokens are padded to it
_CHUNK_COUNTS = (32, 64, 128, 256, 512, 1024)  # of an attention plan, for up to about 60,000 tokens


class MlxRunner:
    """A model and the arrays of its sequences.

    Attributes:
        latest: Output of the last decode pass; once it is evaluated, all its writes are complete.
        can_draft: Whether draft tokens can follow a token in a pass, and be dropped afterwards.
        keeps_hidden: Whether sequences get their hidden states, for the model's head.
    """

    def __init__(
        self,
        model: Any,
        make_caches: Callable[[], list[Any]],
        inputs: LanguageInputs | None = None,
        *,
        has_head: bool = False,
    ) -> None:
        """Inspect the model's caches and determine how it can be batched.

        Args:
            model: Of mlx-lm.
            make_caches: Returns its caches, empty.
            inputs: Gives it features of images; None if it takes none.
            has_head: Whether it has a head for draft tokens, which needs its hidden states.

        Raises:
            UnsupportedCacheError: it keeps something that cannot be saved and restored.
        """
        self._model, self._inputs = model, inputs
        self._last = LastToken()
        self._nesting = make_caches()
        self.layout, logits = probe(model, make_caches)
        self.vocab_size: int = logits.shape[-1]
        self._body = keep_last_token(model, self._last)
        if not is_close(probe(model, make_caches)[1], logits):
            keep_all_tokens(model)
            self._body = None
        self.groups = RowGroups(self.layout)
        self._recurrent = self.layout.of_kind(LayerKind.STATE)
        self.latest: Array | None = mx.zeros(1)
        self._step = 0
        self._max_short = 1  # prompts up to this length run as rows of a decode pass
        self._compiled = CompiledSteps(model, self.layout, self._nesting)
        wrap_attention()
        probes = Probes(self, has_index=any(map(has_index, self._nesting)))
        self.batching = probes.choose_batching(model)
        self._are_drafts_rows = probes.are_drafts_rows(self.batching)
        self.can_draft = self._are_drafts_rows or probes.can_drafts_follow()
        self.keeps_hidden = has_head and self.can_draft and self._body is not None
        has_rings = any(part.window for part in self.layout.parts)  # slots are not positions there
        if (
            self._are_drafts_rows
            and not (has_rings or self.keeps_hidden)
            and has_only_custom_layers(model, len(self.layout.parts))
        ):
            self._max_short = MAX_ROWS
            self.groups.are_joined = False  # the kernels take a table of addresses instead
        self._warm_up()
        self._last.passed = [] if self.keeps_hidden else None
        if self.batching is not Batching.GROUPS:
            _LOG.info("mlx batches %s in one pass with this model", self.batching.value)

    def run(self, rows: Sequence[PendingRow]) -> list[Array]:
        """Build a step's computation and return the arrays to evaluate; mutates the sequences."""
        outputs: list[Array] = []
        if self.keeps_hidden:
            self._last.passed = []
        by_sequence: dict[MlxSequence, PendingRow] = {}
        last: dict[MlxSequence, Tokens] = {}
        for row in rows:
            chunk, sequence = row.chunk, row.sequence
            sequence.checkpoint = None
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
            is_short = isinstance(tokens, PendingToken) or len(tokens) <= most
            if is_short and (self._are_drafts_rows or not row.draft):
                last[sequence] = tokens
            elif not isinstance(tokens, PendingToken):
                outputs += self._run_alone(row, (*tokens, *row.draft))
        most = sys.maxsize if self.groups.are_joined else MAX_STEP_ROWS
        num_drafts = {sequence: len(row.draft) for sequence, row in by_sequence.items()}
        for batch in split_passes(last, num_drafts, most):
            outputs += self._run_together(batch, by_sequence)
        for row in rows:
            row.sequence.last_token = row.token
        return outputs

    def _run_alone(self, row: PendingRow, tokens: tuple[int, ...]) -> list[Array]:
        """Build a pass over a chunk's tokens and its draft tokens."""
        chunk, sequence = row.chunk, row.sequence
        num_kept = len(tokens) if chunk.targets else 1 + len(row.draft)
        ids = [0 if is_image_id(token) else token for token in tokens]
        if row.draft and self._recurrent:
            group = self.groups.isolate(sequence, 0)
            held = [[*group.arrays[place]] for place in self._recurrent]
            sequence.checkpoint = Checkpoint(sequence.length, held)
        logits = self.extend(sequence, mx.array(ids, mx.int32), num_kept, row.images)
        sequence.length -= len(row.draft)
        outputs = self._keep_hidden([(sequence, 0)] * len(tokens), {sequence: row})
        if chunk.targets:
            scored = logits[: len(chunk.targets)]
            row.scores = PendingScores(scored, chunk.targets, chunk.num_top)
            outputs += row.scores.outputs
        arrays = [array for part in sequence.group_row()[0].arrays for array in part]
        outputs += arrays
        if row.token is not None:
            drawn = [row.token, *row.later]
            return outputs + draw_rows(logits[-len(drawn) :], drawn)
        row.mark = mx.contiguous(arrays[-1].reshape(-1)[:1])
        return [*outputs, row.mark]

    def rewind(self, sequence: MlxSequence, end: int) -> None:
        """Return to a sequence's checkpoint, and compute its tokens up to `end` again.

        Raises:
            ValueError: it has no checkpoint.
        """
        point = sequence.checkpoint
        if point is None:
            raise ValueError("the sequence has no checkpoint")
        group = self.groups.isolate(sequence, 0)
        for place, arrays in zip(self._recurrent, point.arrays, strict=True):
            group.arrays[place] = [*arrays]
        sequence.length = point.length
        if end > point.length:
            self.extend(sequence, mx.array(sequence.known[point.length : end], mx.int32))
            mx.async_eval(sequence.group_row()[0].arrays)
            if self.keeps_hidden:
                self._last.passed = []

    def _keep_hidden(
        self,
        order: Sequence[tuple[MlxSequence, int]],
        rows: Mapping[MlxSequence, PendingRow],
    ) -> list[Array]:
        """Give sequences the hidden states of the last passes; returns arrays to evaluate.

        Those of draft tokens wait in their row until they are verified.
        """
        if not self.keeps_hidden:
            return []
        hidden, places = self._last.take_passed(), dict[MlxSequence, list[int]]()
        for place, (sequence, _) in enumerate(order):
            places.setdefault(sequence, []).append(place)
        outputs = []
        for sequence, own in places.items():
            row, states = rows[sequence], hidden[mx.array(own)]
            if row.draft:
                row.hidden = states
            else:
                outputs.append(sequence.ahead.add(row.chunk.start, states))
        return outputs

    def _run_together(
        self, given: Mapping[MlxSequence, Tokens], rows: Mapping[MlxSequence, PendingRow]
    ) -> list[Array]:
        """Build a pass over one token per sequence and its draft tokens, or over short prompts."""
        firsts: dict[MlxSequence, int | PendingToken] = {}
        more: dict[MlxSequence, Sequence[int]] = {}
        for sequence, tokens in given.items():
            if isinstance(tokens, PendingToken) or len(tokens) == 1:
                firsts[sequence] = tokens if isinstance(tokens, PendingToken) else tokens[0]
                more[sequence] = rows[sequence].draft
            else:
                # The rest of a prompt runs like draft tokens, but is always accepted.
                firsts[sequence], more[sequence] = tokens[0], tokens[1:]
                self.groups.make_room(sequence, sequence.length + len(tokens))
        order, logits = self.decode(
            [*given],
            lambda ordered: input_tokens([firsts[sequence] for sequence in ordered]),
            self.batching,
            more,
        )
        drawn: list[PendingToken | None] = []
        for sequence, draft_number in order:
            row = rows[sequence]
            row.mark = logits
            if num_given(given[sequence]) > 1:
                is_last = draft_number == len(more[sequence])
                drawn.append(row.token if is_last else None)
                sequence.length += bool(draft_number)
            else:
                drawn.append(row.later[draft_number - 1] if draft_number else row.token)
        hidden = self._keep_hidden(order, rows)
        return [
            *_draw(logits, drawn),
            *hidden,
            logits,
        ]  # also computes the rows that sample no token

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

    def decode(
        self,
        sequences: Sequence[MlxSequence],
        feed: Callable[[Sequence[MlxSequence]], Array],
        batching: Batching,
        drafts: Mapping[MlxSequence, Sequence[int]] | None = None,
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
                    self._pass(batch, members, drafted_tokens(members, feed, drafts), drafts)
                )
                order += [row for group in members for row in drafted_rows(group, drafts)]
            else:
                outputs.append(self._pass(batch, members, feed(rows)))
                order += [(row, 0) for row in rows]
        return order, outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _pass(
        self,
        groups: Sequence[Group],
        members: Sequence[Sequence[MlxSequence]],
        tokens: Array,
        drafts: Mapping[MlxSequence, Sequence[int]] | None = None,
    ) -> Array:
        steps: list[GroupStep] = []
        start = 0
        for group, rows in zip(groups, members, strict=True):
            sizes = tuple(len(drafts[row]) for row in rows) if drafts else ()
            steps.append(GroupStep(group, tuple(row.length for row in rows), start, sizes))
            start = steps[-1].place.stop
        has_custom_layers, num_padding = self.has_custom_layers, _padded(start) - start
        if has_custom_layers and drafts and num_padding and steps[-1].pad(num_padding):
            tokens = mx.pad(tokens, (0, num_padding))
        positions = [position for step in steps for position in step.all_positions]
        kernels = KernelStep(steps, mx.array(positions), self.groups.table)
        if has_custom_layers:
            logits = self._compiled.run(kernels, tokens)
            logits = logits[:start] if steps[-1].num_padding else logits
        else:
            if self._inputs is not None:
                order = (row for rows in members for row, _ in drafted_rows(rows, drafts or {}))
                self._inputs.set_lags([row.lag for row in order])
            caches = views(self.layout, self._nesting, steps, kernels)
            logits = self._model(tokens[:, None], cache=caches)[:, -1]
        self.latest = logits
        for rows in members:
            for row in rows:
                row.length += 1
        return logits

    @property
    def has_custom_layers(self) -> bool:
        """Whether all layers run on the custom kernels, over arrays of one sequence each."""
        return self._max_short > 1

    def make_loop(self) -> LoopKernel | None:
        """Return the kernel that samples tokens in a row; None if it does not support the model."""
        return loop_kernel.make_loop(self._model) if self.has_custom_layers else None

    def run_loop(self, sequences: Sequence[MlxSequence], launch: Callable[[Array], Array]) -> Array:
        """Start a loop over sequences that have room for its tokens.

        `launch` gets the table of their addresses; see `LoopKernel`. Returns without waiting. Does
        not extend the sequences.
        """
        self._step += 1
        groups = self.groups.assemble(sequences, self._step)
        tokens = launch(self.groups.table(groups))
        self.latest = tokens
        mx.async_eval([tokens, *self.groups.moved_arrays()])
        return tokens

    def release(self) -> None:
        self._model = self._body = self._inputs = None
        self._compiled.release()
        self.latest = None
        self.layout.release()

    def _warm_up(self) -> None:
        """Compile all kernels that a step may need, so that no request waits for them."""
        if not cuda.is_available() or self.batching is not Batching.GROUPS:
            return
        for count in _ROW_COUNTS:
            rows = [MlxSequence([]) for _ in range(1 if self._are_drafts_rows else count)]
            for row in rows:
                self.extend(row, mx.arange(2))
            drafts = {rows[0]: (0,) * (count - 1)} if self._are_drafts_rows else None
            _, logits = self.decode(
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


def _padded(num_rows: int) -> int:
    """Round up the rows of a step with draft tokens, so that few sizes occur."""
    size = _PADDED_ROWS if num_rows <= MAX_ROWS else MAX_ROWS
    return -(-num_rows // size) * size


def _draw(logits: Array, rows: Sequence[PendingToken | None]) -> list[Array]:
    places = [place for place, row in enumerate(rows) if row is not None]
    drawn = [row for row in rows if row is not None]
    if not drawn:
        return []
    return draw_rows(logits if len(places) == len(rows) else logits[mx.array(places)], drawn)
