"""Who computes how many tokens in the next step: decodes, prompt chunks, admission and preemption."""

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from engine.block_manager import BlockManager
from engine.entries import Entry, EntryList, Pass
from engine.policy import Headroom, Preemption, PreemptionPolicy
from engine.request import BlockCopy, Capacity, Chunk, FinishReason, Sequence, Status, Step

# prompts in the middle of their prefill at a time: each holds the blocks of its whole prompt
MAX_PARTIAL_PREFILLS = 2
# queued sequences that one step may pass over because another computes their prefix
MAX_PASSED_OVER = 64


class Scheduler:
    """
    Plans steps over all sequences; a pure function of its state, right for any number of steps in flight.

    A sequence is queued (waiting or swapped) or running. Running ones hold a slot and blocks
    for all their tokens. The smaller `order` always wins: when blocks run out, the running
    sequence of the largest order is preempted, and one that finds no larger than itself stalls
    until others end. The smallest therefore always advances, and all end.

    Args:
        max_num_seqs: Slots; sequences that run at a time.
        max_num_batched_tokens: Tokens of one step.
        max_model_len: Longest prompt plus answer.
        preemption: Picks between swap and recompute.
        headroom: Growth that admission leaves room for.
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
        self._arrivals = 0
        self._queue = EntryList()
        self._running = EntryList()
        self._num_swapped = 0

        self._launched = 0
        self._completed = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._left: list[int] = []
        self._swap_out: list[BlockCopy] = []

    @property
    def has_work(self) -> bool:
        """Whether a sequence is not finished, or `overgrown` not reported."""
        return bool(self._entries or self.overgrown)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, the most urgent first."""
        return list(self._running.sequences())

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
        entry = Entry(sequence, (sequence.request.priority, self._arrivals), limit)
        self._arrivals += 1
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
            self._running.remove_sorted(entry)
            self._leave_slot(sequence)
        else:
            self._queue.remove_sorted(entry)
        if sequence.status is Status.SWAPPED:
            self._num_swapped -= 1
            # a copy that no step has carried yet must not reach a block of the next owner
            gone = set(sequence.host_blocks)
            self._swap_out = [copy for copy in self._swap_out if copy.host_block not in gone]
        self.blocks.free(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def schedule(self) -> Step | None:
        """
        Plan the next step and count its tokens as computed; None when nothing can run before another completes.

        The step must be launched, and completed in the order of launches.
        """
        plan = Pass(budget=self.max_num_batched_tokens)
        for sequence in self._decode(plan):
            plan.add_chunk(sequence)
        if plan.num_preempted:
            self.headroom.preempted()
        else:
            self.headroom.quiet()
            # no block is free while a running sequence stalls for one, so this admits nobody then
            self._admit(plan)
        if not plan.chunks:
            return None

        self._launched += 1
        self.blocks.launched(self._launched)
        step = Step(
            step_id=self._launched,
            chunks=tuple(plan.chunks),
            swap_out=tuple(self._swap_out),
            swap_in=tuple(plan.swap_in),
            left=tuple(self._left),
        )
        self._swap_out = []
        self._left = []
        return step

    def complete(self, step: Step, token_ids: NDArray[np.int64] | SequenceOf[int]) -> list[tuple[Sequence, int]]:
        """
        Take in the oldest step in flight: append its tokens, share its full blocks, release its fences.

        Args:
            token_ids: One per chunk of `step.sampling`; -1 where the logits were not finite.

        Returns:
            The sequences still alive with the token each got, in order. A token of -1 was not
            appended: the caller must finish that sequence before it schedules again.
        """
        assert step.step_id == self._completed + 1, f"step {step.step_id} completes after step {self._completed}"
        self._completed = step.step_id
        block_size = self.blocks.block_size
        tokens = iter(token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids)
        got: list[tuple[Sequence, int]] = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            token = 0
            if chunk.samples:
                token = next(tokens)
                sequence.num_in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            if chunk.samples:
                got.append((sequence, token))
                if token < 0:
                    self.blocks.discard(sequence)
                    continue
                sequence.output.append(token)
            # preempted since the launch: the blocks of this chunk are not its own any more
            if sequence.status is Status.RUNNING:
                num_computed = chunk.start + chunk.length
                if num_computed // block_size > sequence.num_committed:
                    self.blocks.commit(sequence, num_computed)
        assert next(tokens, None) is None, f"step {step.step_id} sampled {len(step.sampling)} tokens, not more"
        self.blocks.completed(step.step_id)
        return got

    def capacity(self) -> Capacity:
        """What could be added now and start at once."""
        promised = sum(map(self._growth, self._running))
        for entry in self._queue:
            promised += self.blocks.num_blocks_for(entry.sequence.num_tokens) + self._growth(entry)
        free_blocks = max(0, self.blocks.num_free_blocks + self.blocks.num_fenced_blocks - promised)
        return Capacity(
            free_seqs=self.max_num_seqs - len(self._running),
            free_tokens=free_blocks * self.blocks.block_size,
            waiting_seqs=len(self._queue),
            total_tokens=self.blocks.num_usable_blocks * self.blocks.block_size,
            max_model_len=self.max_model_len,
        )

    def check(self) -> None:
        """Raise AssertionError when the books disagree, here or in the block manager."""
        self.blocks.check(self._entries)
        assert len(self._entries) == len(self._queue) + len(self._running), f"{len(self._entries)} alive"
        slots = sorted(self._free_slots + [sequence.slot for sequence in self._running.sequences()])
        assert slots == list(range(self.max_num_seqs)), f"slots {slots} of {self.max_num_seqs}"
        for entries, states in ((self._running, {Status.RUNNING}), (self._queue, {Status.WAITING, Status.SWAPPED})):
            orders = [entry.order for entry in entries]
            assert orders == sorted(orders), f"out of order: {orders}"
            for sequence in entries.sequences():
                held = len(sequence.block_table) * self.blocks.block_size
                assert sequence.status in states, f"{sequence} is in the wrong list"
                assert sequence.status is not Status.RUNNING or sequence.num_computed <= held, f"{sequence} overruns"
                assert sequence.num_computed <= sequence.num_tokens, f"{sequence} is ahead of its tokens"
                assert sequence.status is not Status.WAITING or not sequence.num_computed, f"{sequence} holds no KV"
                assert bool(sequence.host_blocks) == (sequence.status is Status.SWAPPED), f"{sequence} on the host"
        swapped = sum(1 for sequence in self._queue.sequences() if sequence.status is Status.SWAPPED)
        assert swapped == self._num_swapped, f"{swapped} swapped and {self._num_swapped} counted"

    def _decode(self, plan: Pass) -> list[Sequence]:
        # plans one token of every sequence that has a single one to compute; returns the other prompts
        partials: list[Sequence] = []
        block_size = self.blocks.block_size
        # victims leave the end of the list, which this loop has not reached
        for entry in self._running:
            sequence = entry.sequence
            num_tokens, num_computed = sequence.num_tokens, sequence.num_computed
            if num_tokens >= entry.limit:
                # its last token is in flight
                continue
            if num_tokens - num_computed > 1:
                partials.append(sequence)
                continue
            if not plan.budget:
                continue
            if num_computed == len(sequence.block_table) * block_size:
                if not self._make_room(plan, entry):
                    continue
                self.blocks.grow(sequence)
            plan.chunks.append(Chunk(sequence, num_computed, 1, True))
            sequence.num_computed = num_computed + 1
            sequence.num_in_flight += 1
            plan.budget -= 1
        return partials

    def _make_room(self, plan: Pass, entry: Entry) -> bool:
        # true when a block is free for this sequence, at the cost of those behind it
        while not self.blocks.num_free_blocks:
            if self.blocks.num_fenced_blocks > plan.num_stalled:
                # let go already, and back before long
                break
            victim = self._running[-1]
            if victim is entry:
                break
            self._preempt(plan, victim)
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
        self._running.remove_sorted(entry)
        self._queue.insert_sorted(entry)
        self._leave_slot(sequence)
        entry.gate = self._launched
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
            blocks.free(sequence)
            sequence.status = Status.WAITING
            sequence.num_computed = 0
        self.num_preemptions[kind] += 1
        plan.num_preempted += 1

    def _admit(self, plan: Pass) -> None:
        if not self._queue or not plan.budget or not self._free_slots:
            return
        promised = sum(map(self._growth, self._running))
        index = 0
        while index < len(self._queue) and index <= MAX_PASSED_OVER and plan.budget and self._free_slots:
            entry = self._queue[index]
            if entry.gate > self._completed:
                break
            if self.blocks.is_being_computed(entry.sequence):
                index += 1
                continue
            growth = self._growth(entry)
            wanted = self.blocks.num_blocks_to_start(entry.sequence)
            if not self._running and wanted > self.blocks.num_free_blocks and not self.blocks.num_fenced_blocks:
                self._overgrow(entry.sequence)
                continue
            room = self.blocks.num_free_blocks - (promised + growth if self._running else 0)
            if wanted > room or not self._may_split(plan, entry.sequence):
                break
            del self._queue[index]
            self._start(plan, entry)
            promised += growth

    def _may_split(self, plan: Pass, sequence: Sequence) -> bool:
        # whether what it computes fits in this step, or one more prompt may be in pieces
        if plan.num_partials < MAX_PARTIAL_PREFILLS:
            return True
        swapped = sequence.status is Status.SWAPPED
        start = sequence.num_computed if swapped else self.blocks.match_prefix(sequence)
        return sequence.num_tokens - start <= plan.budget

    def _start(self, plan: Pass, entry: Entry) -> None:
        sequence = entry.sequence
        if sequence.status is Status.SWAPPED:
            plan.swap_in += self.blocks.swap_in(sequence)
            self._num_swapped -= 1
        else:
            num_cached = self.blocks.allocate(sequence)
            if entry.gate < 0:
                sequence.num_cached = min(num_cached, sequence.num_prompt_tokens)
        sequence.status = Status.RUNNING
        sequence.slot = self._free_slots.pop()
        self._running.insert_sorted(entry)
        plan.add_chunk(sequence, join=True)

    def _growth(self, entry: Entry) -> int:
        # blocks that it will need beyond those it has (or starts with), as far as the headroom looks;
        # the last token of an answer is never computed
        sequence = entry.sequence
        num_tokens = sequence.num_tokens
        ahead = min(num_tokens + self.headroom.tokens, entry.limit - 1)
        held = len(sequence.block_table) or self.blocks.num_blocks_for(num_tokens)
        return max(0, self.blocks.num_blocks_for(ahead) - held)

    def _leave_slot(self, sequence: Sequence) -> None:
        self._left.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _overgrow(self, sequence: Sequence) -> None:
        self.finish(sequence, FinishReason.LENGTH)
        self.overgrown.append(sequence)
