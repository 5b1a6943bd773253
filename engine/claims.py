"""Blocks that sequences have and will need, by priority: for admission, and for those who bring more work."""

from collections.abc import Iterator
from itertools import chain, islice
from math import inf

import numpy as np

from engine.block_manager import BlockManager
from engine.capacity import Capacity, Freeable
from engine.entries import Entry, EntryList, Queue
from engine.policy import Headroom
from engine.request import PRIORITIES
from engine.running import Int32s, Running

# queued sequences that one step may pass over because another computes their prefix
MAX_PASSED_OVER = 64
# steps that admission looks ahead: computing again what is preempted much later costs less than keeping blocks free
HORIZON = 1024
# times that a refusal of admission stands before it is looked at again: those that run come nearer to their ends
MAX_REFUSALS = 64
_NOTHING = Freeable()


class Claims:
    """
    Counts over all sequences; changes none of them.

    A sequence claims the blocks that it has, or starts with, and those that it will grow into as
    far as the headroom looks.
    """

    def __init__(self, blocks: BlockManager, running: Running, queue: Queue, headroom: Headroom) -> None:
        self._blocks = blocks
        self._running = running
        self._queue = queue
        self._headroom = headroom
        # what is asked for at every step, and is the same at most of them, behind what it was counted for
        self._counted_running = -1
        self._num_behind: tuple[int, ...] = ()
        self._counted_queue = (-1, 0)
        self._queued = 0
        self._waiting: tuple[tuple[int, int], ...] = ()
        # who would not fit beside those that run, until one of these goes
        self._too_large: tuple[int, Entry | None] = (-1, None)
        self._num_refusals = 0

    def levels(self, partial: float) -> tuple[float, ...]:
        """
        Priorities up to which is planned, one after the other: a single one for all, unless a prompt is more urgent
        than something that runs.

        Args:
            partial: The most urgent priority of those that run and are prompts; infinite where none is.
        """
        running, queue = self._running.entries, self._queue
        level = min(queue[0].priority, partial) if queue else partial
        levels = []
        while running and level < running[-1].priority:
            levels.append(level)
            level = min(queue.next_priority(level), running.next_priority(level))
        return (*levels, inf)

    def growth(self, entry: Entry) -> int:
        """Blocks that a queued sequence will need beyond those it starts with."""
        num_tokens = entry.sequence.num_tokens
        ahead = min(num_tokens + self._headroom.tokens, entry.limit - 1)
        return max(0, self._blocks.num_blocks_for(ahead) - self._blocks.num_blocks_for(num_tokens))

    def promised(self, priority: float = inf) -> int:
        """Blocks that those who run, up to a priority, will need beyond what they have."""
        running, size = self._running, self._blocks.block_size
        claims = running.claims(self._headroom.tokens)
        place = running.entries.place_behind(priority)
        if place == len(running):
            return int(claims.sum()) // size - running.num_blocks
        slots = running.slots[:place]
        return int((claims[slots] - running.room[slots]).sum()) // size

    def demand(self, entry: Entry, matched: list[int], promised: int) -> int:
        """
        Free blocks that it takes to start a queued sequence: its own, those that it will grow into, and `promised`.

        Where all that run can be preempted, and no more can be had, its own alone.

        Args:
            matched: Cached blocks that it would begin with.
            promised: To those who run, or start before it, and are not less urgent.
        """
        blocks, sequence = self._blocks, entry.sequence
        own, more = blocks.num_blocks_to_start(sequence, matched), self.growth(entry) + promised
        if promised or self._running.entries.place_behind(entry.priority):
            return own + more
        # what it shares with those that run is not its own as yet, and will not be free when they have gone
        obtainable = blocks.num_free_blocks + blocks.num_used_blocks
        return own + more if blocks.num_blocks_for(sequence.num_tokens) + more <= obtainable else own

    def will_fit(self, entry: Entry, matched: list[int]) -> bool:
        """
        Whether, as far as lengths are known, a queued sequence and all that run never need more blocks than there are
        within `HORIZON` steps.

        Their use is largest just before one of them ends (Gong et al. 2025, arXiv:2507.10150). A refusal stands
        until somebody comes or goes, for `MAX_REFUSALS` times at most.
        """
        running, blocks, size = self._running, self._blocks, self._blocks.block_size
        pool = blocks.num_usable_blocks * size
        # what takes nearly all by itself would wait for an engine that others may never leave idle
        if not entry.expected or not running or entry.expected + 2 * size > pool:
            return True
        if self._too_large == (running.entries.changes, entry) and self._num_refusals < MAX_REFUSALS:
            self._num_refusals += 1
            return False
        num_tokens = entry.sequence.num_tokens
        own_left = min(HORIZON, max(0, entry.expected - num_tokens))
        # as a rule there is room for all of them at their longest, even if this one shared nothing
        others = int(running.num_tokens.sum()) + int(self._left_ahead().sum()) + len(running) * size
        if others + blocks.num_blocks_for(num_tokens) * size + own_left + size <= pool:
            return True
        own = blocks.num_blocks_to_start(entry.sequence, matched) * size
        if others + own + own_left + size <= pool or self._peak(own, own_left) <= pool:
            return True
        self._too_large, self._num_refusals = (running.entries.changes, entry), 1
        return False

    def _left_ahead(self) -> Int32s:
        left: Int32s = np.minimum(self._running.left(), HORIZON)
        return left

    def _peak(self, own: int, own_left: int) -> int:
        # the most tokens in blocks that those who run will have at a time, beside one of so many now and still to get
        running, blocks = self._running, self._blocks
        size, slots = blocks.block_size, running.slots
        num_tokens, left = np.append(running.num_tokens[slots], own), np.append(self._left_ahead()[slots], own_left)
        # what is in several tables counts once
        shared = max(0, running.num_blocks - blocks.num_used_blocks) * size
        places = np.argsort(-left, kind="stable")
        # the last block of each is half full
        alive = np.arange(1, len(places) + 1) * (left[places] + size // 2)
        return int((np.cumsum(num_tokens[places], dtype=np.int64) + alive).max()) - shared

    def num_victims(self, entry: Entry, matched: list[int], lacking: int) -> int | None:
        """How many less urgent sequences, the last first, must go for so many blocks; None where all are too few."""
        return self._blocks.num_to_free(self._tables_behind(entry.priority), lacking, kept=matched)

    def wait_for_steps(self, completed: int, budget: int) -> bool:
        """
        Whether a step now would only delay what waits for one in flight: answers that need a token's value to go on,
        or urgent work that lacks blocks which are there, or can be taken from less urgent work, once none is in flight.

        Args:
            completed: Newest step that has completed.
            budget: Tokens of a step.
        """
        if self._running.waits():
            return True
        queue, running, blocks = self._queue, self._running.entries, self._blocks
        num_blocks, kept = 0, list[int]()
        for entry in islice(queue, MAX_PASSED_OVER + 1):
            sequence, priority = entry.sequence, entry.priority
            if not running or priority >= running[-1].priority or entry.gate > completed:
                break
            if budget <= self._running.num_missing(running.place_behind(priority)):
                break
            matched = blocks.match_prefix(sequence)
            if blocks.is_being_computed(sequence, matched):
                continue
            kept += matched
            lacking = self.demand(entry, matched, self.promised(priority) + num_blocks) - blocks.num_free_blocks
            if lacking > 0:
                tables = chain(blocks.fenced_tables, self._tables_behind(priority))
                return blocks.num_to_free(tables, lacking, kept=kept) is not None
            budget -= sequence.num_tokens - len(matched) * blocks.block_size
            num_blocks += blocks.num_blocks_to_start(sequence, matched) + self.growth(entry)
        return False

    def capacity(self, *, max_num_seqs: int, max_model_len: int) -> Capacity:
        """What could be added now and start at once."""
        running, blocks, size = self._running, self._blocks, self._blocks.block_size
        self._count()
        claimed, *claims = running.claims_behind(self._headroom.tokens)
        promised = int(claimed) // size - running.num_blocks
        idle = blocks.num_free_blocks + blocks.num_fenced_blocks
        free = idle - promised - self._queued
        # blocks that several share count for each of them, and come back once
        most = blocks.num_usable_blocks - idle + promised
        freeable = [_NOTHING] * len(PRIORITIES)
        for index, claim in enumerate(claims):
            seqs, (passed, num_blocks) = self._num_behind[index], self._waiting[index]
            if seqs or passed:
                gained = min(most, int(claim) // size) + num_blocks + min(0, free)
                freeable[index] = Freeable(seqs, max(0, gained) * size, passed)
        return Capacity(
            free_seqs=max_num_seqs - len(running),
            free_tokens=max(0, free) * size,
            waiting_seqs=len(self._queue),
            total_tokens=blocks.num_usable_blocks * size,
            max_model_len=max_model_len,
            freeable=tuple(freeable),
        )

    def _tables_behind(self, priority: int) -> Iterator[list[int]]:
        # of those that run and are less urgent, the last first
        entries = self._running.entries
        return (entry.sequence.block_table for entry in reversed(entries[entries.place_behind(priority) :]))

    def _count(self) -> None:
        # how many run behind each priority; how many wait, and the blocks that they will need
        entries, queue, ahead = self._running.entries, self._queue, self._headroom.tokens
        if entries.changes != self._counted_running:
            self._counted_running, self._num_behind = entries.changes, _num_behind(entries)
        if (queue.changes, ahead) != self._counted_queue:
            self._counted_queue = (queue.changes, ahead)
            claims = queue.claims(ahead, self._blocks.block_size)
            self._queued = int(claims.sum())
            self._waiting = tuple((count, int(claims[len(queue) - count :].sum())) for count in _num_behind(queue))


def _num_behind(entries: EntryList) -> tuple[int, ...]:
    return tuple(len(entries) - entries.place_behind(priority) for priority in PRIORITIES)
