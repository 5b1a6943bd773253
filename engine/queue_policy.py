"""In which order sequences of one priority are served, and whether their turn has come."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

import xxhash

from engine.config import PolicyName
from engine.entries import Entry, Queue
from engine.lengths import LearnedLengths, template
from engine.pacing import Pacing
from engine.request import BULK, FinishReason, Request, Sequence
from engine.running import Running

# a common beginning that is worth running together: less takes an H200 five milliseconds of an 8B model
GROUP_TOKENS = 256
# steps after its first member in which others may join a group
GROUP_STEPS = 1024
# tokens, and so steps, that the longest answer counts for: nobody is passed by what comes so much later
MAX_AHEAD = 4096
# its multiples, less whole numbers, are spread evenly, however many there are
_GOLDEN = (5**0.5 - 1) / 2


class QueuePolicy:
    """First come, first served, as soon as there is room."""

    def __init__(self) -> None:
        self._num_arrivals = 0

    def enter(self, sequence: Sequence, limit: int, step: int) -> Entry:  # noqa: ARG002
        """
        Give a sequence its place among those of its priority, for good.

        Args:
            limit: Number of tokens at which its answer ends at the latest.
            step: Newest step launched.
        """
        self._num_arrivals += 1
        return Entry(sequence, (sequence.request.priority, self._num_arrivals), limit)

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """Learn from an answer."""

    def plan(self, queue: Queue, running: Running, *, num_free_blocks: int, budget: int) -> None:
        """
        Decide what may start in the next step.

        Args:
            budget: Tokens of a step.
        """

    def may_start(self, entry: Entry) -> bool:  # noqa: ARG002
        """Whether a queued sequence that is first in line may start in this step, if there is room for it."""
        return True

    def started(self, entry: Entry) -> None:
        """Note a sequence that has started in this step."""


@dataclass(frozen=True, slots=True)
class _Group:
    """
    Sequences that begin alike. They share the place of the first.

    Args:
        opened: Newest step launched when that came.
    """

    rank: int
    number: int
    opened: int


class Throughput(QueuePolicy):
    """
    Bulk work in the order and at the pace in which all of it ends soonest; other work as it comes.

    Answers that will be longest start first. Who waits is aged by a token a step: one that comes n steps
    later goes ahead only where its answer is more than n tokens longer, and 4,096 at most count, so that
    nothing starves. The place is found once and stays. Prompts that begin alike stand together behind the
    first of them, so that they find its blocks before these are given away.

    Args:
        pacing: None where whatever finds room starts at once.
        group_tokens: Of such a beginning.
    """

    def __init__(self, pacing: Pacing | None = None, *, group_tokens: int = GROUP_TOKENS) -> None:
        super().__init__()
        self.pacing = pacing
        self.group_tokens = group_tokens
        self.lengths = LearnedLengths()
        # by what their prompts begin with, the oldest first
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()

    def enter(self, sequence: Sequence, limit: int, step: int) -> Entry:
        entry = super().enter(sequence, limit, step)
        if entry.priority < BULK:
            return entry
        usual, entry.expected = self._lengths_of(sequence, limit)
        left = usual - sequence.num_known
        rank, number = step - min(left, MAX_AHEAD), self._num_arrivals
        if len(sequence.prompt) >= self.group_tokens:
            group = self._group(sequence.request, _Group(rank, number, step))
            rank, number = group.rank, group.number
        entry.order = (entry.priority, rank, number, -left, self._num_arrivals)
        return entry

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        num_tokens, key = sequence.num_output, template(sequence.request)
        if sequence.request.priority < BULK or not num_tokens:
            return
        # an answer that was cut off would have been longer, and nobody knows by what
        longest = FinishReason.LENGTH is reason and num_tokens > (self.lengths.mean(key) or inf)
        if reason is FinishReason.STOP or longest:
            self.lengths.learn(key, num_tokens)

    def plan(self, queue: Queue, running: Running, *, num_free_blocks: int, budget: int) -> None:
        if self.pacing is not None:
            self.pacing.plan(queue, running, num_free_blocks=num_free_blocks, budget=budget)

    def may_start(self, entry: Entry) -> bool:
        if self.pacing is None or entry.priority < BULK or entry.sequence.request.has_deadline:
            return True
        return self.pacing.is_open

    def started(self, entry: Entry) -> None:  # noqa: ARG002
        if self.pacing is not None:
            self.pacing.started()

    def _lengths_of(self, sequence: Sequence, limit: int) -> tuple[int, int]:
        # the number of tokens at which its answer ends: on average, which is for the order, and one of those at which
        # such answers have ended, which is for counting what many will need
        params, key = sequence.params, template(sequence.request)
        if params.ignore_eos and not params.stop and not params.stop_token_ids:
            return limit, limit
        mean, drawn = self.lengths.mean(key), self.lengths.draw(key, self._num_arrivals * _GOLDEN % 1.0)
        if mean is None or drawn is None:
            # the worst
            return limit, 0
        start, known = sequence.num_prompt_tokens, sequence.num_known + 1
        return min(limit, max(known, start + round(mean))), min(limit, max(known, start + drawn))

    def _group(self, request: Request, new: _Group) -> _Group:
        groups = self._groups
        while groups and next(iter(groups.values())).opened < new.opened - GROUP_STEPS:
            groups.popitem(last=False)
        head = xxhash.xxh3_128_digest(request.prompt[: self.group_tokens].tobytes())
        return groups.setdefault((request.cache_salt, head), new)


def queue_policy(name: PolicyName, *, paced: bool = True) -> QueuePolicy:
    """
    Make the policy of a name.

    Args:
        paced: Whether "throughput" lets bulk work wait for steps of one size; it goes by the model and the device.
    """
    if name == "fcfs":
        return QueuePolicy()
    return Throughput(Pacing() if paced else None)
