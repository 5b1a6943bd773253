"""What each request took of the engine's time."""

import math


class Meter:
    """
    Shares the engine's time equally among the requests in it, step by step.

    A counter adds up what one request would owe that was there from the start; a request's share is
    its growth from entry to end. Whole milliseconds are given out, and what is cut off one goes to
    the next: the shares of all requests add up to the time spent, whatever joins and leaves.
    """

    def __init__(self) -> None:
        self._counter_s = 0.0
        self._entered_at: dict[str, float] = {}
        self._cut_ms = 0.0

    def __len__(self) -> int:
        """Requests in the engine."""
        return len(self._entered_at)

    def enter(self, request_id: str) -> None:
        """Note a request that the engine has taken."""
        self._entered_at[request_id] = self._counter_s

    def spend(self, elapsed_s: float) -> None:
        """Add a step that lasted so long to all that are there."""
        if self._entered_at:
            self._counter_s += elapsed_s / len(self._entered_at)

    def leave(self, request_id: str) -> int:
        """A request's share in milliseconds, as it leaves; 0 where it never entered."""
        entered_at = self._entered_at.pop(request_id, None)
        if entered_at is None:
            return 0
        share_ms = 1000 * (self._counter_s - entered_at) + self._cut_ms
        whole_ms = math.floor(share_ms)
        self._cut_ms = share_ms - whole_ms
        return whole_ms
