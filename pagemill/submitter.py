"""Many callers of one event loop submit single jobs; few scripts carry them."""

import asyncio
from collections import deque

from pagemill.async_client import AsyncClient
from pagemill.calls import Answer
from pagemill.client_core import CHUNK, Ready, accepted_or_raise, discard_unused, in_doubt
from pagemill.errors import PagemillError, QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.messages import Accepted
from pagemill.schema import Job
from pagemill.trace_context import TraceContext

# batches under way at a time
MAX_SENDING = 4

MAX_ASKING = 8


class Submitter:
    """
    Gathers the jobs of concurrent callers: what comes while others are sent goes out together.

    A thousand callers that each `AsyncClient.submit` would open as many connections.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._waiting: deque[tuple[Ready, asyncio.Future[Answer]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        # of the callers that read the table of models, or write to the object store
        self._asking = asyncio.Semaphore(MAX_ASKING)

    async def submit(self, job: Job) -> Accepted:
        """
        As `AsyncClient.submit`.

        Raises:
            As that does.
        """
        with self._client._sending() as sending:
            accepted, keys = await self._submit(job, self._client._context_of(sending))
            if sending is not None:
                sending.sent([accepted], keys.queue)
        return accepted

    async def _submit(self, job: Job, trace: TraceContext | None) -> tuple[Accepted, QueueKeys]:
        async with self._asking:
            await self._client._learn_models([job.model])
            ready = await self._client._prepare(job, trace)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((ready, answer))
        if len(self._tasks) < MAX_SENDING:
            task = asyncio.create_task(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            answers = [await answer]
        except QueueUnavailable as error:
            raise in_doubt(error, job.id) from error
        keys, submission = ready
        if submission.ref:
            await asyncio.to_thread(discard_unused, [ready], answers, self._client._store)
        [accepted] = accepted_or_raise(answers)
        self._client._directory.settle(accepted.job_id, keys)
        return accepted, keys

    async def _send(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(CHUNK, len(self._waiting)))]
            try:
                answers = await self._client._send([ready for ready, _ in batch])
            except PagemillError as error:
                for _, future in batch:
                    _fail(future, error)
            except BaseException as error:
                for _, future in batch:
                    _fail(future, error if isinstance(error, Exception) else QueueUnavailable("the submit was cut off"))
                raise
            else:
                for (_, future), answer in zip(batch, answers, strict=True):
                    # whoever asked may have gone meanwhile
                    if not future.done():
                        future.set_result(answer)


def _fail(future: "asyncio.Future[Answer]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
