"""Ids that come again are found among any number."""

import random

import pytest

from producers.bulk.duplicates import DuplicateFinder


def find(ids: list[str]) -> list[int]:
    with DuplicateFinder() as finder:
        for row, custom_id in enumerate(ids):
            finder.add(custom_id, row)
        return list(finder.find(len(ids)).within(0, len(ids)))


def test_the_first_row_of_an_id_is_none() -> None:
    """
    Rows that come second, third and so on with an id are found; what looks alike is another id.
    """
    assert [3, 5, 6] == find(["a", "b", "A", "a", "a ", "a", "b", "é", "e\u0301"])


@pytest.mark.parametrize("part_bytes", [22, 1000, 10_000_000])
def test_what_was_put_on_the_disk_counts_like_what_was_not(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Random ids give the rows that a dictionary gives, whether parts of them lie in files, partly or not at all.
    """
    monkeypatch.setattr("producers.bulk.duplicates._PART_BYTES", part_bytes)
    rng = random.Random(part_bytes)
    ids = [str(rng.randrange(4000)) for _ in range(6000)]
    firsts = {custom_id: row for row, custom_id in reversed(list(enumerate(ids)))}

    assert [row for row, custom_id in enumerate(ids) if firsts[custom_id] != row] == find(ids)


def test_a_window_of_rows() -> None:
    """
    A chunk is told its own rows alone.
    """
    with DuplicateFinder() as finder:
        for row in range(100):
            finder.add("same" if row % 10 == 0 else str(row), row)
        later = finder.find(100)

    assert ([10], [20, 30], []) == tuple(list(later.within(*window)) for window in ((0, 20), (20, 20), (91, 9)))
