"""
Completes tasks whose jobs have ended: a thread for each queue, beside the ingress or in a process of its own.

    python -m producers.tasks.completer

Several may run side by side: each reply is one's, and another's where that one dies.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

import structlog
from celery import Celery
from celery._state import _set_task_join_will_block
from celery.exceptions import BackendError
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from pagemill.client import Client
from pagemill.connection import connect
from pagemill.errors import PagemillError, QueueUnavailable, StoreAway
from pagemill.keys import MODELS, QueueKeys
from pagemill.logs import configure_logging
from pagemill.replies import Replies, Reply, queues_with_models
from pagemill.settings import LogSettings
from producers.tasks.completion import Completion, ids_of
from producers.tasks.config import make_app
from producers.tasks.settings import CelerySettings, load_settings

log = structlog.get_logger(__name__)

# what passes by itself: the queue, the broker, the backend or the store is away
AWAY = (QueueUnavailable, StoreAway, OperationalError, BackendError, RedisError, OSError)

PAUSE_S = 1.0

# how often it is looked for queues that a worker has opened meanwhile
LOOK_S = 30.0

# how long what is under way may take when it is time to stop: a server that is silent would keep us for minutes
STOP_S = 10.0


class Completer(threading.Thread):
    """
    Completes the tasks of one queue until `stop` is set.

    A reply is acknowledged when all of it is done; killed at any point, another completer does it again.
    """

    def __init__(self, app: Celery, settings: CelerySettings, queue: str, stop: threading.Event) -> None:
        super().__init__(name=f"completer-{queue}", daemon=True)
        self._app = app
        self._settings = settings
        self._queue = queue
        self._stopped = stop

    def run(self) -> None:
        url = self._settings.redis_url
        with (
            connect(url, key=QueueKeys(self._queue).base) as redis,
            Client(url, queue=self._queue, object_store=self._settings.object_store) as client,
        ):
            completion = Completion(self._app, client)
            name, claim_s = self._settings.celery_reply_to, self._settings.celery_reply_claim_s
            replies = Replies(redis, self._queue, name, claim_s=claim_s)
            while not self._stopped.is_set():
                try:
                    taken = replies.take()
                except QueueUnavailable as error:
                    self._pause(error)
                    continue
                for reply in taken:
                    self._see_to(completion, replies, reply)

    def _see_to(self, completion: Completion, replies: Replies, reply: Reply) -> None:
        """Complete one; while something is away, try again, and leave it pending when it is time to stop."""
        fault: Exception | None = None
        given_up = False
        while not self._stopped.is_set():
            try:
                if fault is None:
                    completion.complete(reply)
                elif not given_up:
                    completion.give_up(reply, fault)
                replies.ack([reply])
                return
            except AWAY as error:
                self._pause(error)
            except Exception as error:
                # no try would end otherwise: what cannot be said as a failure either is let go
                log.exception("completer.failed", **ids_of(reply))
                given_up = fault is not None or not reply.job_id
                fault = error

    def _pause(self, error: Exception) -> None:
        log.warning("completer.away", queue=self._queue, error=str(error))
        self._stopped.wait(PAUSE_S)


class Completers(threading.Thread):
    """
    A completer for the settings' queue, and one for each other that serves a model.

    Raises:
        SettingsError: the settings cannot be used.
    """

    def __init__(self, settings: CelerySettings, stop: threading.Event) -> None:
        super().__init__(name="completers", daemon=True)
        self._settings = settings
        self._stopped = stop
        self._running: dict[str, Completer] = {}
        # the table of models has a node of its own in a cluster
        self._models = connect(settings.redis_url, key=MODELS)
        # an app of its own: the ingress forks, and no lock of its app may be held then
        self._app = make_app(settings, "pagemill-completer")

    def run(self) -> None:
        # as in the processes of a worker's pool: who sends a callback does not subscribe to its result
        _set_task_join_will_block(True)
        with self._models as redis:
            while not self._stopped.is_set():
                queues = {self._settings.queue}
                try:
                    queues |= queues_with_models(redis)
                except PagemillError as error:
                    log.warning("completer.away", error=str(error))
                for queue in sorted(queues):
                    if queue not in self._running or not self._running[queue].is_alive():
                        self._running[queue] = Completer(self._app, self._settings, queue, self._stopped)
                        self._running[queue].start()
                self._stopped.wait(LOOK_S)
        for thread in self._running.values():
            thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Complete tasks until SIGTERM or SIGINT."""
    about = "Complete Celery's tasks whose jobs have ended, until SIGTERM."
    told = "All settings are PAGEMILL_<NAME> in the environment, or lines of pagemill.toml."
    argparse.ArgumentParser(prog="python -m producers.tasks.completer", description=about, epilog=told).parse_args(argv)
    try:
        settings = load_settings()
        configure_logging(LogSettings.load(strict=False))
        stop = threading.Event()
        completers = Completers(settings, stop)
    except PagemillError as error:
        print(f"pagemill: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    completers.start()
    log.info("completer.started", queue=settings.queue, reply_to=settings.celery_reply_to)
    # with a time-out: a wait without one would not hear the signal on every system
    while not stop.wait(1.0):
        pass
    # what was not acknowledged by then is another completer's
    completers.join(STOP_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
