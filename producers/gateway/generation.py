"""One request's way through the queue: let in, submitted, followed, and settled, whatever becomes of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import structlog

from pagemill.errors import PagemillError
from pagemill.messages import TERMINAL_STATES
from pagemill.schema import Job, Result
from producers.gateway.api_keys import ApiKey
from producers.gateway.limits import OverLimit, Ticket
from producers.gateway.state import Gateway
from producers.openai_api.chunks import Chunks, error_event
from producers.openai_api.errors import ApiError, of_pagemill

log = structlog.get_logger(__name__)

# an error that comes within so long is an HTTP status; after that the response has begun
PATIENCE_S = 10.0

# what keeps proxies from closing a stream that waits
KEEP_ALIVE = b": waiting\n\n"

# parts of a stream that wait for a client that reads slowly; the text behind them is joined (stream_hub.py)
MAX_UNREAD = 64

# how long a job that nobody waits for any more is watched for what it took
AFTERMATH_S = 120.0


class Generation:
    """
    The jobs of one request, from admission to settlement.

        await generation.enter()
        try:
            results = await generation.results()
        finally:
            generation.close()

    Closed early, as by a client that left, it cancels what runs; jobs under an idempotency key go on, as
    their caller may ask again.
    """

    def __init__(self, gateway: Gateway, key: ApiKey, jobs: Sequence[Job], *, route: str, began: float) -> None:
        self._gateway = gateway
        self._key = key
        self._jobs = jobs
        self._route = route
        self._began = began
        self._ticket: Ticket | None = None
        # by place: the job that stands for each of them, and how it ended
        self._ids: list[str] = []
        self._results: dict[int, Result] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def enter(self) -> None:
        """
        Raises:
            ApiError: the request cannot be let in, or the queue refuses it.
        """
        gateway = self._gateway
        if gateway.in_flight >= gateway.settings.max_in_flight:
            gateway.metrics.refused.labels("in_flight").inc()
            raise ApiError(503, "too many requests are under way: try again", code="overloaded", retry_after_s=1.0)
        self._count(1)
        try:
            self._ticket = await gateway.limiter.take(self._key, sum(job.estimated_tokens() for job in self._jobs))
            await self._submit()
        except BaseException as error:
            self._count(-1)
            self._leave()
            if isinstance(error, PagemillError | ApiError):
                raise self._refusal(error) from None
            raise

    def close(self) -> None:
        """Let go of the jobs; cancels those that run."""
        self._count(-1)
        for task in self._tasks:
            task.cancel()
        self._leave()

    @property
    def name(self) -> str:
        """The job that the request is known by."""
        return self._ids[0]

    async def results(self) -> list[Result]:
        """
        How its jobs ended, in order.

        Raises:
            ApiError: the queue cannot be reached, or the time is over.
        """
        try:
            found = await asyncio.gather(*map(self._result, range(len(self._ids))))
        except PagemillError as error:
            raise of_pagemill(error) from None
        return list(found)

    async def _result(self, place: int) -> Result:
        result = await self._gateway.hub.result(self._ids[place], wait_s=self._wait_s)
        self._results[place] = result
        return result

    async def events(self, chunks: Chunks) -> AsyncIterator[bytes]:
        """
        The events of its stream. Waits for the first, and for nothing more than PATIENCE_S before it.

        Raises:
            ApiError: before the first event; after it the error is the last event.
        """
        queue: asyncio.Queue[bytes | ApiError | None] = asyncio.Queue(MAX_UNREAD)
        self._tasks = [asyncio.create_task(self._follow(place, chunks, queue)) for place in range(len(self._ids))]
        num_open, begun = len(self._tasks), False
        reminder = _Reminder(queue)
        try:
            while num_open:
                parts = await _parts(queue)
                reminder.heard_at = asyncio.get_running_loop().time()
                data = b"".join(part for part in parts if isinstance(part, bytes))
                error = next((part for part in parts if isinstance(part, ApiError)), None)
                num_open -= parts.count(None)
                if error is not None and not begun and not data:
                    raise error
                if error is not None:
                    yield data + error_event(error)
                    return
                if data:
                    begun = True
                    yield data
            yield b"".join(chunks.close())
        finally:
            reminder.stop()

    async def _follow(self, place: int, chunks: Chunks, queue: "asyncio.Queue[bytes | ApiError | None]") -> None:
        first = True
        try:
            async for item in self._gateway.hub.follow(self._ids[place], wait_s=self._wait_s):
                if isinstance(item, Result):
                    self._results[place] = item
                    await queue.put(b"".join(chunks.end(place, item)))
                    continue
                if first and place == 0:
                    waited_s = time.monotonic() - self._began
                    self._gateway.metrics.first_token.labels(self._route).observe(waited_s)
                first = False
                await queue.put(chunks.text(place, item))
            await queue.put(None)
        except PagemillError as error:
            await queue.put(of_pagemill(error))
        except ApiError as error:
            await queue.put(error)
        except Exception:
            log.exception("stream.failed", job_id=self._ids[place])
            await queue.put(ApiError(500, "the gateway failed", code="internal_error"))

    @property
    def _wait_s(self) -> float:
        # the queue ends the job at its deadline; a little later than that somebody is wrong
        return self._gateway.settings.timeout_s + 30.0

    async def _submit(self) -> None:
        outcomes = await asyncio.gather(*map(self._gateway.submitter.submit, self._jobs), return_exceptions=True)
        errors = [one for one in outcomes if isinstance(one, BaseException)]
        self._ids = [one.job_id for one in outcomes if not isinstance(one, BaseException)]
        log.debug("request.submitted", jobs=self._ids)
        if errors:
            raise errors[0]

    def _refusal(self, error: PagemillError | ApiError) -> ApiError:
        refused = error if isinstance(error, ApiError) else of_pagemill(error)
        reason = error.limit if isinstance(error, OverLimit) else refused.code or "other"
        self._gateway.metrics.refused.labels(reason).inc()
        return refused

    def _count(self, by: int) -> None:
        self._gateway.in_flight += by
        self._gateway.metrics.in_flight.inc(by)

    def _leave(self) -> None:
        """Whatever is left to do goes on beside the requests."""
        if self._ticket is not None:
            self._gateway.start(self._settle(self._ticket))

    async def _settle(self, ticket: Ticket) -> None:
        try:
            await self._await_the_rest()
            used = [self._results[place].usage for place in sorted(self._results)]
            prompt, answer = sum(one.prompt_tokens for one in used), sum(one.completion_tokens for one in used)
            self._gateway.metrics.tokens.labels("prompt").inc(prompt)
            self._gateway.metrics.tokens.labels("completion").inc(answer)
            # where it is not known what a job took, the estimate stays charged: a bucket fills again, a day ends
            if len(self._results) == len(self._ids):
                await self._gateway.limiter.settle(ticket, prompt + answer)
        except PagemillError as error:
            log.warning("request.not_settled", error=str(error))

    async def _await_the_rest(self) -> None:
        """Cancel the jobs that nobody waits for, and see what they took; those that go on are waited for as well."""
        left = [place for place in range(len(self._ids)) if place not in self._results]
        # all at first: none of them runs on until another has ended
        ending = [place for place in left if await self._is_ending(place)]
        outcomes = await asyncio.gather(
            *(self._gateway.hub.result(self._ids[place], wait_s=AFTERMATH_S) for place in ending),
            return_exceptions=True,
        )
        for place, outcome in zip(ending, outcomes, strict=True):
            if isinstance(outcome, Result):
                self._results[place] = outcome
            else:
                log.warning("request.not_settled", job_id=self._ids[place], error=str(outcome))

    async def _is_ending(self, place: int) -> bool:
        """Cancel a job that may be; whether its result is worth waiting for."""
        gateway = self._gateway
        if self._jobs[place].idempotency_key is not None:
            return not gateway.stopping
        try:
            return await gateway.client.cancel(self._ids[place]) in TERMINAL_STATES or not gateway.stopping
        except PagemillError as error:
            log.warning("job.not_cancelled", job_id=self._ids[place], error=str(error))
            return False


async def _parts(queue: "asyncio.Queue[bytes | ApiError | None]") -> list[bytes | ApiError | None]:
    """What is there by now, at least one."""
    parts = [await queue.get()]
    # one write for all that came meanwhile
    while not queue.empty():
        parts.append(queue.get_nowait())
    return parts


class _Reminder:
    """Puts a comment into a stream's queue when it has been silent for PATIENCE_S."""

    def __init__(self, queue: "asyncio.Queue[bytes | ApiError | None]") -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._timer = self._loop.call_at(self.heard_at + PATIENCE_S, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        # looked at now and then: a timer for each event is a good part of what an event costs
        if self._loop.time() >= self.heard_at + PATIENCE_S:
            # one that is full waits for its client, and not for text
            if not self._queue.full():
                self._queue.put_nowait(KEEP_ALIVE)
            self.heard_at = self._loop.time()
        self._timer = self._loop.call_at(self.heard_at + PATIENCE_S, self._look)
