"""Go on where the last read of an object stopped, where entering it in the middle costs a way from its beginning."""

import threading
from collections.abc import Callable, Iterator

from pagemill.objects import ObjectEntry
from producers.bulk.columns import Item

# an object, the row's number there, and where to begin
OpenRows = Callable[[ObjectEntry, int, int], Iterator[tuple[Item, int]]]


class ForwardReader:
    """
    Reads windows of rows; those that follow one another cost one way through the object.

    One open read is kept, so that chunks read in order are read once. Any other order, or several threads at once, is
    as right and costs more: each jump begins at the object's beginning, or its row group's.
    """

    def __init__(self, open_rows: OpenRows) -> None:
        self._open_rows = open_rows
        self._lock = threading.Lock()
        self._kept: tuple[tuple[str, str, int], Iterator[tuple[Item, int]]] | None = None

    def rows(self, entry: ObjectEntry, first_row: int, start: int, end: int) -> Iterator[tuple[Item, int]]:
        """Each row from `start` to `end`, with where it ends."""
        reading = self._take((entry.url, entry.etag, start)) or self._open_rows(entry, first_row, start)
        for item, position in reading:
            if position == end:
                # before the last row is given: whoever counts rows does not come back behind it
                with self._lock:
                    self._kept = (entry.url, entry.etag, end), reading
                yield item, position
                return
            yield item, position

    def _take(self, place: tuple[str, str, int]) -> Iterator[tuple[Item, int]] | None:
        with self._lock:
            if self._kept is None or self._kept[0] != place:
                return None
            reading, self._kept = self._kept[1], None
            return reading
