"""The processes that an ingress's tasks run in."""

from celery.concurrency.prefork import TaskPool as Prefork


class TaskPool(Prefork):  # type: ignore[misc]
    """
    Celery's own pool, whose size can be asked for once it is stopped.

    A cold shutdown stops the pool within the signal's handler. The loop that was interrupted goes on to its end, and
    with `worker_disable_prefetch` asks how many tasks may run; Celery's pool raises then, and the worker exits with 1.
    """

    @property
    def num_processes(self) -> int:
        return int(self.limit if self._pool is None else self._pool._processes)
