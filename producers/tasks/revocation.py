"""
Celery's `revoke` for tasks whose job is in the queue already: it cancels the job.

A revoke is a broadcast that every live worker gets, whoever has the task. Celery marks the task as revoked and
has workers discard it where it comes; a task that has become a job comes no more, so the job is cancelled here.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from celery.worker import state as worker_state
from celery.worker.control import Panel
from kombu.utils.functional import maybe_list

from pagemill.client import Client
from pagemill.errors import JobNotFound, PagemillError, QueueUnavailable
from producers.tasks.ids import job_id_of

log = structlog.get_logger(__name__)

PAUSE_S = 0.2

Command = Callable[..., Any]


class Canceller(threading.Thread):
    """
    Cancels the jobs of revoked tasks, until `stop` is set; the server may be away meanwhile.

    Args:
        is_active: Whether this worker is about to make a job of the task.
    """

    def __init__(self, client: Client, stop: threading.Event, *, is_active: Callable[[str], bool]) -> None:
        super().__init__(name="canceller", daemon=True)
        self._client = client
        self._stopped = stop
        self._is_active = is_active
        self._revoked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def cancel(self, task_ids: Iterable[str]) -> None:
        """Cancel their jobs, soon; tasks of others have none."""
        for task_id in task_ids:
            self._revoked.put(task_id)

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                task_id = self._revoked.get(timeout=1.0)
            except queue.Empty:
                continue
            self._see_to(task_id)
        self._client.close()

    def _see_to(self, task_id: str) -> None:
        # asked before the look: a task that was active then may have submitted right after it
        is_active = self._is_active(task_id)
        try:
            state = self._client.cancel(job_id_of(task_id))
            log.info("revocation.cancelled", task_id=task_id, job_id=job_id_of(task_id), job_state=state)
        except JobNotFound:
            if is_active:
                self._again(task_id)
        except QueueUnavailable as error:
            log.warning("revocation.away", task_id=task_id, error=str(error))
            self._again(task_id)
        except PagemillError as error:
            log.error("revocation.failed", task_id=task_id, error=str(error))

    def _again(self, task_id: str) -> None:
        self._stopped.wait(PAUSE_S)
        self._revoked.put(task_id)


def is_active_here(task_id: str) -> bool:
    """Whether this worker has the task in its hands."""
    request = worker_state.requests.get(task_id)
    return request is not None and request in worker_state.reserved_requests


def hear_revokes(told: Callable[[Iterable[str]], None], commands: dict[str, Command] = Panel.data) -> None:
    """Have the worker's commands `revoke` and `terminate` tell of the task ids that they get."""

    def listening(command: Command, place: int) -> Command:
        def revoke(state: Any, *args: Any, **kwargs: Any) -> Any:
            reply = command(state, *args, **kwargs)
            # Celery takes any id that JSON has
            told(map(str, maybe_list(kwargs["task_id"] if "task_id" in kwargs else args[place]) or ()))
            return reply

        return revoke

    commands["revoke"] = listening(commands["revoke"], 0)
    commands["terminate"] = listening(commands["terminate"], 1)
