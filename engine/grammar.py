"""What an answer must follow: a grammar as a request says it, and where one answer stands in it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

# a row of bits over the vocabulary, token 0 in the lowest bit of the first word
Mask = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Grammar:
    """
    What binds a whole answer.

    Args:
        kind: How `text` is meant: a JSON schema, a regular expression, or a JSON array of texts to choose from.
    """

    kind: Literal["json_schema", "regex", "choice"]
    text: str


class Matcher(Protocol):
    """A grammar library's place in one text; it knows no ends of answers, only text."""

    def accept_token(self, token_id: int) -> bool:
        """Go on by a token; False, and nothing done, where the grammar does not allow it."""
        ...

    def is_completed(self) -> bool:
        """Whether the text so far is one of the grammar's."""
        ...

    def fill_next_token_bitmask(self, bitmask: Mask, index: int) -> bool:
        """Set row `index` of [rows, words] to the tokens that may follow."""
        ...


class GrammarState:
    """
    Where one answer stands in its grammar: which tokens may follow, and whether any.

    An end, such as EOS, is allowed where the text is complete and never elsewhere. Under min_tokens it is
    not, unless nothing else can follow: the grammar wins.

    Args:
        is_text: [vocab_size] bool, the tokens that have text; another one can only be an end.
        ends: Tokens that end this answer.
        min_tokens: Ends wait for so many tokens.
    """

    def __init__(
        self, matcher: Matcher, *, is_text: NDArray[np.bool_], ends: Iterable[int] = (), min_tokens: int = 0
    ) -> None:
        self._matcher = matcher
        self._is_text = is_text
        self._ends = frozenset(token for token in ends if 0 <= token < len(is_text))
        self._end_bits = bits_of(self._ends, len(is_text))
        self._last_word = bits_of(range((len(is_text) - 1) % 32 + 1), 32)[0]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # what may follow; None until somebody asks
        self._mask: Mask | None = None
        # the text is complete and cannot go on; known as soon as it is
        self.exhausted = False
        # a token came that may not stand where it did
        self.refused = False

    def accept(self, token_id: int) -> bool:
        """Go on by a token of the answer; False where the grammar does not allow it."""
        is_text = 0 <= token_id < len(self._is_text) and bool(self._is_text[token_id])
        if not is_text or not self._matcher.accept_token(token_id):
            self.refused = token_id not in self._ends
            return not self.refused
        self._num_tokens += 1
        self._mask = None
        if self._matcher.is_completed():
            self._look()
        return True

    @property
    def stuck(self) -> bool:
        """Whether the text is not complete, and no token of the vocabulary goes on."""
        return not self._matcher.is_completed() and not self.mask().any()

    def mask(self) -> Mask:
        """The tokens that may follow; not to be changed."""
        return self._look() if self._mask is None else self._mask

    def _look(self) -> Mask:
        mask = np.zeros_like(self._end_bits)
        self._matcher.fill_next_token_bitmask(mask[None], 0)
        # the library may set bits behind the last token
        mask[-1] &= self._last_word
        complete = self._matcher.is_completed()
        self.exhausted = complete and not mask.any()
        if self._num_tokens < self._min_tokens and not self.exhausted:
            # an end that is text, too, waits where something else can follow
            others = mask & ~self._end_bits
            mask = others if others.any() else mask
        elif complete:
            mask |= self._end_bits
        self._mask = mask
        return mask


class AnyText(GrammarState):
    """A grammar of all texts, for steps on trial."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(_Anything(), is_text=np.ones(vocab_size, dtype=np.bool_))


class _Anything:
    def accept_token(self, token_id: int) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    def fill_next_token_bitmask(self, bitmask: Mask, index: int) -> bool:
        bitmask[index] = -1
        return True


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """A mask that allows these tokens alone."""
    flags = np.zeros(num_words(vocab_size) * 32, dtype=np.bool_)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)
