"""What an AsyncClient does with batches, verb for verb as pagemill/batch_verbs.py."""

from collections.abc import AsyncIterator, Mapping

from pagemill import batches
from pagemill.batches import Batch, read_batch
from pagemill.client_base import AsyncClientBase
from pagemill.client_core import SHARED_POLL_S, Deadline, Outage
from pagemill.keys import QueueKeys
from pagemill.messages import BatchStatus


class AsyncBatchVerbs(AsyncClientBase):
    """As BatchVerbs, for one event loop."""

    async def create_batch(
        self,
        batch_id: str | None = None,
        *,
        model: str | None = None,
        tenant: str | None = None,
        result_ttl_s: int | None = None,
        webhook: str | None = None,
        metadata: Mapping[str, str] | None = None,
        reply_to: str | None = None,
        reply_context: str | None = None,
    ) -> BatchStatus:
        """
        Open a batch; jobs join it by their field `batch`, and it ends after `seal_batch`.

        Creating it again with the same id and fields gives the first one.

        Args:
            model: The model that its jobs ask for: a batch lives in the queue that serves it.
            result_ttl_s: Seconds that its counts are kept after its end.
            webhook: A URL that is told when it has ended (docs/webhooks.md).
            metadata: Returned with its status, and sent to the webhook.
            reply_to: The stream of replies that is told when it has ended, with `reply_context`.

        Raises:
            InvalidJob: a field is wrong.
            UnknownModel: no worker serves its model.
            Conflict: there is another batch with that id.
        """
        fields = {"tenant": tenant, "result_ttl_s": result_ttl_s, "webhook": webhook}
        fields |= {"reply_to": reply_to, "reply_context": reply_context}
        batch = Batch.build(id=batch_id, metadata=dict(metadata or {}), **fields)
        await self._learn_models([model])
        keys = self._directory.route(model)
        status = await self._run(batches.create_batch(keys, batch))
        self._directory.settle(_name(batch.id), keys)
        return status

    async def seal_batch(self, batch_id: str) -> BatchStatus:
        """Let no more jobs join: the batch ends with its last open job, at once where it has none."""
        return await self._run(batches.seal_batch(await self._locate_batch(batch_id), batch_id))

    async def batch_status(self, batch_id: str) -> BatchStatus:
        """Where the batch stands."""
        return await self._read_batch(await self._locate_batch(batch_id), batch_id)

    async def cancel_batch(self, batch_id: str) -> BatchStatus:
        """
        Seal the batch and end its jobs; what they have of text stays in their results.

        Jobs that wait end now, or within a few sweeps where they are many; those that run end
        within a third of a lease. A batch that has ended stays as it is.
        """
        return await self._run(batches.cancel_batch(await self._locate_batch(batch_id), batch_id))

    async def wait_batch(self, batch_id: str, wait_s: float | None = None) -> BatchStatus:
        """
        Wait for the batch's end, without limit where `wait_s` is None.

        Raises:
            WaitTimeout: it has not ended.
        """
        async for status in self.watch_batch(batch_id, wait_s=wait_s):
            if status.ended:
                return status
        raise AssertionError("a batch is watched to its end")

    async def watch_batch(self, batch_id: str, *, wait_s: float | None = None) -> AsyncIterator[BatchStatus]:
        """
        Where the batch stands, now and after each percent; ends with it.

        Raises:
            WaitTimeout: it has not ended after `wait_s`.
        """
        keys = await self._locate_batch(batch_id)
        deadline = Deadline(wait_s, f"batch {batch_id} has not ended")
        outage = Outage(deadline.end)
        last = await self._read_batch(keys, batch_id)
        yield last
        async with self._subscriber.listen([keys.batch_channel(batch_id)]) as ear:
            while not last.ended:
                # subscribed first, so that an end between look and wait is heard
                status = await self._ride_out(outage, lambda: self._read_batch(keys, batch_id))
                if status == last:
                    await ear.wait(deadline.left_s(SHARED_POLL_S))
                    continue
                last = status
                yield last

    async def list_batches(self, limit: int = 100) -> list[BatchStatus]:
        """The newest batches of this client's queue, those that have ended too; none for a limit of 0."""
        if limit <= 0:
            return []
        keys = self._directory.own
        [names] = await self._pipeline(("ZREVRANGE", keys.batches, 0, limit - 1))
        ids = [name.decode() for name in names]
        replies = await self._pipeline(*(("HGETALL", keys.batch(batch_id)) for batch_id in ids))
        # one that has expired may still be named
        return [read_batch(keys, batch_id, reply) for batch_id, reply in zip(ids, replies, strict=True) if reply]

    async def _locate_batch(self, batch_id: str) -> QueueKeys:
        return await self._seek(_name(batch_id), lambda keys: keys.batch(batch_id))

    async def _read_batch(self, keys: QueueKeys, batch_id: str) -> BatchStatus:
        [reply] = await self._pipeline(("HGETALL", keys.batch(batch_id)))
        return read_batch(keys, batch_id, reply)


def _name(batch_id: str) -> str:
    # no job has such an id
    return f"batch {batch_id}"
