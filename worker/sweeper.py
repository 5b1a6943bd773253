"""Keeps the queue clean for the whole fleet: one worker at a time, whichever holds the lock."""

import asyncio

import structlog

from pagemill.consumer import Consumer
from pagemill.errors import QueueUnavailable

log = structlog.get_logger(__name__)

MAX_JOBS = 256


async def sweep_forever(consumer: Consumer, *, every_s: float) -> None:
    """
    Bring back what dead workers held, promote what is due, expire what waited too long.

    A sweep that met its limit is followed by the next at once.
    """
    while True:
        try:
            report = await consumer.sweep(MAX_JOBS)
        except QueueUnavailable as error:
            log.warning("sweep.failed", error=str(error))
        else:
            num_moved = report.reclaimed + report.promoted + report.expired
            if num_moved:
                log.info("sweep.done", reclaimed=report.reclaimed, promoted=report.promoted, expired=report.expired)
            if num_moved >= MAX_JOBS:
                continue
        await asyncio.sleep(every_s)
