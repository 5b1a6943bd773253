"""The tokens of one sequence and what is counted of them, alone or as a row in tables of many."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray


class SequenceTokens:
    """
    A prompt with the answer behind it, and how far the KV cache reaches.

    Tokens are counted before their values are known: a step that was launched and not
    handled yet has sampled `num_in_flight` tokens of this sequence.

        prompt | output (known) | in flight
        computed by launched steps: the first num_computed tokens

    Args:
        prompt: [num_prompt_tokens] int32; read and never written.
        resumed: Tokens of the answer that are known from the start.
    """

    __slots__ = ("_counts", "_read_tokens", "_tokens", "prompt")

    def __init__(self, prompt: NDArray[np.int32], resumed: SequenceOf[int] = ()) -> None:
        self.prompt = prompt
        # the known tokens, with room behind them for others; the prompt itself has none
        self._tokens = prompt
        # gives the known tokens while they are kept elsewhere
        self._read_tokens: Callable[[], NDArray[np.int32]] | None = None
        # [num_tokens, num_computed, num_known]
        self._counts = np.array([len(prompt), 0, len(prompt)], dtype=np.int32)
        if resumed:
            self.extend(resumed)
            self.num_tokens = self.num_known

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_known(self) -> int:
        """Tokens whose values are known here."""
        return int(self._counts[2])

    @property
    def num_output(self) -> int:
        """Known tokens of the answer."""
        return int(self._counts[2]) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        """The known tokens of the answer; a copy."""
        tokens: list[int] = self._known()[len(self.prompt) :].tolist()
        return tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return int(self._counts[0])

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        self._counts[0] = value

    @property
    def num_computed(self) -> int:
        """Tokens whose KV the launched steps have written, or will have."""
        return int(self._counts[1])

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        self._counts[1] = value

    @property
    def num_in_flight(self) -> int:
        """Tokens that launched steps sample and that are not known yet."""
        return self.num_tokens - self.num_known

    def extend(self, token_ids: SequenceOf[int]) -> None:
        """Make the next tokens of the answer known; for one whose tokens are not kept elsewhere."""
        assert self._read_tokens is None, f"the tokens of {self} are kept elsewhere"
        known = self.num_known
        stop = known + len(token_ids)
        if stop > len(self._tokens):
            self.keep_tokens(2 * stop)
        self._tokens[known:stop] = token_ids
        self._counts[2] = stop

    def truncate(self, num_output: int) -> None:
        """Forget the known tokens of the answer but the first `num_output`; for one whose tokens are not elsewhere."""
        assert self._read_tokens is None, f"the tokens of {self} are kept elsewhere"
        self._counts[2] = min(self.num_known, len(self.prompt) + num_output)

    def move_counts(self, place: NDArray[np.int32]) -> None:
        """
        Keep num_tokens, num_computed and num_known somewhere else from now on, with the values they have.

        Args:
            place: [3] int32; may be a view into a table of many sequences.
        """
        place[:] = self._counts
        self._counts = place

    def hand_over_tokens(self, read: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
        """
        Have the known tokens kept somewhere else from now on.

        Args:
            read: Gives them, [num_known], and those that come.

        Returns:
            Those there are.
        """
        known = self._known()
        self._read_tokens = read
        return known

    def keep_tokens(self, room: int) -> None:
        """Keep the known tokens here from now on, with room for so many in all."""
        known = self._known()
        self._tokens = np.empty(room, dtype=np.int32)
        self._tokens[: len(known)] = known
        self._read_tokens = None

    def token_ids(self, start: int, stop: int) -> NDArray[np.int32]:
        """
        The known tokens of positions start to stop; a copy.

        Raises:
            IndexError: when a position lies past the known tokens.
        """
        if stop > self.num_known:
            raise IndexError(f"position {stop - 1} of {self} is not known yet")
        return self._known()[start:stop].copy()

    def _known(self) -> NDArray[np.int32]:
        return self._tokens[: self.num_known] if self._read_tokens is None else self._read_tokens()
