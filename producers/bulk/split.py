"""Cuts a long text into parts of so many tokens, at the best borders that there are."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

# what a part may end behind, best first: a paragraph, a line, a sentence, a word
_BORDERS = tuple(
    re.compile(pattern) for pattern in (r"\n[ \t]*\n\s*", r"\n\s*", r"[.!?…][\"')\]»”’]*\s+|[。！？]\s*", r"\s+")
)

# a border this far before the end of what fits is not worth a shorter part
_LOOK_BACK = 0.5

# of UTF-8 that an unknown tokenizer makes a token of, few enough for most languages
BYTES_A_TOKEN = 3


class Counter(Protocol):
    """Counts tokens as a model's tokenizer does, or nearly."""

    def ends(self, text: str) -> Sequence[int]:
        """For each token where it ends in the text, in characters."""
        ...


class Estimate:
    """A token for every three bytes, where the model's tokenizer is not known."""

    def ends(self, text: str) -> Sequence[int]:
        ends, pending = [], 0
        for place, character in enumerate(text, 1):
            pending += len(character.encode(errors="replace"))
            while pending >= BYTES_A_TOKEN:
                ends.append(place)
                pending -= BYTES_A_TOKEN
        return [*ends, len(text)] if pending else ends


class Tokens:
    """
    The tokens of a tokenizer.json.

    Raises:
        ImportError: tokenizers is not installed.
    """

    def __init__(self, tokenizer_json: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def ends(self, text: str) -> Sequence[int]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [end for _, end in encoding.offsets]


def split(text: str, limit: int, counter: Counter) -> list[str]:
    """
    Parts of at most `limit` tokens each, which joined are the text; one where it fits.

    A single character may have more tokens than that, and is then a part by itself.
    """
    ends = counter.ends(text)
    parts, start, first = [], 0, 0
    while len(ends) - first > limit:
        furthest = ends[first + limit - 1]
        end = _border(text, start, max(furthest, start + 1))
        # cut out of its text, a part may have some tokens more
        while (over := len(counter.ends(text[start:end])) - limit) > 0 and end > start + 1:
            furthest = ends[max(first, bisect_right(ends, end) - 1 - over)]
            end = _border(text, start, max(min(furthest, end - 1), start + 1))
        parts.append(text[start:end])
        start, first = end, bisect_right(ends, end)
    if start < len(text):
        rest = text[start:]
        # alone it may have more tokens than in its text
        over = start > 0 and len(counter.ends(rest)) > limit
        parts += split(rest, limit, counter) if over else [rest]
    return parts


def _border(text: str, start: int, furthest: int) -> int:
    """The last good place to cut, not behind `furthest` and not far before it."""
    earliest = start + int((furthest - start) * _LOOK_BACK)
    for border in _BORDERS:
        found = [match.end() for match in border.finditer(text, max(start, earliest - 1), furthest)]
        if found and found[-1] > start:
            return found[-1]
    return furthest


def gather(texts: Sequence[str], limit: int, counter: Counter, joint: str = "\n\n") -> list[str]:
    """Neighbours joined, as many as have at most `limit` tokens together; one that has more stays alone."""
    groups: list[str] = []
    room = 0
    for text in texts:
        tokens = len(counter.ends(joint + text)) + 1
        if groups and tokens <= room:
            groups[-1] += joint + text
            room -= tokens
        else:
            groups.append(text)
            room = limit - tokens
    return groups
