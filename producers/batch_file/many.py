"""Reading many small objects at a time, and turning the pages of a list."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from pagemill.errors import ObjectNotFound
from producers.batch_file.records import BatchRecord, FileRecord, Page
from producers.openai_api.errors import bad_request

R = TypeVar("R", FileRecord, BatchRecord)

# a bucket answers each in some milliseconds, whatever the others do
_AT_ONCE = 16


def read_each(names: Sequence[str], read: Callable[[str], R]) -> Iterator[R]:
    """What `read` gives for each name, in order; without those that were deleted meanwhile."""

    def look(name: str) -> R | None:
        try:
            return read(name)
        except ObjectNotFound:
            return None

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="read") as threads:
        for start in range(0, len(names), _AT_ONCE):
            yield from filter(None, threads.map(look, names[start : start + _AT_ONCE]))


def page_of(
    ids: Sequence[str],
    read: Callable[[str], R],
    *,
    after: str | None,
    limit: int,
    wanted: Callable[[R], bool] = lambda _: True,
) -> Page[R]:
    """
    One page of a list.

    Args:
        ids: All there are, in the order of the list.

    Raises:
        ApiError: there is no `after`, or the limit is none.
    """
    if not 1 <= limit <= 10_000:
        raise bad_request(f"the limit is {limit}: want 1 to 10,000", "limit", "invalid_value")
    if after is not None:
        if after not in ids:
            raise bad_request(f"there is no {after[:100]!r} to go on after", "after", "invalid_value")
        ids = ids[ids.index(after) + 1 :]
    found = list(islice(filter(wanted, read_each(ids, read)), limit + 1))
    data = tuple(found[:limit])
    return Page(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
    )
