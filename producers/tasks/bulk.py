"""`pagemill.bulk`: a bulk job for a date, run by one worker at a time, however often its message comes."""

import datetime
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from redis import Redis
from redis.exceptions import LockError, RedisError
from redis.lock import Lock

from pagemill.connection import connect
from pagemill.keys import QueueKeys
from pagemill.scripts import translated
from producers.tasks.failures import failure

# whoever runs it says so several times in this time
LEASE_S = 60.0


class RunsElsewhere(Exception):
    """Raised when another worker runs the job for that date now."""


def run_bulk(redis_url: str, queue: str, name: str, date: str) -> dict[str, Any]:
    """
    Run a bulk job for a date, to its end; what an earlier run has done of it is not done again.

    Raises:
        TaskFailure: the date is none.
        RunsElsewhere: it is to be tried again later, should that worker die.
    """
    try:
        day = datetime.date.fromisoformat(date)
    except (TypeError, ValueError):
        raise failure("invalid_arguments", f"date is {date!r}: want one like 2026-11-30") from None
    with connect(redis_url) as redis, alone(redis, QueueKeys(queue).bulk_run(name, date)):
        # loaded here: what bulk depends on, the ingress does not
        report: dict[str, Any] = import_module("producers.bulk.schedule").run_for_date(name, day)
    return report


@contextmanager
def alone(redis: Redis, key: str, lease_s: float = LEASE_S) -> Iterator[None]:
    """
    Hold a lock that goes by itself when this process dies.

    Raises:
        RunsElsewhere: another one holds it.
    """
    lock = Lock(redis, key, timeout=lease_s, blocking=False, thread_local=False)
    with translated():
        if not lock.acquire():
            raise RunsElsewhere(key)
    over = threading.Event()
    keeper = threading.Thread(target=_keep, args=(lock, lease_s, over), name="bulk-lease", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        # it goes by itself
        with suppress(LockError, RedisError):
            lock.release()


def _keep(lock: Lock, lease_s: float, over: threading.Event) -> None:
    while not over.wait(lease_s / 6):
        try:
            lock.reacquire()
        except LockError:
            # the server lost it, or was away for a lease: bulk is idempotent, and goes on
            lock.acquire()
        except RedisError:
            # tried again before the lease is over
            continue
