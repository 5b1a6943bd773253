"""The client of programs that put very many jobs through a queue, as `pagemill bulk`."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pagemill import calls
from pagemill.calls import in_chunks
from pagemill.client import Client
from pagemill.client_core import CHUNK, read_result, reference_in
from pagemill.errors import BatchNotFound, ObjectStoreError
from pagemill.gathering import Gathering
from pagemill.schema import Result
from pagemill.scripts import Call, load
from pagemill.shown_tokenizer import unpack
from pagemill.trace_context import TraceContext

if TYPE_CHECKING:
    from pagemill.tracing import Sending


class BulkClient(Client):
    """As Client; also many results at once, a lease for whoever must be alone, and the tokenizer that counts."""

    def _context_of(self, sending: "Sending | None") -> TraceContext | None:
        """As it is, but that rows, of which there may be millions, have spans of their own only if asked for."""
        context = super()._context_of(sending)
        return context if context is None or self._trace_rows else context.unrecorded()

    def gather(self, model: str | None = None) -> Gathering:
        """
        Follow the queue that serves a model from now on, and fetch the results of jobs that are added.

        Raises:
            UnknownModel: no worker has registered it.
        """
        self._learn_models([model])
        return Gathering(self._servers, self._pipeline, self._directory.route(model), self._store)

    def results_of(self, job_ids: Iterable[str], model: str | None = None) -> Iterator[Result]:
        """
        The results that are there already, of jobs of the queue that serves a model.

        Raises:
            ObjectStoreError: one is in a store that this client cannot read.
        """
        self._learn_models([model])
        keys = self._directory.route(model)
        for chunk in in_chunks(job_ids, CHUNK):
            for record in self._pipeline(*(("GET", keys.result(job_id)) for job_id in chunk)):
                if record is not None:
                    yield read_result(record, self._store)

    def forget_many(self, job_ids: Iterable[str], model: str | None = None) -> int:
        """
        As `forget`, for jobs of the queue that serves a model; returns how many it knew.

        Raises:
            ObjectStoreError: a result is in a store that this client cannot delete from.
        """
        self._learn_models([model])
        keys = self._directory.route(model)
        num_known = 0
        for chunk in in_chunks(job_ids, CHUNK):
            records = self._pipeline(*(("GET", keys.result(job_id)) for job_id in chunk))
            for url in filter(None, (reference_in(record or b"") for record in records)):
                if self._store is None:
                    raise ObjectStoreError(f"a result is at {url}: give the client that object_store")
                self._store.delete(url)
            states = self._run_many([calls.forget(keys, job_id) for job_id in chunk])
            num_known += sum(state is not None for state in states)
        return num_known

    def end_batch(self, batch_id: str) -> None:
        """As `cancel_batch`, until none of its jobs waits; a batch that is unknown, or has expired, has none."""
        open_before = -1
        try:
            status = self.cancel_batch(batch_id)
            # a call ends some hundreds; those that run end later
            while status.num_open not in (0, open_before):
                open_before = status.num_open
                status = self.cancel_batch(batch_id)
        except BatchNotFound:
            return

    def take_lease(self, name: str, holder: str, lease_s: float) -> tuple[str, float]:
        """
        Be the only one with a lease of that name in this client's queue, or go on being it.

        Returns:
            Who holds it now, and the seconds until it runs out unless it is taken again.
        """
        return self._run(self._lease(name, holder, max(1, round(lease_s * 1000))))

    def give_lease_back(self, name: str, holder: str) -> None:
        """Let others have it at once; nothing happens where it is not `holder`'s."""
        self._run(self._lease(name, holder, 0))

    def lease_holder(self, name: str) -> str:
        """Who has the lease of that name; empty where nobody has."""
        # nobody is called that, so nothing is given back
        return self._run(self._lease(name, "?", 0))[0]

    def _lease(self, name: str, holder: str, lease_ms: int) -> Call[tuple[str, float]]:
        return Call(
            load("lease"),
            self._directory.own.base,
            [name, holder, lease_ms],
            lambda reply: (reply[0].decode(), reply[1] / 1000),
        )

    def tokenizer_json(self, model: str | None = None) -> str | None:
        """
        The tokenizer.json of the workers that serve a model; None where none has shown it within ten minutes.

        Raises:
            UnknownModel: no worker has registered it.
        """
        self._learn_models([model])
        keys = self._directory.route(model)
        [packed] = self._pipeline(("HGET", keys.tokenizer, "z"))
        return None if packed is None else unpack(packed)
