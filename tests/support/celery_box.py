"""Celery's processes for tests: the ingress, completers, and another service, with their servers."""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery, states
from celery._state import _set_task_join_will_block

from producers.child import Child
from tests.support.servers import wait_for

CHECKOUT = Path(__file__).resolve().parents[2]
FOREIGN = Path(__file__).with_name("foreign.py")


@dataclass(frozen=True, slots=True)
class CeleryBox:
    """
    Where the processes of a test find each other.

    Args:
        folder: Of logs, and of the other service.
    """

    folder: Path
    queue_url: str
    queue: str
    broker_url: str
    backend_url: str

    @property
    def environ(self) -> dict[str, str]:
        """What the ingress and the completer are told."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PAGEMILL_", "CELERY_"))}
        return clean | {
            "PYTHONPATH": str(CHECKOUT),
            "PAGEMILL_REDIS_URL": self.queue_url,
            "PAGEMILL_QUEUE": self.queue,
            "CELERY_BROKER_URL": self.broker_url,
            "CELERY_RESULT_BACKEND": self.backend_url,
            "PAGEMILL_CELERY_CALLBACK_QUEUE": "foreign",
        }

    def caller(self) -> Celery:
        """An app that knows the two URLs."""
        app = Celery("caller", broker=self.broker_url, backend=self.backend_url, set_as_current=False)
        app.conf.task_default_queue = "foreign"
        return app

    def ingress(self, *flags: str, name: str = "ingress", queues: str = "pagemill.ingress", **environ: str) -> Child:
        """`celery -A producers.celery_app worker`; it has come up when `comes_up` says so."""
        command = [*self._celery("producers.celery_app"), "worker", "-Q", queues, "-l", "INFO", "-n", f"{name}@%h"]
        return Child(
            [*command, *(flags or ("-P", "threads", "-c", "4"))], log=self.log(name), environ=self.environ | environ
        )

    def completer(self, name: str = "completer", **environ: str) -> Child:
        """`python -m producers.tasks.completer`."""
        return Child(
            [sys.executable, "-m", "producers.tasks.completer"], log=self.log(name), environ=self.environ | environ
        )

    def foreign_worker(self) -> Child:
        """A worker of the other service, in its own folder."""
        command = [*self._celery("foreign"), "worker", "-Q", "foreign", "-l", "INFO", "-n", "foreign@%h", "-P", "solo"]
        folder = self._foreign_folder()
        return Child(
            [*command[:3], "--workdir", str(folder), *command[3:]],
            log=self.log("foreign"),
            environ=self._foreign_environ(folder),
        )

    def foreign_caller(self, *arguments: str) -> Child:
        """The other service's caller, which writes what it saw into `seen`."""
        folder = self._foreign_folder()
        command = [sys.executable, str(folder / "foreign.py"), str(self.seen), *arguments]
        return Child(command, log=self.log("caller"), environ=self._foreign_environ(folder))

    @property
    def seen(self) -> Path:
        return self.folder / "seen.json"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _foreign_folder(self) -> Path:
        folder = self.folder / "service"
        folder.mkdir(exist_ok=True)
        shutil.copy(FOREIGN, folder / "foreign.py")
        return folder

    def _foreign_environ(self, folder: Path) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PAGEMILL_", "CELERY_"))}
        urls = {"FOREIGN_BROKER": self.broker_url, "FOREIGN_BACKEND": self.backend_url}
        return clean | urls | {"PYTHONPATH": str(folder)}

    @staticmethod
    def _celery(app: str) -> list[str]:
        return [sys.executable, "-m", "celery", "-A", app]


class Caller:
    """
    Sends tasks by name and looks at the backend for what became of them.

    The waiting of Celery's own results is played by foreign.py; what these leave open is not for this process.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app

    def send(self, name: str, *args: Any, own_id: str | None = None, **kwargs: Any) -> str:
        """Send one of our tasks; gives its id."""
        queue = "pagemill.ingress"
        return str(self.app.send_task(f"pagemill.{name}", args, kwargs, queue=queue, task_id=own_id).id)

    def generate(self, prompt: str, max_tokens: int = 8, **fields: Any) -> str:
        return self.send("generate", prompt, options={"max_tokens": max_tokens}, **fields)

    def state(self, task_id: str) -> str:
        return str(self.app.backend.get_task_meta(task_id)["status"])

    def ends(self, task_id: str, timeout_s: float = 20.0) -> tuple[str, Any]:
        """Wait for its end: the state, and its value or exception."""
        wait_for(lambda: self.state(task_id) in states.READY_STATES, timeout_s)
        meta = self.app.backend.get_task_meta(task_id)
        return str(meta["status"]), meta["result"]

    def value(self, task_id: str, timeout_s: float = 20.0) -> Any:
        """What it gave."""
        state, value = self.ends(task_id, timeout_s)
        assert state == states.SUCCESS, value
        return value

    def failure(self, task_id: str) -> tuple[str, str, str]:
        """What it raised: the class's name, the message and the code."""
        state, raised = self.ends(task_id)
        assert state == states.FAILURE, (state, raised)
        return (type(raised).__name__, *raised.args)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Send one of our tasks and wait for what it gives."""
        return self.value(self.send(name, *args, **kwargs))


@contextmanager
def calling(box: CeleryBox) -> Iterator[Caller]:
    """A caller of this process, whose connections are closed at the end."""
    # who sends a task does not subscribe to its result: it is polled
    _set_task_join_will_block(True)
    app = box.caller()
    try:
        yield Caller(app)
    finally:
        _set_task_join_will_block(False)
        # a result that is collected later would connect again to unsubscribe
        gc.collect()
        app.backend.result_consumer.stop()
        app.backend.result_consumer._pubsub = None
        app.backend.client.connection_pool.disconnect()
        app.amqp.producer_pool.force_close_all()
        app.pool.force_close_all()
        app.close()


@contextmanager
def up(child: Child, word: str = " ready.") -> Iterator[Child]:
    """A process that has come up: its log has the word."""
    with child:
        comes_up(child, word)
        yield child


def comes_up(child: Child, word: str = " ready.", after: int = 0) -> None:
    """Wait until its log, from that byte on, has the word."""

    def said() -> bool:
        assert child.exit_code() is None, child.last_lines(40)
        return word in child.log.read_bytes()[after:].decode(errors="replace")

    wait_for(said, 60)
