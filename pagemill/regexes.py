"""
Regular expressions that a worker can follow, checked without the library that follows them.

The dialect is the part of ECMAScript's that is regular: no look-around, no backreference, no word
boundary. The library passes over some of what it does not know with a warning; here it is an error.
"""

from typing import NoReturn

MAX_REGEX_BYTES = 16 * 1024
# of a pattern whose every character has become a class
MAX_JSON_PATTERN = 64 * 1024
MAX_GROUP_DEPTH = 64
MAX_REPEAT = 10_000

_ESCAPED = frozenset("dDwWsSnrtfv")
_WHY_NOT = {
    **dict.fromkeys("bB", "word boundaries are not supported"),
    **dict.fromkeys("pP", "Unicode classes are not supported: name the characters"),
    **dict.fromkeys("123456789k", "backreferences are not supported"),
}
_QUANTIFIERS = frozenset("*+?{")
# matches nothing. Patterns of ASCII alone the library follows in a way of its own inside JSON, in which `b` matches
# `(ab+)?`; this keeps it off that way
_NOT_ASCII = "[é]{0}"

# characters, as pairs of the first and the last of a run
Runs = list[tuple[int, int]]
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_NAMED: dict[str, Runs] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x2000, 0x200A), (0x2028, 0x2029), (0x3000, 0x3000)],
}
_RARE_SPACES: Runs = [
    (0x1C, 0x1F),
    (0x85, 0x85),
    (0x1680, 0x1680),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0xFEFF, 0xFEFF),
]
_LINE_ENDS: Runs = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
# what stands in a JSON string as an escape alone
_ESCAPED_IN_JSON: Runs = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), _SURROGATES]


def check_regex(pattern: str) -> None:
    """
    Raises:
        ValueError: where and why no worker can follow it; positions count characters from 0.
    """
    _parts_of(pattern)


def json_pattern(pattern: str) -> str:
    """
    The same for a string in JSON: it matches nothing that would have to be escaped there.

    The library sees to that for some patterns and not for others.

    Raises:
        ValueError: as `check_regex`; or a part of it could match nothing else.
    """
    texts, length = [], 0
    for part in _parts_of(pattern):
        text = part if isinstance(part, str) else _class_of(part)
        length += len(text)
        # at once: a short pattern may have thousands of large classes
        if length > MAX_JSON_PATTERN:
            raise ValueError(f"regex with all its classes has more than {MAX_JSON_PATTERN:,} characters")
        texts.append(text)
    return "".join([*texts, _NOT_ASCII])


def _parts_of(pattern: str) -> "list[str | Runs]":
    num_bytes = len(pattern.encode(errors="replace"))
    if num_bytes > MAX_REGEX_BYTES:
        raise ValueError(f"regex has {num_bytes:,} bytes: want no more than {MAX_REGEX_BYTES:,}")
    reader = _Reader(pattern)
    reader.read()
    return reader.parts


def _class_of(runs: Runs) -> str:
    safe = _without(runs, _ESCAPED_IN_JSON)
    if not safe:
        raise ValueError("regex: quotes, backslashes and control characters are not supported in a JSON string")
    return f"[{''.join(_char(low) if low == high else f'{_char(low)}-{_char(high)}' for low, high in safe)}]"


def _char(code: int) -> str:
    return chr(code) if chr(code).isalnum() or code > 0xFFFF else f"\\u{code:04x}"


def _without(runs: Runs, others: Runs) -> Runs:
    """The characters of some runs that are in none of others; ascending, and linear in their number."""
    left: Runs = []
    holes = [*_merged(others), (_LAST + 1, _LAST + 1)]
    place = 0
    for low, high in _merged(runs):
        while holes[place][1] < low:
            place += 1
        # the last hole may reach into the next run, so it is not passed here
        while holes[place][0] <= high:
            first, last = holes[place]
            if low < first:
                left.append((low, first - 1))
            low = last + 1
            if last > high:
                break
            place += 1
        if low <= high:
            left.append((low, high))
    return left


