"""The completer's loop: what it does again, what it gives up, and that it stops."""

import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from celery import Celery, states
from kombu.exceptions import OperationalError
from redis import Redis

from pagemill.client import Client
from pagemill.keys import MODELS, QueueKeys
from pagemill.replies import Reply
from producers.tasks import completer as module
from producers.tasks.completer import Completer, Completers
from producers.tasks.completion import Completion
from producers.tasks.ids import job_id_of
from producers.tasks.settings import CelerySettings
from tests.producers.tasks.test_completion import a_request, state_of, submitted, value_of
from tests.support.servers import MakeConsumer, wait_for


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(module, "LOOK_S", 0.05)


@pytest.fixture
def own(settings: CelerySettings, server_url: str, queue: str) -> CelerySettings:
    return settings.model_copy(update={"redis_url": server_url, "queue": queue})


@pytest.fixture
def run(app: Celery, own: CelerySettings) -> Iterator[Callable[[], None]]:
    """Starts a completer of the test's queue, which ends with the test."""
    stop = threading.Event()
    thread = Completer(app, own, own.queue, stop)
    yield thread.start
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def left(redis: Redis, queue: str) -> int:
    """Replies that are still there."""
    return int(redis.xlen(QueueKeys(queue).replies("celery")))


def test_it_tries_again_while_something_is_away(
    app: Celery, run: Callable[[], None], client: Client, consumer: MakeConsumer, redis: Redis, queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """
    A reply is not acknowledged before its task is complete.
    """
    complete, seen = Completion.complete, []

    def away_at_first(self: Completion, reply: Reply) -> None:
        seen.append(left(redis, queue))
        if len(seen) < 4:
            raise OperationalError("the broker is away")
        complete(self, reply)

    monkeypatch.setattr(Completion, "complete", away_at_first)
    request = a_request()
    submitted(client, request)
    worker = consumer()
    worker.finish(*worker.pull())
    run()

    wait_for(lambda: left(redis, queue) == 0)
    assert ([1, 1, 1, 1], states.SUCCESS) == (seen, state_of(app, request.id))


def test_what_it_cannot_do_fails_and_does_not_come_again(
    app: Celery, run: Callable[[], None], client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A callback that is none breaks the completing of its own task alone.
    """
    broken, sound = a_request(callbacks=[{"task": None, "args": 7}]), a_request()
    worker = consumer()
    for request in (broken, sound):
        submitted(client, request)
        worker.finish(*worker.pull())
    run()

    wait_for(lambda: left(redis, queue) == 0)
    assert (states.FAILURE, states.SUCCESS) == (state_of(app, broken.id), state_of(app, sound.id))
    assert "ResultLost" == type(value_of(app, broken.id)).__name__


def test_other_queues_are_found(
    app: Celery, own: CelerySettings, client: Client, consumer: MakeConsumer, redis: Redis, queue: str, server_url: str
) -> None:
    """
    A worker may open a queue for another model later: its replies are read too.
    """
    assert consumer
    stop = threading.Event()
    completers = Completers(own, stop)
    completers.start()
    redis.hset(MODELS, "other", f"{queue}-other")
    request = a_request()
    submitted(client, request, model="other")
    client.cancel(job_id_of(request.id))

    wait_for(lambda: state_of(app, request.id) == states.REVOKED)
    stop.set()
    completers.join(10)
    assert not completers.is_alive()
    assert server_url


def test_a_server_that_is_none_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    The process ends with 2 and a reason, instead of running without a completer.
    """
    monkeypatch.setenv("PAGEMILL_REDIS_URL", "redis+cluster://one:6379/3")

    assert 2 == module.main([])
    assert "a cluster has 0 alone" in capsys.readouterr().err


def test_the_help_is_told_and_nothing_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """
    As of any program; a flag that there is not ends with 2.
    """
    for flag, code in (("--help", 0), ("--none", 2)):
        with pytest.raises(SystemExit) as ended:
            module.main([flag])
        assert code == ended.value.code

    assert "pagemill.toml" in capsys.readouterr().out


def test_a_silent_server_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Told to stop, the process leaves a call that does not return: what is not acknowledged comes again.
    """
    called = threading.Event()

    def silent(_: Completers) -> None:
        called.set()
        threading.Event().wait(60)

    monkeypatch.setattr(Completers, "run", silent)
    monkeypatch.setattr(module, "STOP_S", 0.1)
    told = threading.Thread(target=lambda: called.wait() and signal.raise_signal(signal.SIGTERM))
    told.start()

    assert 0 == module.main([])

    told.join()
