"""Real work for a status page to show: workers with the fake engine, lanes, tenants, batches and dead letters."""

import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis

from pagemill.client import Client
from pagemill.errors import Busy
from pagemill.keys import QueueKeys
from pagemill.schema import Job
from producers.child import Child
from tests.support.servers import wait_for

# queues, and the models that their workers say they serve
QUEUES = {"chat": "large-chat", "night": "small-batch"}
BATCHES = (1200, 800, 500, 300, 150, 60)


@contextlib.contextmanager
def fleet(url: str, folder: Path) -> Iterator[None]:
    """Three workers at the first queue, one at the second."""
    with contextlib.ExitStack() as stack:
        for number, queue in enumerate(("chat", "chat", "chat", "night")):
            flags = ["--engine", "fake", "--fake-poison", "--fake-tokens-per-s", str(900 + 250 * number)]
            flags += ["--fake-kv-tokens", "24576", "--max-num-seqs", "32", "--restart-s", "0.2"]
            flags += ["--redis-url", url, "--queue", queue, "--served-model-name", QUEUES[queue]]
            command = [sys.executable, "-m", "worker", "--lease-s", "10", *flags]
            stack.enter_context(Child(command, log=folder / f"worker-{number}.log"))
        wait_for(lambda: _num_workers(url) == 4, 90)
        yield


def _num_workers(url: str) -> int:
    with Redis.from_url(url) as redis:
        return sum(redis.zcard(QueueKeys(queue).workers) for queue in QUEUES)


class Load:
    """Submits for as long as it is entered, faster and slower by turns."""

    def __init__(self, url: str, *, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._client = Client(url, queue="chat", max_queued_tokens=2_000_000)
        self._night = Client(url, queue="night", max_queued_tokens=2_000_000)
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._number = 0

    def __enter__(self) -> Self:
        for place, size in enumerate(BATCHES):
            self.open_batch(self._night if place % 3 == 2 else self._client, size, seal=place != 4)
        self.bury()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(30)
        self._client.close()
        self._night.close()

    def open_batch(self, client: Client, size: int, *, seal: bool = True) -> str:
        """A batch in which one job in fifty fails."""
        name = f"{self._random.choice(_NAMES)}-{self._random.randrange(1000):03}"
        batch_id = client.create_batch(name).batch_id
        jobs = [
            # longer than the model takes
            self._job("bulk", batch=batch_id, words=6000 if number % 50 == 7 else 40)
            for number in range(size)
        ]
        client.submit_many(jobs, wait_s=30)
        if seal:
            client.seal_batch(batch_id)
        return batch_id

    def bury(self) -> None:
        """Dead letters: entries that never were jobs, and one job that ends its worker."""
        with Redis.from_url(self._url) as redis:
            for text in ('{"prompt": 7}', "no JSON", '{"prompt": "a", "lane": "fast"}', '{"promt": "a"}'):
                redis.xadd(QueueKeys("chat").raw, {"d": text})
        self._night.submit(prompt="poison:raise", options={"max_tokens": 20}, lane="interactive", tenant="acme")

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(0.5):
            minute = (time.monotonic() - began) / 60
            # a slow wave, and minutes with more of it
            wave = 1.0 + 0.6 * (minute % 9 > 5) - 0.5 * (minute % 13 > 10)
            with contextlib.suppress(Busy):
                for lane, most in (("interactive", 3), ("standard", 5), ("bulk", 3)):
                    jobs = [self._job(lane) for _ in range(round(self._random.uniform(0, most) * wave))]
                    self._client.submit_many(jobs)
                self._night.submit_many([self._job("standard") for _ in range(round(2 * wave))])

    def _job(self, lane: str, *, batch: str | None = None, words: int = 40) -> Job:
        self._number += 1
        text = f"Summarise document {self._number}: " + "lorem ipsum " * self._random.randint(words // 2, words)
        options = {"max_tokens": self._random.randint(40, 260), "temperature": 0.7}
        tenant = self._random.choice(("default", "default", "acme", "globex"))
        return Job.build(prompt=text, options=options, lane=lane, batch=batch, tenant="default" if batch else tenant)


_NAMES = ("reviews", "tickets", "invoices", "abstracts", "titles", "summaries")
