"""
Regular expressions that a worker can follow, checked without the library that follows them.

The dialect is the part of ECMAScript's that is regular: no look-around, no backreference, no word
boundary. The library passes over some of what it does not know with a warning; here it is an error.
"""

from typing import NoReturn

MAX_REGEX_BYTES = 16 * 1024
MAX_GROUP_DEPTH = 64
MAX_REPEAT = 10_000

_ESCAPED = frozenset("dDwWsSnrtfv")
_WHY_NOT = {
    **dict.fromkeys("bB", "word boundaries are not supported"),
    **dict.fromkeys("pP", "Unicode classes are not supported: name the characters"),
    **dict.fromkeys("123456789k", "backreferences are not supported"),
}
_QUANTIFIERS = frozenset("*+?{")


def check_regex(pattern: str) -> None:
    """
    Raises:
        ValueError: where and why no worker can follow it; positions count characters from 0.
    """
    num_bytes = len(pattern.encode(errors="replace"))
    if num_bytes > MAX_REGEX_BYTES:
        raise ValueError(f"regex has {num_bytes:,} bytes: want no more than {MAX_REGEX_BYTES:,}")
    _Reader(pattern).read()


class _Reader:
    """Reads a pattern once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._depth = 0

    def read(self) -> None:
        # whether something stands before that can be repeated
        repeatable = False
        while self._place < len(self._pattern):
            char = self._pattern[self._place]
            if char in _QUANTIFIERS:
                if not repeatable:
                    self._refuse(f"nothing to repeat before {char!r}; a literal one is written \\{char}")
                self._quantifier()
                repeatable = False
            else:
                repeatable = self._item(char)
        if self._depth:
            self._refuse("a group is not closed")

    def _item(self, char: str) -> bool:
        """Read one item that is no quantifier; whether it can be repeated."""
        if char == "(":
            self._open()
            return False
        if char == ")":
            if not self._depth:
                self._refuse("a group is closed that was not opened")
            self._depth -= 1
        elif char == "[":
            self._class()
        elif char == "\\":
            self._escape()
            return True
        elif char == "\0" or "\ud800" <= char <= "\udfff":
            self._refuse("NUL and lone surrogates are no text")
        elif (char == "^" and self._place > 0) or (char == "$" and self._place < len(self._pattern) - 1):
            self._refuse(f"{char!r} inside the pattern; the whole answer is matched anyway")
        self._place += 1
        return char not in "|^$"

    def _open(self) -> None:
        if self._pattern.startswith("(?:", self._place):
            self._place += 2
        elif self._pattern.startswith("(?", self._place):
            self._refuse("look-around, named groups and flags are not supported: write (?:...) or (...)")
        self._place += 1
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            self._refuse(f"groups are nested more than {MAX_GROUP_DEPTH} deep")

    def _quantifier(self) -> None:
        if self._pattern[self._place] == "{":
            self._bounds()
        self._place += 1
        # a lazy one matches the same texts
        self._place += self._pattern.startswith("?", self._place)

    def _bounds(self) -> None:
        # leaves the place at the closing brace
        end = self._pattern.find("}", self._place)
        low, _, high = self._pattern[self._place + 1 : max(end, 0)].partition(",")
        if not _is_number(low) or (high and not _is_number(high)):
            self._refuse("want {n}, {n,} or {n,m}; a literal brace is written \\{")
        least, most = int(low), int(high) if high else int(low)
        if most < least or most > MAX_REPEAT:
            self._refuse(f"a repetition of {least:,} to {most:,}: want up to {MAX_REPEAT:,}, the smaller one first")
        self._place = end

    def _class(self) -> None:
        # leaves the place at the closing bracket
        self._place += 1
        self._place += self._pattern.startswith("^", self._place)
        start = self._place
        if self._pattern.startswith("[:", self._place):
            self._refuse("POSIX classes are not supported: name the characters")
        # the first character of what may be a range; None behind one, and behind a class of many
        low: int | None = None
        while not self._pattern.startswith("]", self._place):
            char = self._member()
            is_range = char == ord("-") and low is not None and not self._pattern.startswith("]", self._place)
            if not is_range:
                low = char
                continue
            high = self._member()
            if high is None or (low is not None and high < low):
                self._refuse("a range whose end lies before its start, or is no character")
            low = None
        if self._place == start:
            self._refuse("an empty class")

    def _member(self) -> int | None:
        """Read one member of a class: its character, or None for one that stands for many."""
        if self._place >= len(self._pattern):
            self._refuse("a class is not closed")
        if self._pattern[self._place] == "\\":
            return self._escape()
        self._place += 1
        return ord(self._pattern[self._place - 1])

    def _escape(self) -> int | None:
        """Read an escape: its character, or None for one that stands for many."""
        char = self._pattern[self._place + 1 : self._place + 2]
        if not char:
            self._refuse("an escape is not finished")
        if char in "xu":
            return self._code(2 if char == "x" else 4)
        if char.isalnum() and char not in _ESCAPED:
            self._refuse(_WHY_NOT.get(char, f"\\{char} is not supported"))
        self._place += 2
        many = char in "dDwWsS"
        return None if many else ord({"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}.get(char, char))

    def _code(self, num_digits: int) -> int:
        digits = self._pattern[self._place + 2 : self._place + 2 + num_digits]
        try:
            code = int(digits, 16) if len(digits) == num_digits else 0
        except ValueError:
            code = 0
        if not code or 0xD800 <= code <= 0xDFFF:
            self._refuse("want \\xHH or \\uHHHH of a character that is neither NUL nor a surrogate")
        self._place += 2 + num_digits
        return code

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"regex, position {self._place}: {why}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
