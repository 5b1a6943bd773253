"""Celery's processes for tests: the ingress, completers, and another service, with their servers."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from celery import Celery

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
        return Celery("caller", broker=self.broker_url, backend=self.backend_url, set_as_current=False)

    def ingress(self, *flags: str, name: str = "ingress", queues: str = "pagemill.ingress", **environ: str) -> Child:
        """`celery -A producers.celery_app worker`; it has come up when `comes_up` says so."""
        command = [*self._celery("producers.celery_app"), "worker", "-Q", queues, "-l", "INFO", "-n", f"{name}@%h"]
        return Child(
            [*command, *(flags or ("-P", "threads", "-c", "4"))], log=self.log(name), environ=self.environ | environ
        )

    def completer(self, name: str = "completer") -> Child:
        """`python -m producers.tasks.completer`."""
        return Child([sys.executable, "-m", "producers.tasks.completer"], log=self.log(name), environ=self.environ)

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
