"""What is told of a run: in the log, and where traces are on as a span of the run and one of each chunk."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from pagemill.errors import PagemillError
from producers.bulk.work import Counts

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from pagemill.tracing import Tracer

log = structlog.get_logger(__name__)


class RunRecord:
    """
    Tells of one run.

    Args:
        tracer: None where traces are off.
        name: Of the bulk job or the batch.
    """

    def __init__(self, tracer: "Tracer | None", name: str, counts: Counts) -> None:
        self._tracer = tracer
        self._name = name
        self._counts = counts
        self._span: Span | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """While the run goes on; rows have no spans of their own, so that millions of them cost nothing."""
        log.info("run.started", run=self._name)
        try:
            if self._tracer is None:
                yield
            else:
                with self._tracer.span("bulk run", attributes={"pagemill.run": self._name}) as self._span:
                    yield
                    self._span.set_attributes({f"pagemill.{name}": value for name, value in self._totals.items()})
        finally:
            log.info("run.ended", run=self._name, **self._totals)

    def chunk(self, began_ns: int, ended_ns: int, num_rows: int, num_jobs: int) -> None:
        """A chunk has been written; on any thread."""
        log.debug("run.chunk_written", run=self._name, rows=num_rows, jobs=num_jobs)
        if self._tracer is not None and self._span is not None:
            attributes = {"pagemill.rows": num_rows, "pagemill.jobs": num_jobs}
            self._tracer.past("bulk chunk", began_ns, ended_ns, attributes, self._span)

    def away(self, error: PagemillError) -> None:
        """A server or a store is away, or full."""
        log.warning("run.away", run=self._name, error=str(error))

    @property
    def _totals(self) -> dict[str, int]:
        counts = self._counts
        return {
            "rows": counts.rows,
            "chunks": counts.chunks,
            "jobs": counts.jobs,
            "resubmitted": counts.resubmitted,
            "completion_tokens": counts.completion_tokens,
        }
