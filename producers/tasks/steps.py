"""What runs in an ingress worker beside its tasks: the completer, and the cancelling of revoked jobs."""

import threading
from typing import Any

from celery import Celery, bootsteps

from pagemill.client import Client
from producers.tasks.completer import Completers
from producers.tasks.config import INGRESS_QUEUE
from producers.tasks.revocation import Canceller, hear_revokes, is_active_here
from producers.tasks.settings import CelerySettings


class IngressStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """
    Threads of the worker's own process, from its start to its end.

    A worker of other queues than the ingress's hears revokes too, but completes nothing.
    """

    # after the pool: what forks at the start does so without these threads
    requires = ("celery.worker.components:Pool",)
    label = "pagemill"

    # set by `add_steps`: Celery makes the step
    settings: CelerySettings

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, worker: Any) -> None:
        settings = self.settings
        canceller = Canceller(Client(settings.redis_url, queue=settings.queue), self._stop, is_active=is_active_here)
        hear_revokes(canceller.cancel)
        self._threads = [canceller]
        if settings.celery_completer and INGRESS_QUEUE in worker.app.amqp.queues.consume_from:
            self._threads.append(Completers(settings, self._stop))
        for thread in self._threads:
            thread.start()

    def stop(self, worker: Any) -> None:  # noqa: ARG002  Celery's signature
        self._stop.set()
        for thread in self._threads:
            thread.join(5.0)

    terminate = stop


def add_steps(app: Celery, settings: CelerySettings) -> None:
    """Have the app's workers run them."""
    app.steps["worker"].add(type("IngressStep", (IngressStep,), {"settings": settings}))
