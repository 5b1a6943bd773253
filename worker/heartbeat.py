"""What a worker says of itself while it lives, for `pagemill status` and the demo."""

import os
import socket
import time
from collections.abc import Callable

from engine.capacity import Capacity
from worker.engine_port import EngineStats


class Heartbeat:
    """
    Makes the fields of a heartbeat; the token rate is over the time since the one before.

    Args:
        fixed: Fields that do not change.
        before: What the engine had counted before its first job.
    """

    def __init__(
        self,
        fixed: dict[str, str | int],
        before: EngineStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fixed = {"pid": os.getpid(), "host": socket.gethostname(), **fixed}
        self._clock = clock
        self._last_time = clock()
        self._prompt_tokens_before = before.prompt_tokens if before else 0
        self._tokens_before = before.generated_tokens if before else 0
        self._last_tokens = 0

    def fields(
        self, stats: EngineStats, capacity: Capacity, *, num_held: int, num_done: int, draining: bool
    ) -> dict[str, str | int | float]:
        now = self._clock()
        elapsed_s = now - self._last_time
        tokens = stats.generated_tokens - self._tokens_before
        rate = (tokens - self._last_tokens) / elapsed_s if elapsed_s > 0 else 0.0
        self._last_time, self._last_tokens = now, tokens
        return {
            **self._fixed,
            "state": "draining" if draining else "running",
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "swapped": stats.num_swapped,
            "sheds": stats.num_sheds,
            "held": num_held,
            "jobs_done": num_done,
            "kv_usage": round(stats.kv_usage, 4),
            "free_tokens": capacity.free_tokens,
            "total_tokens": capacity.total_tokens,
            "generated_tokens": tokens,
            "prompt_tokens": stats.prompt_tokens - self._prompt_tokens_before,
            "tokens_per_s": round(rate, 1),
        }
