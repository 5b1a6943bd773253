"""What a client does with dead letters; for threads and for asyncio."""

from collections.abc import Iterable

from pagemill import dead_letters
from pagemill.client_base import AsyncClientBase, ClientBase
from pagemill.dead_letters import DeadLetter, Reading
from pagemill.messages import Accepted


class DeadVerbs(ClientBase):
    """Jobs of the client's own queue that were given up."""

    def dead_letters(self, limit: int = 100, after: str = "-") -> list[DeadLetter]:
        """
        Jobs of this client's queue that were given up, with their payloads; oldest first.

        Args:
            after: The `entry_id` behind which to begin, so that pages can follow one another.
        """
        reading = Reading(self._directory.own, limit, after)
        while command := reading.next_command:
            [entries] = self._pipeline(command)
            reading.feed(entries)
        return reading.letters

    def dead_letter(self, entry_id: str) -> DeadLetter:
        """
        One of them.

        Raises:
            JobNotFound: there is no such letter (any more).
        """
        [entries] = self._pipeline(dead_letters.one_command(self._directory.own, entry_id))
        return dead_letters.read_one(entry_id, entries)

    def requeue_dead(self, entry_id: str) -> Accepted:
        """
        Run a dead letter's job anew under its id, ahead of its lane; its failed result goes.

        Nothing happens where the job was submitted again meanwhile, or the letter was requeued within the
        last hour: the answer is then a duplicate.
        A raw entry that was refused is one again, under the same id, and is judged anew.

        Raises:
            JobNotFound: there is no such letter (any more).
            InvalidJob: it never was a job.
        """
        return self._run(dead_letters.requeue(self._directory.own, entry_id))

    def purge_dead(
        self, entry_ids: Iterable[str] = (), *, before_ms: int | None = None, older_than_s: float | None = None
    ) -> int:
        """
        Delete dead letters for good: these, and those given up before a time; returns how many.

        Args:
            before_ms: A time by the server's clock, as in `DeadLetter.at_ms`.
            older_than_s: Before now by the server's clock; 0 takes all that are there.

        Raises:
            JobNotFound: one of the ids can be no letter's; nothing was deleted. One that is gone is no error.
        """
        keys = self._directory.own
        purged = sum(self._run_many(dead_letters.purge(keys, entry_ids)))
        if older_than_s is not None:
            [now] = self._pipeline(("TIME",))
            before_ms = max(before_ms or 0, dead_letters.cutoff_ms(now, older_than_s))
        while before_ms is not None:
            num_gone = self._run(dead_letters.purge_oldest(keys, before_ms))
            purged += num_gone
            if not num_gone:
                break
        return purged


class AsyncDeadVerbs(AsyncClientBase):
    """As DeadVerbs, for one event loop."""

    async def dead_letters(self, limit: int = 100, after: str = "-") -> list[DeadLetter]:
        """
        Jobs of this client's queue that were given up, with their payloads; oldest first.

        Args:
            after: The `entry_id` behind which to begin, so that pages can follow one another.
        """
        reading = Reading(self._directory.own, limit, after)
        while command := reading.next_command:
            [entries] = await self._pipeline(command)
            reading.feed(entries)
        return reading.letters

    async def dead_letter(self, entry_id: str) -> DeadLetter:
        """
        One of them.

        Raises:
            JobNotFound: there is no such letter (any more).
        """
        [entries] = await self._pipeline(dead_letters.one_command(self._directory.own, entry_id))
        return dead_letters.read_one(entry_id, entries)

    async def requeue_dead(self, entry_id: str) -> Accepted:
        """
        Run a dead letter's job anew under its id, ahead of its lane; its failed result goes.

        Nothing happens where the job was submitted again meanwhile, or the letter was requeued within the
        last hour: the answer is then a duplicate.
        A raw entry that was refused is one again, under the same id, and is judged anew.

        Raises:
            JobNotFound: there is no such letter (any more).
            InvalidJob: it never was a job.
        """
        return await self._run(dead_letters.requeue(self._directory.own, entry_id))

    async def purge_dead(
        self, entry_ids: Iterable[str] = (), *, before_ms: int | None = None, older_than_s: float | None = None
    ) -> int:
        """
        Delete dead letters for good: these, and those given up before a time; returns how many.

        Args:
            before_ms: A time by the server's clock, as in `DeadLetter.at_ms`.
            older_than_s: Before now by the server's clock; 0 takes all that are there.

        Raises:
            JobNotFound: one of the ids can be no letter's; nothing was deleted. One that is gone is no error.
        """
        keys = self._directory.own
        purged = sum(await self._run_many(dead_letters.purge(keys, entry_ids)))
        if older_than_s is not None:
            [now] = await self._pipeline(("TIME",))
            before_ms = max(before_ms or 0, dead_letters.cutoff_ms(now, older_than_s))
        while before_ms is not None:
            num_gone = await self._run(dead_letters.purge_oldest(keys, before_ms))
            purged += num_gone
            if not num_gone:
                break
        return purged
