"""What a runner is given, and what it keeps of work that is under way."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from pagemill.schema import Job, Result
from producers.bulk.rows import Document, RowFault

C = TypeVar("C")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# jobs of a document level after level, and in the end its row
Work = Generator[Sequence[Job], Sequence[Result], R]


@dataclass(frozen=True, slots=True)
class Kept(Generic[R]):
    """A row that has its answer from an earlier run."""

    row: R


class Task(Protocol[R_co]):
    def work(self, document: Document) -> Generator[Sequence[Job], Sequence[Result], R_co]: ...

    def fault(self, fault: RowFault) -> R_co: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """
    What may be in the queue at a time.

    Args:
        tokens: Estimated ones; one job that has more by itself is let through alone.
        deadline: Time of the wall clock after which nothing is submitted any more.
    """

    jobs: int = 2048
    tokens: int = 4_000_000
    deadline: float | None = None


@dataclass(slots=True)
class Counts:
    """How far a run is; tokens are those of answers that came in this run."""

    rows: int = 0
    chunks: int = 0
    jobs: int = 0
    resubmitted: int = 0
    completion_tokens: int = 0
    in_flight: int = 0
    busy: bool = False


@dataclass(slots=True)
class OpenChunk(Generic[C, R]):
    """A chunk whose rows are not all there."""

    chunk: C
    rows: list[R | None] = field(default_factory=list)
    num_missing: int = 0
    read_all: bool = False
    job_ids: list[str] = field(default_factory=list)
    began_ns: int = field(default_factory=time.time_ns)

    @property
    def complete(self) -> bool:
        return self.read_all and self.num_missing == 0


@dataclass(slots=True)
class Step(Generic[C, R]):
    """The jobs of a document that were yielded together, and those of them that have ended."""

    work: Work[R]
    home: OpenChunk[C, R]
    place: int
    job_ids: list[str]
    results: dict[str, Result] = field(default_factory=dict)
