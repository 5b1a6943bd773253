"""Who computes how many tokens in the next step: decodes, prompt chunks, admission and preemption."""

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from itertools import compress
from math import inf

import numpy as np
from numpy.typing import NDArray

from engine.block_manager import BlockManager
from engine.capacity import Capacity
from engine.claims import MAX_PASSED_OVER, Claims
from engine.entries import Arrived, Entry, Pass, Queue
from engine.policy import Headroom, Preemption, PreemptionPolicy
from engine.queue_policy import QueuePolicy
from engine.request import BlockCopy, FinishReason, Sequence, Status, Step
from engine.running import Running

# prompts in the middle of their prefill at a time: each holds the blocks of its whole prompt
MAX_PARTIAL_PREFILLS = 2


class Scheduler:
    """
    Plans steps over all sequences; a pure function of its state, right for any number of steps in flight.

    A sequence is queued (waiting or swapped) or running. Running ones hold a slot and blocks
    for all their tokens. The smaller `order` always wins: when blocks run out, the running
    sequence of the largest order is preempted, and one that finds no larger than itself stalls
    until others end. The smallest therefore always advances, and all end.

    A queued sequence preempts running ones of a larger priority number for the slot or the blocks
    that it lacks, never one of its own: those wait for each other. What is more urgent than
    something that runs is planned before it, prompts and decodes, so that neither slots, blocks,
    budget nor prompts in pieces of less urgent work hold it up for longer than the step in flight.

    Args:
        max_num_seqs: Slots; sequences that run at a time.
        max_num_batched_tokens: Tokens of one step.
        max_model_len: Longest prompt plus answer.
        preemption: Picks between swap and recompute.
        headroom: Growth that admission leaves room for.
        policy: Order and pace within a priority; first come, first served where it is None.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preemption: PreemptionPolicy | None = None,
        headroom: Headroom | None = None,
        policy: QueuePolicy | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.preemption = preemption or PreemptionPolicy()
        self.headroom = headroom or Headroom()
        # sequences that the scheduler itself ended with LENGTH; the engine takes them out and reports them
        self.overgrown: list[Sequence] = []
        self.num_preemptions = {Preemption.SWAP: 0, Preemption.RECOMPUTE: 0}

        self._entries: dict[Sequence, Entry] = {}
        self._policy = policy or QueuePolicy()
        self._queue = Queue()
        self._running = Running(max_num_seqs, blocks.block_size)
        self._claims = Claims(blocks, self._running, self._queue, self.headroom)
        self._num_swapped = 0
        # the most urgent priority among prompts that the newest step left in pieces
        self._partial = inf

        self._launched = 0
        self._completed = 0
        self._swap_out: list[BlockCopy] = []

    @property
    def has_work(self) -> bool:
        """Whether a sequence is not finished, or `overgrown` not reported."""
        return bool(self._entries or self.overgrown)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, the most urgent first."""
        return list(self._running.entries.sequences())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no KV: new ones, and those that will be recomputed."""
        return len(self._queue) - self._num_swapped

    @property
    def num_swapped(self) -> int:
        return self._num_swapped

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. One that has no token to go, or can never fit, ends in `overgrown` at once."""
        limit = min(sequence.num_prompt_tokens + sequence.params.max_tokens, self.max_model_len)
        entry = self._policy.enter(sequence, limit, self._launched)
        self._entries[sequence] = entry
        self._queue.insert_sorted(entry)
        too_large = self.blocks.num_blocks_for(sequence.num_known) > self.blocks.num_usable_blocks
        if too_large or sequence.num_known >= limit:
            self._overgrow(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in any state, with the tokens it has."""
        self.finish(sequence, FinishReason.ABORT)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """
        End a sequence in any state: running, queued, or with tokens in flight, which are then dropped.

        A sequence that has ended already keeps its reason.
        """
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return
        if sequence.status is Status.RUNNING:
            self._running.leave(entry, self._launched)
        else:
            self._queue.remove_sorted(entry)
        self._free(sequence)
        sequence.num_tokens = sequence.num_known
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self._policy.ended(sequence, reason)

    def schedule(self) -> Step | None:
        """
        Plan the next step and count its tokens as computed; None when nothing can run before another completes.

        The step must be launched, and completed in the order of launches.
        """
        queue, entries, claims = self._queue, self._running.entries, self._claims
        in_flight = self._launched > self._completed
        if in_flight and claims.wait_for_steps(self._completed, self.max_num_batched_tokens):
            return None
        plan = Pass(budget=self.max_num_batched_tokens)
        self._policy.plan(queue, self._running, num_free_blocks=self.blocks.num_free_blocks, budget=plan.budget)
        start = 0
        for priority in claims.levels(self._partial):
            self._decode(plan, slice(start, entries.place_behind(priority)))
            # no block is free while a running sequence stalls for one, so this admits nobody of its priority then
            self._admit(plan, priority)
            start = entries.place_behind(priority)
        self._partial = plan.partial
        if plan.crowded:
            self.headroom.preempted()
        else:
            self.headroom.quiet()
        if not plan.decodes and not plan.chunks:
            return None

        self._launched += 1
        self.blocks.launched(self._launched)
        step = Step(
            step_id=self._launched,
            chunks=tuple(plan.chunks),
            swap_out=tuple(self._swap_out),
            swap_in=tuple(plan.swap_in),
            left=self._running.take_left(),
            decodes=plan.decodes,
        )
        self._swap_out = []
        return step

    def complete(self, step: Step, token_ids: NDArray[np.int64] | SequenceOf[int]) -> Arrived:
        """
        Take in the oldest step in flight: append its tokens, share its prompts' blocks, release its fences.

        Args:
            token_ids: One per chunk of `step.sampling`; -1 where the logits were not finite.

        Returns:
            The sequences still alive with the token each got, in order. A token of -1 was not
            appended: the caller must finish that sequence before it schedules again.
        """
        assert step.step_id == self._completed + 1, f"step {step.step_id} completes after step {self._completed}"
        self._completed = step.step_id
        for chunk in step.prefill_chunks:
            if chunk.sequence.status is Status.RUNNING:
                self.blocks.commit(chunk.sequence, chunk.start + chunk.length)
        arrived = self._arrived(step, np.asarray(token_ids, dtype=np.int64))
        self.blocks.completed(step.step_id)
        return arrived

    def abandon(self, step: Step) -> None:
        """
        Give up the oldest step in flight, which failed: what ran starts again from what it knows, in its order.
        """
        assert step.step_id == self._completed + 1, f"step {step.step_id} failed after step {self._completed}"
        self._completed = step.step_id
        # what it computed of those that were preempted since, and its copies to the host, may not be there
        copied = {copy.host_block for copy in step.swap_out}
        queued = [
            entry
            for entry in self._queue
            if entry.gate >= step.step_id or not copied.isdisjoint(entry.sequence.host_blocks)
        ]
        for entry in queued:
            self._queue.remove_sorted(entry)
        running = list(self._running.entries)
        for entry in running:
            self._running.leave(entry, self._launched)
        for entry in (*running, *queued):
            self._forget_computed(entry.sequence)
            entry.sequence.num_tokens = entry.sequence.num_known
            entry.gate = self._launched
            self._queue.insert_sorted(entry)
        self.blocks.completed(step.step_id)

    def shrink(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Run less at a time from now on; nothing may run, as after `abandon`."""
        self._running.shrink(max_num_seqs)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens

    def capacity(self) -> Capacity:
        """What could be added now and start at once, and what preemption would add to it."""
        return self._claims.capacity(max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len)

    def check(self) -> None:
        """Raise AssertionError when the books disagree, here or in the block manager."""
        self.blocks.check(self._entries)
        self._running.check()
        assert len(self._entries) == len(self._queue) + len(self._running), f"{len(self._entries)} alive"
        self._running.entries.check({Status.RUNNING})
        self._queue.check({Status.WAITING, Status.SWAPPED})
        swapped = sum(1 for sequence in self._queue.sequences() if sequence.status is Status.SWAPPED)
        assert swapped == self._num_swapped, f"{swapped} swapped and {self._num_swapped} counted"

    def _decode(self, plan: Pass, places: slice) -> None:
        # plans those that run and have these places: first one token of every sequence that has a single one to
        # compute, then the prompts
        running = self._running
        missing = running.missing()
        everyone = places.stop - places.start == len(running)
        going = running.going(missing) if everyone else running.going_at(places, missing)
        full = going & running.full()
        growing, count = full.nonzero()[0], len(going.nonzero()[0])
        if count <= plan.budget and len(growing) <= self.blocks.num_free_blocks:
            self._grow(growing)
        else:
            going = self._grow_in_order(plan, going, full)
            count = len(going.nonzero()[0])
        if count:
            plan.add_decodes(running.advance(going, count))
        if count == len(running):
            return
        # without those that have just been preempted
        slots = running.slots[places]
        for sequence in running.sequences_of(slots[missing[slots] > 1]):
            plan.add_chunk(sequence)

    def _grow(self, slots: NDArray[np.int64]) -> None:
        # a block more for each of these
        if len(slots):
            self._running.grew(slots, self.blocks.grow(*self._running.tables_of(slots)))

    def _grow_in_order(self, plan: Pass, going: NDArray[np.bool_], full: NDArray[np.bool_]) -> NDArray[np.bool_]:
        # where blocks or budget are short: the most urgent get them first, and blocks at the cost of the least
        # urgent; returns who can go
        running, blocks = self._running, self.blocks
        slots = running.slots
        places = np.flatnonzero(going[slots])
        indices: list[int] = np.flatnonzero(full[slots[places]]).tolist()
        ready = indices[: min(blocks.num_free_blocks, bisect_left(indices, plan.budget))]
        self._grow(slots[places[ready]])
        stalled: list[int] = []
        for index in indices[len(ready) :]:
            place = int(places[index])
            if index - len(stalled) >= plan.budget or place >= len(running):
                break
            entry = running.entries[place]
            if blocks.num_free_blocks or self._make_room(plan, entry):
                self._grow(slots[place : place + 1])
            else:
                stalled.append(index)
        if stalled:
            places = np.delete(places, stalled)
        # victims have left the end of the list
        places = places[: np.searchsorted(places, len(running))][: plan.budget]
        chosen = np.zeros_like(going)
        chosen[slots[places]] = True
        return chosen

    def _arrived(self, step: Step, token_ids: NDArray[np.int64]) -> Arrived:
        # gives the tokens of a step to its sequences, and returns them without those that have ended since its launch
        sequences, slots, last = step.sampled, step.decodes.slots, step.decodes.last
        assert len(token_ids) == len(sequences), f"step {step.step_id} sampled {len(sequences)} and got {token_ids}"
        left = self._running.gone(step)
        failed: list[int] = (token_ids < 0).nonzero()[0].tolist()
        others = sequences[step.num_decodes :]
        if others:
            # an answer whose first token fills it
            last = np.concatenate([last, [self._is_last(sequence) for sequence in others]])
            slots = np.concatenate([slots, [sequence.slot for sequence in others]])
            left += [row for row, sequence in enumerate(others, step.num_decodes) if sequence.slot < 0]
        if not left and not failed:
            self._running.learn(slots, token_ids)
            return Arrived(sequences, token_ids, last)
        self._running.learn(np.delete(slots, left + failed), np.delete(token_ids, left + failed))
        ended = [row for row in left if sequences[row].finished]
        for row in left:
            if token_ids[row] >= 0 and not sequences[row].finished:
                sequences[row].extend([int(token_ids[row])])
        for row in failed:
            if not sequences[row].finished:
                self.blocks.discard(sequences[row])
        alive = np.ones(len(sequences), dtype=np.bool_)
        alive[ended] = False
        return Arrived(list(compress(sequences, alive.tolist())), token_ids[alive], last[alive], failed=bool(failed))

    def _is_last(self, sequence: Sequence) -> bool:
        entry = self._entries.get(sequence)
        return entry is not None and sequence.num_known + 1 >= entry.limit

    def _make_room(self, plan: Pass, entry: Entry) -> bool:
        # true when a block is free for this sequence, at the cost of those behind it
        while not self.blocks.num_free_blocks:
            if self.blocks.num_fenced_blocks > plan.num_stalled:
                # let go already, and back before long
                break
            victim = self._running.entries[-1]
            if victim is entry:
                break
            self._preempt(plan, victim)
            plan.crowded = True
        if self.blocks.num_free_blocks:
            return True
        alone = len(self._running) == 1 and not self.blocks.num_fenced_blocks
        if alone and not entry.sequence.num_in_flight:
            self._overgrow(entry.sequence)
        else:
            plan.num_stalled += 1
        return False

    def _preempt(self, plan: Pass, entry: Entry) -> None:
        sequence, blocks = entry.sequence, self.blocks
        self._running.leave(entry, self._launched)
        self._queue.insert_sorted(entry)
        entry.set_back(self._launched)
        num_blocks = blocks.num_blocks_for(sequence.num_computed)
        # one that only waits for its last token will not come back: nothing is worth a copy
        kind = self.preemption.choose(
            num_slots=num_blocks * blocks.block_size,
            num_tokens=sequence.num_computed,
            has_room=num_blocks <= blocks.num_free_host_blocks and not entry.ends,
        )
        if kind is Preemption.SWAP:
            self._swap_out += blocks.swap_out(sequence)
            sequence.status = Status.SWAPPED
            self._num_swapped += 1
        else:
            self._forget_computed(sequence)
        self.num_preemptions[kind] += 1
        plan.closed = min(plan.closed, entry.priority)

    def _forget_computed(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = 0

    def _free(self, sequence: Sequence) -> None:
        if sequence.status is Status.SWAPPED:
            self._num_swapped -= 1
            # a copy that no step has carried yet must not reach a block of the next owner
            gone = set(sequence.host_blocks)
            self._swap_out = [copy for copy in self._swap_out if copy.host_block not in gone]
        self.blocks.free(sequence)

    def _admit(self, plan: Pass, priority: float) -> None:
        # starts those that are queued and have up to this priority, in order; none of them passes a more urgent one
        queue, running, blocks = self._queue, self._running, self.blocks
        index, counted, promised = 0, -inf, 0
        while index < len(queue) and index <= MAX_PASSED_OVER and plan.budget:
            entry = queue[index]
            passes = index > 0 and entry.priority > queue[0].priority
            if passes or entry.priority > priority or entry.priority >= plan.closed or entry.gate > self._completed:
                break
            no_seat = not running.has_free_slot and running.entries[-1].priority <= entry.priority
            if no_seat or not self._policy.may_start(entry):
                break
            matched = blocks.match_prefix(entry.sequence)
            if blocks.is_being_computed(entry.sequence, matched):
                index += 1
                continue
            alone = not running and not blocks.num_fenced_blocks
            if alone and blocks.num_blocks_to_start(entry.sequence, matched) > blocks.num_free_blocks:
                self._overgrow(entry.sequence)
                continue
            if entry.priority != counted:
                counted, promised = entry.priority, self._claims.promised(entry.priority)
            if not self._claims.will_fit(entry, matched) or not self._may_split(plan, entry.sequence, matched):
                break
            if not self._make_way(plan, entry, matched, promised):
                break
            promised += self._claims.growth(entry)
            queue.take(index)
            self._start(plan, entry, matched)
        # whoever stays behind now cannot start at a later level of this pass either
        if queue and queue[0].priority <= priority:
            plan.closed = min(plan.closed, queue[0].priority)

    def _make_way(self, plan: Pass, entry: Entry, matched: list[int], promised: int) -> bool:
        # true when a slot and blocks are free for a queued sequence, at the cost of less urgent ones where that helps
        running = self._running
        lacking = self._claims.demand(entry, matched, promised) - self.blocks.num_free_blocks
        if lacking <= 0 and running.has_free_slot:
            return True
        # behind a step in flight their blocks would not be free in time
        if lacking > 0 and self._launched > self._completed:
            return False
        count = self._claims.num_victims(entry, matched, lacking)
        for _ in range(count or 0):
            self._preempt(plan, running.entries[-1])
        return count is not None

    def _may_split(self, plan: Pass, sequence: Sequence, matched: list[int]) -> bool:
        # whether what it computes fits in this step, or one more prompt may be in pieces
        if plan.num_partials < MAX_PARTIAL_PREFILLS:
            return True
        start = sequence.num_computed if sequence.status is Status.SWAPPED else len(matched) * self.blocks.block_size
        return sequence.num_tokens - start <= plan.budget

    def _start(self, plan: Pass, entry: Entry, matched: list[int]) -> None:
        sequence = entry.sequence
        if sequence.status is Status.SWAPPED:
            plan.swap_in += self.blocks.swap_in(sequence, matched)
            self._num_swapped -= 1
        else:
            num_cached = self.blocks.allocate(sequence, matched)
            if entry.gate < 0:
                sequence.num_cached = min(num_cached, sequence.num_prompt_tokens)
        sequence.status = Status.RUNNING
        self._running.join(entry)
        self._policy.started(entry)
        plan.add_chunk(sequence, join=True)

    def _overgrow(self, sequence: Sequence) -> None:
        self.finish(sequence, FinishReason.LENGTH)
        self.overgrown.append(sequence)
