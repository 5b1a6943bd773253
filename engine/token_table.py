"""The tokens of the sequences that run, a row each."""

import numpy as np
from numpy.typing import NDArray

# steps whose tokens wait for their rows
_RECENT = 16
# tokens that each slot has room for at least
_MIN_WIDTH = 256


class TokenTable:
    """
    Known tokens by slot.

    The next token of every row lies in a cache line of its own: a step that wrote them all would wait
    for as many as sequences run. So a step's tokens are kept side by side, and go to their rows by
    many steps at a time, or when a row is asked for.

    Args:
        num_known: [num_slots] int32, tokens of each slot; counted up here, and set by whoever puts tokens in.
    """

    def __init__(self, num_known: NDArray[np.int32]) -> None:
        self._num_known = num_known
        num_slots = len(num_known)
        self._rows = np.empty((num_slots, _MIN_WIDTH), dtype=np.int32)
        # by step, the oldest first: the token that each slot got, -1 where it got none or its row has it
        self._recent = np.full((_RECENT, num_slots), -1, dtype=np.int64)
        self._num_recent = 0

    def put(self, slot: int, tokens: NDArray[np.int32]) -> None:
        """Begin a row; whoever had it before has taken its tokens along."""
        self._widen(len(tokens))
        self._rows[slot, : len(tokens)] = tokens

    def known(self, slot: int) -> NDArray[np.int32]:
        """The known tokens of a slot; a view that is right until more come."""
        stop = int(self._num_known[slot])
        recent = self._recent[: self._num_recent, slot]
        tokens = recent[recent >= 0]
        if len(tokens):
            self._widen(stop)
            self._rows[slot, stop - len(tokens) : stop] = tokens
            recent.fill(-1)
        return self._rows[slot, :stop]

    def learn(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """
        Make the next token of each of these slots known.

        Args:
            token_ids: [len(slots)] int64.
        """
        if self._num_recent == _RECENT:
            self._settle()
        self._recent[self._num_recent][slots] = token_ids
        self._num_recent += 1
        self._num_known[slots] += 1

    def _settle(self) -> None:
        self._widen(int(self._num_known.max()))
        num_slots, width = self._rows.shape
        learned = self._recent >= 0
        # how many tokens before its newest one each of them is, and itself
        behind = learned[::-1].cumsum(axis=0, dtype=np.int32)[::-1]
        # flat places cost a quarter of pairs of them
        places = np.flatnonzero(learned)
        slots = places % num_slots
        targets = slots * width + self._num_known.take(slots) - behind.take(places)
        self._rows.put(targets, self._recent.take(places))
        self._recent.fill(-1)
        self._num_recent = 0

    def _widen(self, width: int) -> None:
        num_slots, old = self._rows.shape
        if width > old:
            rows = np.empty((num_slots, 2 * width), dtype=np.int32)
            rows[:, :old] = self._rows
            self._rows = rows
