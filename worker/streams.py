"""Publishes text while it is generated, for jobs that asked for it."""

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog

from engine.request import TextDelta
from pagemill.calls import in_chunks
from pagemill.consumer import Consumer
from pagemill.errors import ServerFull
from pagemill.messages import TokenDelta
from worker.leases import Held
from worker.sinks import Ended, Sink, keep_trying

log = structlog.get_logger(__name__)

# one round trip for so many: a new job's first text waits for those that are under way
JOBS_A_GO = 64


class TokenStreams:
    """
    Takes deltas and ends of streaming jobs, in the order in which the engine gave them.

    What comes while a publish is under way goes out together. A job's end is passed to the
    sink after its last text, so that a reader who sees the end has seen all.
    """

    def __init__(self, consumer: Consumer, sink: Sink) -> None:
        self._consumer = consumer
        self._sink = sink
        self._deltas: dict[str, tuple[Held, list[TokenDelta]]] = {}
        self._ends: list[Ended] = []
        self._work = asyncio.Event()

    def put(self, held: Held, delta: TextDelta) -> None:
        """Take new text of one answer."""
        offset = held.text_offsets.get(delta.index, 0)
        held.text_offsets[delta.index] = offset + len(delta.text)
        _, deltas = self._deltas.setdefault(delta.request_id, (held, []))
        deltas.append(TokenDelta(delta.index, offset, delta.text, delta.num_tokens))
        self._work.set()

    def end(self, ended: Ended) -> None:
        """Take the end of a streaming job."""
        ended.held.settled = True
        self._ends.append(ended)
        self._work.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            batch, self._deltas = self._deltas, {}
            ends, self._ends = self._ends, []
            for part in in_chunks(batch.values(), JOBS_A_GO):
                await keep_trying("tokens.publish", partial(self._publish, part))
            for ended in ends:
                self._sink.put(ended)

    async def _publish(self, texts: Sequence[tuple[Held, list[TokenDelta]]]) -> None:
        try:
            await self._consumer.publish_many((held.delivery, deltas) for held, deltas in texts)
        except ServerFull:
            # its readers get the rest from the result, which a full server takes, and which must not wait for this
            for held, _ in texts:
                log.warning("tokens.skipped", **held.ids, why="the server is out of memory")
