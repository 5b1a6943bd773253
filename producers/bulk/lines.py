"""Cut bytes that come in windows of any size into lines, in bounded memory."""


class LongLine:
    """A line that was too long to be kept; `len` is its length in bytes."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class LineSplitter:
    r"""
    Ends lines at b"\n" alone, and gives them without it.

    Text may hold U+2028, U+0085 or a lone carriage return, at which `splitlines` would cut it.

    Args:
        max_bytes: Of a line; of a longer one nothing is kept but its length.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

        # the line that has begun: what is kept of it, and how long it is
        self._begun: list[bytes] = []
        self._length = 0

    def feed(self, window: bytes) -> list[bytes | LongLine]:
        """The lines that end in the window."""
        first, *others = window.split(b"\n")
        self._extend(first)
        if not others:
            return []
        lines = [self._end()]
        last = others.pop()
        if len(window) > self._max_bytes:
            lines.extend(self._fitting(line) for line in others)
        else:
            lines.extend(others)
        self._extend(last)
        return lines

    def finish(self) -> list[bytes | LongLine]:
        """The last line, where it has no end of its own."""
        return [self._end()] if self._length else []

    def _extend(self, data: bytes) -> None:
        self._length += len(data)
        if self._length > self._max_bytes:
            self._begun.clear()
        elif data:
            self._begun.append(data)

    def _end(self) -> bytes | LongLine:
        line = LongLine(self._length) if self._length > self._max_bytes else b"".join(self._begun)
        self._begun, self._length = [], 0
        return line

    def _fitting(self, line: bytes) -> bytes | LongLine:
        return line if len(line) <= self._max_bytes else LongLine(len(line))
