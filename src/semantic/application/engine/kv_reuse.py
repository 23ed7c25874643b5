"""Reuses the KV cache between requests, and seals it into blocks.

A request starts from the best of three sources: an idle copy that is still open, a running
sequence, or sealed blocks. The engine seals the request's own blocks as they fill, and its tail
when the request ends or is preempted. Used on the device thread only.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semantic.application.cache.restore_plan import RestorePlan, worth_reading
from semantic.application.cache.store import AgentCacheStore
from semantic.application.engine.generation import Generation
from semantic.application.engine.memory import IdleCopies
from semantic.application.engine.restore import LoadPace, Restore
from semantic.application.engine.steps import ChunkBudget
from semantic.domain.agents import Reuse
from semantic.domain.blocks import BlockName
from semantic.domain.errors import CacheCorruptionError, DeviceLostError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import KVPayload, ModelBackendPort, SequenceId

_log = logging.getLogger(__name__)

_MAX_FAILED_RESTORES = 3
_WORTH_WAITING_S = 0.1  # seconds of prefill that a request waits for, instead of repeating them


@dataclass(frozen=True, slots=True)
class OpenSource:
    """An open sequence whose first tokens a request can start from.

    Attributes:
        is_taken_over: True if the request truncates and continues this idle sequence; False if it
            forks it.
    """

    seq: SequenceId
    num_tokens: int
    is_taken_over: bool = False


class PrefixSharing:
    """Moves state between the backend's sequences and the store.

    Attributes:
        pace: How much state to load in a step while other sequences decode.
        can_cut_anywhere: Whether a sequence can resume at any token. Models with window or
            recurrent layers can resume only where their state was sealed.
    """

    def __init__(
        self,
        backend: ModelBackendPort,
        store: AgentCacheStore,
        idle: IdleCopies,
        budget: ChunkBudget,
        on_ready: Callable[[], None],
    ) -> None:
        """`on_ready` is called on any thread when a read that a request waits for completes."""
        self._backend = backend
        self._store = store
        self._on_ready = on_ready
        self._idle = idle
        self._budget = budget
        self.pace = LoadPace()
        self.can_cut_anywhere = backend.spec.kinds == (LayerKind.FULL,)

    # -- start ----------------------------------------------------------------------------------

    def prefetch(self, generation: Generation) -> None:
        parts = self._plan(generation).parts
        begun = self._store.prefetch(parts)
        generation.prefix.prefetched_parts.update(wanted.key for wanted in begun)

    def should_wait(self, generation: Generation, running: Sequence[Generation]) -> bool:
        """Whether an older sequence is computing a prefix that this request can reuse."""
        known = None
        for other in running:
            if other.order > generation.order or not other.is_prefilling:
                continue
            if other.job.is_ephemeral:
                continue  # its state is gone as soon as it ends
            if other.is_background and not generation.is_background:
                continue  # a background request may be delayed for long
            shared = self._num_usable(other, generation)
            if shared <= other.progress.num_computed:
                continue
            if known is None:
                known = self._plan(generation).end
            # The other's computed tokens are usable now only if the model can resume anywhere.
            at_once = max(known, other.progress.num_computed if self.can_cut_anywhere else 0)
            if shared - at_once >= self._least_awaited():
                return True
        return False

    def _least_awaited(self) -> int:
        """Tokens worth waiting for: a block, or fewer on a device that takes long for them."""
        least, cost = self._backend.spec.block_tokens, self._budget.seconds_per_token
        if not cost or not self.can_cut_anywhere:
            return least
        return min(least, math.ceil(_WORTH_WAITING_S / cost))

    def choose_source(
        self, generation: Generation, running: Sequence[Generation]
    ) -> OpenSource | None:
        """Return the open sequence to start from; None if sealed blocks cover more tokens."""
        best: OpenSource | None = None
        plan = self._plan(generation)
        if not generation.job.is_ephemeral:
            self._store.touch_parts(plan.parts)  # so that making room evicts other blocks
        num_tokens = plan.end
        idle = self._idle.best_for(generation)
        if idle is not None and idle[1] >= num_tokens:
            copy, num_tokens = idle
            is_whole = num_tokens == len(copy.tokens) or (
                self.can_cut_anywhere and num_tokens >= copy.num_settled
            )
            is_own = copy.agent == generation.job.agent and self.can_cut_anywhere
            may_take = not generation.job.is_ephemeral
            best = OpenSource(copy.seq, num_tokens, is_taken_over=may_take and (is_whole or is_own))
        for other in running:
            shared = generation.num_shared(other.job.root, other.tokens)
            shared = generation.without_cut_image(min(shared, other.progress.num_computed))
            is_nearer = best is None and 0 < shared == num_tokens
            if other is not generation and (shared > num_tokens or is_nearer):
                num_tokens = shared
                best = OpenSource(other.seq, shared)
        return best

    def open_sequence(self, generation: Generation, source: OpenSource | None) -> None:
        """Open a request's sequence from another one, or start to restore it.

        `advance_restore` continues a restore. Mutates the request.

        Raises:
            InvalidRequestError: the backend refuses the tokens.
        """
        plan = self._plan(generation)  # plan again: making room may have evicted blocks
        if source is not None and source.is_taken_over:
            reached = self._backend.truncate(source.seq, source.num_tokens)
            num_ahead = self._idle.use(source.seq, reached)
            self._idle.remove(source.seq)
            if reached == source.num_tokens:
                self._resume_hot(generation, reached, plan, num_ahead)
                return
            self._backend.close_sequence(source.seq)
        elif source and self._backend.fork(source.seq, generation.seq, source.num_tokens):
            num_ahead = self._idle.use(source.seq, source.num_tokens)
            self._resume_hot(generation, source.num_tokens, plan, num_ahead)
            return
        self._begin_restore(generation, plan)

    def advance_restore(self, generation: Generation, max_bytes: int) -> None:
        """Load more of a sequence that is being restored; mutates the request.

        If blocks cannot be loaded, the sequence starts again: without the corrupt blocks or, if the
        device failed, without any blocks.
        """
        restore = generation.prefix.restore
        if restore is None:
            return
        try:
            is_complete = restore.advance(self._backend, max_bytes)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - caching never fails a request
            self._restart(generation, restore, error)
            return
        if is_complete:
            self._resume_restored(generation, restore, restore.plan)

    def end_restore_early(self, generation: Generation) -> None:
        """End a restore early and compute the rest of the tokens.

        Keeps the loaded part if the model can resume at its end; otherwise computes all tokens.
        """
        restore = generation.prefix.restore
        if restore is None:
            return
        loaded = restore.loaded_plan
        can_resume = loaded is not None and generation.without_cut_image(loaded.end) == loaded.end
        if loaded is not None and can_resume and self.can_cut_anywhere:
            self._resume_restored(generation, restore, loaded)
            return
        generation.prefix.end_restore()
        self._backend.close_sequence(generation.seq)
        self._begin_restore(generation, RestorePlan.nothing(generation.job.root))

    # -- end ------------------------------------------------------------------------------------

    def seal(self, generation: Generation, *, is_last: bool = False) -> None:
        """Seal the blocks that are full; set `is_last` if no more tokens will be computed."""
        sealing, num_computed = generation.sealing, generation.progress.num_computed
        while sealing.is_active:
            start, end = sealing.block_at(sealing.num_sealed)
            if end > num_computed:
                break
            is_end = is_last and end == num_computed
            name = self._seal_block(generation, start, end, is_end=is_end)
            sealing.count_sealed(name, start, end)
        if not self.can_cut_anywhere and num_computed == generation.num_prompt:
            self._seal_boundary(generation)

    def seal_tail(self, generation: Generation) -> None:
        """Seal the full blocks and the partial block after them, at a request's end or preemption.

        A partial block that ends inside an image is not sealed: no request could resume there.
        Sets `Sealing.pointer` to the last sealed block.
        """
        trace, sealing = generation.job.trace, generation.sealing
        if not sealing.is_wanted:
            return
        trace.sealing = time.monotonic()
        sealing.try_again()
        self.seal(generation, is_last=True)
        start, end = sealing.num_sealed, generation.progress.num_computed
        sealing.pointer = sealing.chain if sealing.num_sealed else None
        is_whole = generation.without_cut_image(end) == end
        if sealing.is_active and start < end and is_whole:
            tail = self._seal_block(generation, start, end, is_end=True)
            if tail is not None:
                sealing.pointer, sealing.num_sealed = tail, end
        elif start == end and sealing.last_start < end:
            self._seal_end(generation)
        last = sealing.pointer or sealing.chain
        self._store.touch_chain(last)
        if self._backend.spec.num_window:
            boundaries = [*generation.job.boundaries, generation.num_prompt, end]
            self._store.settle_windows(sealing.names, last, boundaries)
        trace.sealed = time.monotonic()

    # -- inside ---------------------------------------------------------------------------------

    def _plan(self, generation: Generation) -> RestorePlan:
        """Return the prefix worth restoring; planned again when the index or the tokens change.

        Each call decides again which parts are faster to read than to compute, since disk speed
        varies; parts already prefetched for this request stay in the plan. A plan that would end
        inside an image ends before it.
        """
        end = generation.num_reusable
        while True:
            plan = self._plan_up_to(generation, end)
            end = generation.without_cut_image(plan.end)
            if end == plan.end:
                return plan

    def _plan_up_to(self, generation: Generation, end: int) -> RestorePlan:
        root, basis = generation.job.root, (self._store.version, end)
        prefix = generation.prefix
        if prefix.plan is None or prefix.plan_basis != basis:
            is_used = not generation.job.is_ephemeral
            prefix.plan = self._store.plan(root, generation.tokens[:end], is_used=is_used)
            prefix.plan_basis = basis
        cost, begun = self._budget.seconds_per_token, prefix.prefetched_parts
        return worth_reading(
            prefix.plan, root, self._store.spec, self._store.read_costs, cost, begun
        )

    def _begin_restore(self, generation: Generation, plan: RestorePlan) -> None:
        self._backend.open_sequence(generation.seq, generation.tokens, generation.job.images)
        if not plan.parts:
            generation.resume(0, plan.chain, 0)
            generation.prefix.count_reuse(Reuse(computed=generation.num_prompt))
            return
        generation.prefix.restore = Restore(
            generation.seq,
            plan,
            self._store.tiers,
            generation.prefix.prefetched_parts,
            self._on_ready,
            self.pace,
        )

    def _restart(self, generation: Generation, restore: Restore, error: Exception) -> None:
        generation.prefix.end_restore()
        generation.prefix.num_failed_restores += 1
        again = RestorePlan.nothing(generation.job.root)
        if isinstance(error, CacheCorruptionError):
            _log.warning("cannot load sealed blocks; computing them: %s", error.message)
            self._store.discard(restore.suspect_parts)
            # The remaining blocks may still be worth loading; bound the number of retries.
            if generation.prefix.num_failed_restores <= _MAX_FAILED_RESTORES:
                again = self._plan(generation)
        else:
            _log.error("the device failed to load blocks; computing them", exc_info=error)
        self._backend.close_sequence(generation.seq)
        self._begin_restore(generation, again)

    def _resume_restored(self, generation: Generation, restore: Restore, plan: RestorePlan) -> None:
        generation.prefix.end_restore()
        generation.resume(plan.end, plan.chain, plan.num_whole)
        generation.prefix.count_reuse(restore.reuse(generation.num_prompt))
        generation.job.trace.restored_bytes += restore.num_bytes

    def _resume_hot(
        self, generation: Generation, num_tokens: int, plan: RestorePlan, num_ahead: int
    ) -> None:
        generation.resume(num_tokens, plan.chain, plan.num_whole)
        computed = generation.num_prompt - num_tokens
        hot = min(num_tokens, generation.num_prompt)
        generation.prefix.count_reuse(Reuse(hot=hot, computed=computed, ahead=num_ahead))

    def _seal_block(
        self, generation: Generation, start: int, end: int, *, is_end: bool
    ) -> BlockName | None:
        """Seal ``[start, end)``; returns None if that is not possible.

        Recurrent state is large, so it is sealed only at boundaries; other kinds with every block.
        """
        job = generation.job
        if job.max_kept is not None and end > job.max_kept:
            return None
        is_boundary = is_end or end in (*job.boundaries, generation.num_prompt)
        kinds = self._backend.spec.kinds
        wanted = [kind for kind in kinds if kind is not LayerKind.STATE or is_boundary]
        payloads = self._snapshots(generation, start, end, wanted)
        if LayerKind.FULL not in kinds:
            abi = self._backend.traits.kv_abi
            payloads.insert(0, KVPayload(abi, LayerKind.FULL, start, end, ()))
        if not any(payload.kind is LayerKind.FULL for payload in payloads):
            return None
        return self._keep(generation, start, end, payloads)

    def _seal_boundary(self, generation: Generation) -> None:
        """Seal window and state parts where the reply begins, inside a block that is not full."""
        start, end = generation.sealing.num_sealed, generation.num_prompt
        if not generation.sealing.is_active or start >= end:
            return
        kinds = [k for k in self._backend.spec.kinds if k is not LayerKind.FULL]
        payloads = self._snapshots(generation, start, end, kinds)
        if len(payloads) == len(kinds):
            self._keep(generation, start, end, payloads)

    def _seal_end(self, generation: Generation) -> None:
        """Add the recurrent state to a last block that was sealed before the reply ended there."""
        kinds = [k for k in self._backend.spec.kinds if k is LayerKind.STATE]
        start, end = generation.sealing.last_start, generation.progress.num_computed
        self._store.add_parts(
            generation.sealing.chain, self._snapshots(generation, start, end, kinds)
        )

    def _keep(
        self, generation: Generation, start: int, end: int, payloads: list[KVPayload]
    ) -> BlockName | None:
        job, tokens = generation.job, generation.tokens[start:end]
        name = self._store.seal(job.root, generation.sealing.chain, tokens, payloads)
        if name is not None:
            generation.sealing.names.append(name)
        return name

    def _snapshots(
        self, generation: Generation, start: int, end: int, kinds: Sequence[LayerKind]
    ) -> list[KVPayload]:
        """Copy the kinds of state that the device still holds for ``[start, end)``."""
        found: list[KVPayload] = []
        for kind in kinds:
            try:
                ticket = self._backend.snapshot(generation.seq, start, end, kind)
                found.append(self._backend.payload(ticket))
            except ValueError:
                continue  # the device no longer holds this kind of state for the range
            except Exception:  # noqa: BLE001 - caching never fails a request
                _log.exception("cannot keep a block")
                return []
        return found

    def _num_usable(self, other: Generation, generation: Generation) -> int:
        """Tokens that another sequence will have computed and this request can resume from."""
        shared = generation.num_shared(other.job.root, other.tokens)
        if LayerKind.STATE not in self._backend.spec.kinds:
            return shared
        return max((b for b in other.job.boundaries if b <= shared), default=0)
