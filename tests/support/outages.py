"""What goes on while a server is away: a producer that submits, and clients that wait."""

import asyncio
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.schema import Job
from tests.support.servers import a_job, wait_for


class _Background:
    """Something that runs on a thread of its own; what it raises fails the test."""

    def __init__(self, url: str, queue: str) -> None:
        self.error: BaseException | None = None
        self._url, self._queue = url, queue
        self._thread = Thread(target=self._run_caught)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(90)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run_caught(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        raise NotImplementedError


class Traffic(_Background):
    """A producer that goes on submitting, whatever happens; `jobs` are those that were accepted."""

    def __init__(self, url: str, queue: str) -> None:
        super().__init__(url, queue)
        self.jobs: list[Job] = []
        self._stop = Event()

    def __enter__(self) -> Self:
        super().__enter__()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        super().__exit__()

    def goes_on(self) -> None:
        """Wait until some more were accepted."""
        before = len(self.jobs)
        wait_for(lambda: len(self.jobs) > before + 20 or self.error, 40)

    def _run(self) -> None:
        with Client(self._url, queue=self._queue) as client:
            while not self._stop.wait(0.01):
                job = a_job(f"{len(self.jobs)}")
                client.submit(job, wait_s=40)
                self.jobs.append(job)


class Waiters(_Background):
    """All ways to wait for a job and its batch, of both clients; `heard` are their states by way."""

    ways = ("result", "finished", "stream", "wait_batch")

    def __init__(self, url: str, queue: str, job_id: str, batch_id: str) -> None:
        super().__init__(url, queue)
        self.heard: dict[str, Any] = {}
        self._job_id, self._batch_id = job_id, batch_id
        self._others = [Thread(target=self._note, args=(way,)) for way in self.ways]

    def __enter__(self) -> Self:
        for other in self._others:
            other.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        for other in self._others:
            other.join(90)
        super().__exit__()

    def wait_until_they_wait(self, master: Redis) -> None:
        """All have asked the server, and listen there."""
        keys = QueueKeys(self._queue)
        channels = keys.channel(self._job_id), keys.batch_channel(self._batch_id)

        def listen() -> bool:
            with suppress(RedisError):
                counts = master.execute_command("PUBSUB", "NUMSUB", *channels)[1::2]
                reads = [row for row in master.client_list() if row["cmd"] == "xread" and "b" in row["flags"]]
                # the asyncio client listens to all of it on one connection
                return counts == [2, 2] and len(reads) == 3
            return False

        wait_for(listen, 20)

    def _note(self, way: str) -> None:
        with Client(self._url, queue=self._queue) as client:
            try:
                self.heard[way] = self._blocking(client, way)
            except BaseException as error:
                self.error = error

    def _blocking(self, client: Client, way: str) -> Any:
        if way == "result":
            return client.result(self._job_id, wait_s=80).text
        if way == "finished":
            return next(client.finished([self._job_id], wait_s=80)).text
        if way == "stream":
            return "".join(delta.text for delta in client.stream(self._job_id, wait_s=80))
        return client.wait_batch(self._batch_id, wait_s=80).done

    def _run(self) -> None:
        asyncio.run(self._wait_async())

    async def _wait_async(self) -> None:
        async with AsyncClient(self._url, queue=self._queue) as client:

            async def finished() -> str:
                return "".join([one.text async for one in client.finished([self._job_id], wait_s=80)])

            async def stream() -> str:
                return "".join([delta.text async for delta in client.stream(self._job_id, wait_s=80)])

            result, *texts, batch = await asyncio.gather(
                client.result(self._job_id, wait_s=80),
                finished(),
                stream(),
                client.wait_batch(self._batch_id, wait_s=80),
            )
            self.heard |= zip(("a result", "a finished", "a stream"), (result.text, *texts), strict=True)
            self.heard["a batch"] = batch.done
