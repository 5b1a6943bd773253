"""The free blocks, least recently used first, with removal from the middle in constant time."""

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

# what neither a link nor a list end can be
_ABSENT = -1
# the age of content that is not cheap however old it is
_KEPT = 1 << 61
# the age of a block that is not on the list
_TAKEN = 1 << 62
# blocks looked at for the start of a run before the oldest is taken as it is
MAX_SEARCHED = 32


class FreeList:
    """
    A doubly linked list threaded through the block ids; block 0 is its two ends.

    A block that is taken from the middle is marked as such, so that one write takes many, and keeps its
    links until it comes to the front or is added again.

    Blocks without content stand first, then cached ones by age; the first is the next to go.
    Runs of consecutive ids go before it where that costs no content of worth: attention on the
    CPU reads consecutive blocks as one piece, without a copy. In a pool that is half in use,
    92 % of a table's blocks then follow the one before and two tables of five are one run;
    in a full one 39 % and one of twenty (lognormal lengths, mean 220 in and 200 out).
    """

    def __init__(self, num_blocks: int) -> None:
        self._next = [_ABSENT] * num_blocks
        self._previous = [_ABSENT] * num_blocks
        self._next[0] = self._previous[0] = 0
        # value of the push counter when a block came in with content; 0 without content. The id behind
        # the last block has one too: it is never free
        self._age = np.full(num_blocks + 1, _TAKEN, dtype=np.int64)
        self._pushes = 0
        self._size = 0
        # where the search for the next run begins
        self._rotor = 1

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return bool(self._age[block] != _TAKEN)

    def push_first(self, blocks: SequenceOf[int]) -> None:
        """Add blocks without content, one after the other: the last of them is the next to be taken."""
        if blocks:
            self._add(blocks, 0)
            self._link(blocks[::-1], before=0, after=self._next[0])

    def push_last(self, blocks: SequenceOf[int], *, kept: NDArray[np.bool_] | None = None) -> None:
        """
        Add blocks with cached content, one after the other: the last of them is the last to go.

        Args:
            kept: [len(blocks)], which of them no run goes before; none of them by default.
        """
        if blocks:
            ages = np.arange(self._pushes + 1, self._pushes + 1 + len(blocks))
            if kept is not None:
                ages[kept] = _KEPT
            self._pushes += len(blocks)
            self._add(blocks, ages)
            self._link(blocks, before=self._previous[0], after=0)

    def remove(self, blocks: SequenceOf[int] | NDArray[np.int64]) -> None:
        """Take out blocks, all different, that are on the list."""
        self._age[blocks] = _TAKEN
        self._size -= len(blocks)

    def pop(self, count: int, *, after: int = 0, room: int = 0) -> list[int]:
        """
        Take `count` blocks that continue `after` and each other where cheap ones do.

        Needs that many on the list. Costs O(count).

        Args:
            after: Last block of the table they are for; 0 for a new one.
            room: Blocks that the table may need later: the next run begins so far behind this one.
        """
        assert count <= self._size, f"{count} blocks wanted and {self._size} free"
        taken: list[int] = []
        block = after + 1 if after else 0
        while missing := count - len(taken):
            length = self._run_length(block, missing)
            if not length:
                block, length = self._run_start(), 1
                self._rotor = block + missing + room
            self._age[block : block + length] = _TAKEN
            self._size -= length
            taken += range(block, block + length)
            block += length
        return taken

    def pop_behind(self, blocks: NDArray[np.int32], *, room: int) -> tuple[NDArray[np.int64], list[int]]:
        """
        Take one block for each of these, all different: the one that follows it where that is a cheap one.

        Needs that many on the list.

        Args:
            room: As in `pop`, for a block that begins a run.

        Returns:
            The blocks, and those of them that came in with content.
        """
        taken = blocks.astype(np.int64) + 1
        ages = self._age[taken]
        self._age[taken] = _TAKEN
        dear: list[int] = (ages >= self._oldest_dear).nonzero()[0].tolist()
        self._size -= len(taken) - len(dear)
        for place in dear:
            # left alone
            self._age[taken[place]] = ages[place]
        for place in dear:
            block = self._run_start()
            self._rotor = block + 1 + room
            taken[place], ages[place] = block, self._age[block]
            self._age[block] = _TAKEN
            self._size -= 1
        return taken, taken[(ages > 0).nonzero()[0]].tolist()

    def check(self) -> None:
        """Walk the list both ways; raise AssertionError when it is not whole."""
        for links in (self._next, self._previous):
            met, block = set[int](), links[0]
            while block:
                assert block not in met, f"block {block} comes twice"
                met.add(block)
                block = links[block]
            free = np.flatnonzero(self._age != _TAKEN).tolist()
            assert met.issuperset(free), f"blocks {set(free) - met} are free and not on the list"
            assert len(free) == self._size, f"{len(free)} blocks on the list and {self._size} counted"

    def _add(self, blocks: SequenceOf[int], ages: NDArray[np.int64] | int) -> None:
        places = np.array(blocks, dtype=np.int64)
        free = len(blocks) - np.count_nonzero(self._age[places] == _TAKEN)
        assert not free, f"{free} of blocks {blocks} are free already"
        self._age[places] = ages
        self._size += len(blocks)
        links = self._next
        for block in blocks:
            if links[block] != _ABSENT:
                self._unlink(block)

    def _link(self, blocks: SequenceOf[int], *, before: int, after: int) -> None:
        following, previous = self._next, self._previous
        for block in blocks:
            following[before] = block
            previous[block] = before
            before = block
        following[before] = after
        previous[after] = before

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = _ABSENT

    def _run_length(self, block: int, most: int) -> int:
        # blocks from this one on that are cheap: free, and empty or neither kept nor young
        dear = self._oldest_dear
        if self._age[block] >= dear:
            return 0
        cheap = self._age[block : block + most] < dear
        length = int(cheap.argmin())
        return length if not cheap[length] else len(cheap)

    @property
    def _oldest_dear(self) -> int:
        # the youngest quarter of the list is not cheap; what has no content always is
        return max(1, self._pushes - self._size // 4 + 1)

    def _run_start(self) -> int:
        # a cheap block a little behind where the last run was to end, or else the oldest
        start = self._rotor if self._rotor < len(self._next) else 1
        cheap = self._age[start : start + MAX_SEARCHED] < self._oldest_dear
        first = int(cheap.argmax())
        return start + first if cheap[first] else self._oldest()

    def _oldest(self) -> int:
        while self._age[self._next[0]] == _TAKEN:
            self._unlink(self._next[0])
        return self._next[0]