def _merged(runs: Runs) -> Runs:
    """The same characters in runs that do not touch, ascending."""
    merged: Runs = []
    for low, high in sorted(runs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged


def _all_but(runs: Runs) -> Runs:
    return _without([(0, _LAST)], runs)


class _Reader:
    """Reads a pattern once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._depth = 0
        # what was read: characters that may stand at a place, and what joins such places; without anchors
        self.parts: list[str | Runs] = []

    def read(self) -> None:
        # whether something stands before that can be repeated
        repeatable = False
        while self._place < len(self._pattern):
            char = self._pattern[self._place]
            if char in _QUANTIFIERS:
                if not repeatable:
                    self._refuse(f"nothing to repeat before {char!r}; a literal one is written \\{char}")
                start = self._place
                self._quantifier()
                # a lazy one matches the same texts
                self.parts.append(self._pattern[start] + self._pattern[start + 1 : self._place].removesuffix("?"))
                repeatable = False
            else:
                repeatable = self._item(char)
        if self._depth:
            self._refuse("a group is not closed")

    def _item(self, char: str) -> bool:
        """Read one item that is no quantifier; whether it can be repeated."""
        if char == "(":
            self._open()
            self.parts.append("(?:")
            return False
        if char == "\\":
            self.parts.append(self._escape())
            return True
        if char == ")":
            if not self._depth:
                self._refuse("a group is closed that was not opened")
            self._depth -= 1
        elif char == "[":
            self._class()
        elif char == "\0" or "\ud800" <= char <= "\udfff":
            self._refuse("NUL and lone surrogates are no text")
        elif (char == "^" and self._place > 0) or (char == "$" and self._place < len(self._pattern) - 1):
            self._refuse(f"{char!r} inside the pattern; the whole answer is matched anyway")
        self._place += 1
        if char in "|)":
            self.parts.append(char)
        elif char not in "^$[":
            self.parts.append(_all_but(_LINE_ENDS) if char == "." else [(ord(char), ord(char))])
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
        negated = self._pattern.startswith("^", self._place)
        self._place += negated
        start = self._place
        runs: Runs = []
        if self._pattern.startswith("[:", self._place):
            self._refuse("POSIX classes are not supported: name the characters")
        # the first character of what may be a range; None behind one, and behind a class of many
        low: int | None = None
        while not self._pattern.startswith("]", self._place):
            is_dash = self._pattern[self._place : self._place + 1] == "-"
            member = self._member()
            if not is_dash or low is None or self._pattern.startswith("]", self._place):
                runs += member
                low = member[0][0] if len(member) == 1 and member[0][0] == member[0][1] else None
                continue
            [(high, last), *others] = self._member()
            if others or high != last or high < low:
                self._refuse("a range whose end lies before its start, or is no character")
            runs.append((low, high))
            low = None
        if self._place == start:
            self._refuse("an empty class")
        self.parts.append(_all_but(runs) if negated else runs)

    def _member(self) -> Runs:
        """Read one member of a class."""
        if self._place >= len(self._pattern):
            self._refuse("a class is not closed")
        if self._pattern[self._place] == "\\":
            return self._escape()
        self._place += 1
        code = ord(self._pattern[self._place - 1])
        return [(code, code)]

    def _escape(self) -> Runs:
        """Read an escape: the characters that it stands for."""
        char = self._pattern[self._place + 1 : self._place + 2]
        if not char:
            self._refuse("an escape is not finished")
        if char in "xu":
            code = self._code(2 if char == "x" else 4)
            return [(code, code)]
        if char.isalnum() and char not in _ESCAPED:
            self._refuse(_WHY_NOT.get(char, f"\\{char} is not supported"))
        self._place += 2
        if char in "dwsDWS":
            runs = _NAMED[char.lower()]
            # rare ones that are white space to some are neither
            return runs if char.islower() else _all_but(runs + _RARE_SPACES if char == "S" else runs)
        code = ord({"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}.get(char, char))
        return [(code, code)]

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
