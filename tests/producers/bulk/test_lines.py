"""Lines are cut the same, however the bytes come."""

import random
import tracemalloc
from collections.abc import Iterable, Iterator

import pytest

from producers.bulk.lines import LineSplitter, LongLine


def split(windows: Iterable[bytes], max_bytes: int = 1_000_000) -> list[bytes | int]:
    """All lines; of a long one its length."""
    splitter = LineSplitter(max_bytes)
    lines = [line for window in windows for line in splitter.feed(window)] + splitter.finish()
    return [len(line) if isinstance(line, LongLine) else line for line in lines]


def in_windows(data: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        size = next(sizes)
        yield data[start : start + size]
        start += size


def reference(data: bytes, max_bytes: int) -> list[bytes | int]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line if len(line) <= max_bytes else len(line) for line in lines]


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 1000])
def test_only_a_newline_ends_a_line(window: int) -> None:
    """
    Separators of text that are no newline stay in the line, also where a window cuts them.
    """
    text = "a\u2028b\u0085c\rd\x0be\x0cf\x1cg\u2029é😀\r\n\n\nlast"

    lines = split(in_windows(text.encode(), iter(lambda: window, None)))

    assert ["a\u2028b\u0085c\rd\x0be\x0cf\x1cg\u2029é😀\r".encode(), b"", b"", b"last"] == lines


@pytest.mark.parametrize("seed", range(40))
def test_windows_of_any_size_give_the_same_lines(seed: int) -> None:
    """
    Random bytes in random windows are cut as the whole is cut at once.
    """
    rng = random.Random(seed)
    pieces = [b"\n", b"\r\n", b"\xef\xbb\xbf", b" ", "\u2028é😀".encode(), b"x" * 20, b"\x00\xff"]
    data = b"".join(rng.choice([*pieces, rng.randbytes(3)]) for _ in range(rng.randrange(400)))
    max_bytes = rng.choice([1, 10, 40, 10_000])
    largest = rng.choice([1, 2, 7, 50, 5000])

    lines = split(in_windows(data, iter(lambda: rng.randint(1, largest), None)), max_bytes)

    assert reference(data, max_bytes) == lines


def test_a_line_at_the_limit() -> None:
    """
    A line of as many bytes as there may be is kept, one byte more is not.
    """
    assert [b"xxxx", 5, b"y"] == split([b"xx", b"xx\nxxxxx\ny"], max_bytes=4)


def test_a_long_line_is_not_kept() -> None:
    """
    However long a line is, no more than the limit of it is in memory.
    """
    splitter = LineSplitter(1024)
    window = b"x" * 65536
    tracemalloc.start()
    for _ in range(1000):
        splitter.feed(window)
    (line,) = splitter.feed(b"\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert 65_536_000 == len(line)
    # other threads of the process are counted too
    assert peak < 16_000_000
