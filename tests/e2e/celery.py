"""Celery from end to end: another service, which shares no code, and real servers and processes."""

import json
import sys
import tempfile
from pathlib import Path

from producers.child import Child
from producers.local_redis import local_redis
from tests.support.celery_box import CeleryBox, comes_up, up
from tests.support.servers import wait_for

QUEUE = "celery-e2e"


def run(workdir: Path) -> dict[str, int]:
    """
    Play all that another service may do with our tasks; raises at the first fault.

    The queue has one server, broker and backend another; a worker with the fake engine, an ingress, a completer
    of its own beside the ingress's, and a worker of the service are processes.

    Args:
        workdir: A folder for logs.

    Returns:
        How many of each went as they should: get, chord, chain, group, failure, revoke.
    """
    with local_redis() as queue_url, local_redis() as celery_url:
        box = CeleryBox(workdir, queue_url, QUEUE, celery_url, f"{celery_url[: celery_url.rindex('/')]}/1")
        flags = ["--redis-url", queue_url, "--queue", QUEUE, "--engine", "fake", "--lease-s", "3"]
        speed = ["--fake-tokens-per-s", "1000", "--max-model-len", "8192"]
        worker = Child([sys.executable, "-m", "worker", *flags, *speed], log=box.log("worker"))
        with (
            worker,
            box.ingress("-c", "2") as ingress,
            up(box.completer(), "completer.started"),
            box.foreign_worker() as foreign,
        ):
            comes_up(ingress)
            comes_up(foreign)
            with box.foreign_caller("20") as caller:
                wait_for(lambda: caller.exit_code() is not None, 120)
                assert caller.exit_code() == 0, caller.last_lines(40)
                counts: dict[str, int] = json.loads(box.seen.read_text())
                return counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(run(Path(folder)))
