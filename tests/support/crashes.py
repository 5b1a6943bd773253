"""Work that ends at each of its steps, as if its process had been killed there."""

from collections.abc import Callable
from itertools import count
from threading import Lock
from typing import Any, TypeVar

import pytest

from pagemill.bulk_client import BulkClient
from pagemill.file_store import FileStore, FileWriter

T = TypeVar("T")

# all that a job changes in the world
EFFECTS = ((FileWriter, "_name"), (FileStore, "delete"), (BulkClient, "forget_many"), (BulkClient, "seal_batch"))


class Crashed(BaseException):
    """Stands for the end of the process."""


class Crash:
    """Lets a process live for so many effects; after the last one, or instead of it, nothing has any effect."""

    def __init__(self, patch: pytest.MonkeyPatch, num_effects: int, *, after: bool) -> None:
        self._left, self._after, self._lock = num_effects, after, Lock()
        for owner, name in EFFECTS:
            patch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **fields: Any) -> Any:
            with self._lock:
                self._left -= 1
                left = self._left
            if left < 0 or (left == 0 and not self._after):
                raise Crashed
            result = effect(*args, **fields)
            if left == 0:
                raise Crashed
            return result

        return wrapper


def crash_everywhere(work: Callable[[int], T], check: Callable[[int, T], None], *, after: bool) -> int:
    """Do a work with a crash at its first effect, its second ... and once more to its end; how many crashes it took."""
    for number in count(1):
        with pytest.MonkeyPatch.context() as patch:
            Crash(patch, number, after=after)
            try:
                work(number)
            except Crashed:
                is_through = False
            else:
                is_through = True
        check(number, work(number))
        if is_through:
            return number
    raise AssertionError("a work has an end")
