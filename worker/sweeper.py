"""Keeps the queue clean for the whole fleet: one worker at a time, whichever holds the lock."""

import asyncio
from collections.abc import Sequence

import structlog

from pagemill.consumer import Consumer
from pagemill.errors import ObjectStoreError, QueueUnavailable
from pagemill.object_store import ObjectStore
from worker.webhooks import Webhooks

log = structlog.get_logger(__name__)

MAX_JOBS = 256


async def sweep_forever(
    consumer: Consumer, store: ObjectStore | None, webhooks: Webhooks | None = None, *, every_s: float
) -> None:
    """
    Bring back what dead workers held, promote what is due, expire what waited too long.

    Payloads of jobs that ended without a worker are deleted from the store, where there is one, and
    webhooks of batches that have ended are delivered.

    A sweep that met its limit is followed by the next at once; a worker that is not the sweeper looks
    half as often.
    """
    while True:
        pause_s = every_s
        try:
            report = await consumer.sweep(MAX_JOBS)
            if report.swept and store is not None:
                await _delete_orphans(consumer, store)
            if report.swept and webhooks is not None:
                await webhooks.deliver_due()
        except QueueUnavailable as error:
            log.warning("sweep.failed", error=str(error))
        else:
            num_moved = report.reclaimed + report.promoted + report.expired + report.cancelled
            if num_moved:
                log.info(
                    "sweep.done",
                    reclaimed=report.reclaimed,
                    promoted=report.promoted,
                    expired=report.expired,
                    cancelled=report.cancelled,
                )
            if num_moved >= MAX_JOBS or report.cancelling:
                continue
            if not report.swept:
                pause_s = 2 * every_s
        await asyncio.sleep(pause_s)


async def _delete_orphans(consumer: Consumer, store: ObjectStore) -> None:
    refs = await consumer.take_orphans(MAX_JOBS)
    if refs:
        num_deleted = await asyncio.to_thread(_delete_all, store, refs)
        log.info("sweep.payloads_deleted", payloads=num_deleted)


def _delete_all(store: ObjectStore, refs: Sequence[str]) -> int:
    num_deleted = 0
    for ref in refs:
        try:
            store.delete(ref)
        except ObjectStoreError as error:
            # it stays behind for the bucket's lifecycle rule
            log.warning("object.not_deleted", ref=ref, error=str(error))
        else:
            num_deleted += 1
    return num_deleted
