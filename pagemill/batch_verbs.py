"""What a Client does with batches; pagemill/async_batch_verbs.py is its asyncio twin."""

from collections.abc import Iterator, Mapping
from functools import partial

from pagemill import batches
from pagemill.batches import Batch, read_batch
from pagemill.client_base import ClientBase
from pagemill.client_core import Deadline, Outage
from pagemill.keys import QueueKeys
from pagemill.messages import BatchStatus
from pagemill.scripts import translated


class BatchVerbs(ClientBase):
    """
    Batches: jobs that are counted, cancelled and waited for together.

    All but `create_batch` raise BatchNotFound where the queue does not know the batch, or not any
    more: an open one is forgotten 30 days after its last activity, one that has ended with its
    `result_ttl_s`.
    """

    def create_batch(
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
        self._learn_models([model])
        keys = self._directory.route(model)
        status = self._run(batches.create_batch(keys, batch))
        self._directory.settle(_name(batch.id), keys)
        return status

    def seal_batch(self, batch_id: str) -> BatchStatus:
        """Let no more jobs join: the batch ends with its last open job, at once where it has none."""
        return self._run(batches.seal_batch(self._locate_batch(batch_id), batch_id))

    def batch_status(self, batch_id: str) -> BatchStatus:
        """Where the batch stands."""
        return self._read_batch(self._locate_batch(batch_id), batch_id)

    def cancel_batch(self, batch_id: str) -> BatchStatus:
        """
        Seal the batch and end its jobs; what they have of text stays in their results.

        Jobs that wait end now, or within a few sweeps where they are many; those that run end
        within a third of a lease. A batch that has ended stays as it is.
        """
        return self._run(batches.cancel_batch(self._locate_batch(batch_id), batch_id))

    def wait_batch(self, batch_id: str, wait_s: float | None = None) -> BatchStatus:
        """
        Wait for the batch's end, without limit where `wait_s` is None.

        Raises:
            WaitTimeout: it has not ended.
        """
        for status in self.watch_batch(batch_id, wait_s=wait_s):
            if status.ended:
                return status
        raise AssertionError("a batch is watched to its end")

    def watch_batch(self, batch_id: str, *, wait_s: float | None = None) -> Iterator[BatchStatus]:
        """
        Where the batch stands, now and after each percent; ends with it.

        Raises:
            WaitTimeout: it has not ended after `wait_s`.
        """
        keys = self._locate_batch(batch_id)
        deadline = Deadline(wait_s, f"batch {batch_id} has not ended")
        outage = Outage(deadline.end)
        last = self._read_batch(keys, batch_id)
        yield last
        while not last.ended:
            last = self._ride_out(outage, partial(self._hear_batch, keys, last, deadline, outage))
            yield last

    def _hear_batch(self, keys: QueueKeys, last: BatchStatus, deadline: Deadline, outage: Outage) -> BatchStatus:
        """Where it stands when that is another than last."""
        with translated(), self._servers.at(keys.base).pubsub(ignore_subscribe_messages=True) as channel:
            # subscribed first, so that an end between look and wait is heard
            channel.subscribe(keys.batch_channel(last.batch_id))
            while (status := self._read_batch(keys, last.batch_id)) == last:
                outage.over()
                channel.get_message(timeout=deadline.left_s())
        return status

    def list_batches(self, limit: int = 100) -> list[BatchStatus]:
        """The newest batches of this client's queue, those that have ended too; none for a limit of 0."""
        if limit <= 0:
            return []
        keys = self._directory.own
        [names] = self._pipeline(("ZREVRANGE", keys.batches, 0, limit - 1))
        ids = [name.decode() for name in names]
        replies = self._pipeline(*(("HGETALL", keys.batch(batch_id)) for batch_id in ids))
        # one that has expired may still be named
        return [read_batch(keys, batch_id, reply) for batch_id, reply in zip(ids, replies, strict=True) if reply]

    def _locate_batch(self, batch_id: str) -> QueueKeys:
        return self._seek(_name(batch_id), lambda keys: keys.batch(batch_id))

    def _read_batch(self, keys: QueueKeys, batch_id: str) -> BatchStatus:
        [reply] = self._pipeline(("HGETALL", keys.batch(batch_id)))
        return read_batch(keys, batch_id, reply)


def _name(batch_id: str) -> str:
    # no job has such an id
    return f"batch {batch_id}"
