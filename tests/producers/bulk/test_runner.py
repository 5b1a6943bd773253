"""The runner alone, with tasks and outputs of these tests."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from pagemill.bulk_client import BulkClient
from pagemill.errors import StoreAway
from pagemill.schema import Job
from producers.bulk import runner as module
from producers.bulk.rows import Document, RowFault
from producers.bulk.runner import Runner
from producers.bulk.work import Counts, Kept, Limits, Work
from tests.support.redis_process import RedisProcess
from tests.support.servers import wait_for
from tests.support.services import RunningService

Chunk = range
Row = tuple[str, ...]


class Echo:
    """Asks about each document so many times, one after the other, and two at a time; the row is how that ended."""

    def __init__(self, rounds: int = 1, batch: str | None = None, text: str = "text") -> None:
        self._rounds, self._batch, self._text = rounds, batch, text

    def work(self, document: Document) -> Work[Row]:
        ends: list[str] = []
        for number in range(self._rounds):
            names = [f"echo-{document.row}-{number}-{half}" for half in "ab"]
            fields: dict[str, Any] = {"batch": self._batch} if self._batch else {}
            jobs = [Job.build(id=name, prompt=self._text, options={"max_tokens": 2}, **fields) for name in names]
            results = yield jobs
            assert names == [result.job_id for result in results]
            ends += [result.status for result in results]
        return (document.custom_id, *ends)

    def fault(self, fault: RowFault) -> Row:
        return (f"fault {fault.row}",)


class Rows:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.chunks: dict[Chunk, list[Row]] = {}

    def write(self, chunk: Chunk, rows: list[Row]) -> None:
        assert chunk not in self.chunks
        self.chunks[chunk] = rows

    def in_order(self) -> list[Row]:
        return [row for chunk in sorted(self.chunks, key=lambda one: one.start) for row in self.chunks[chunk]]


def read(chunk: Chunk) -> Iterator[Document | RowFault | Kept[Row]]:
    for row in chunk:
        yield Document(row, f"d{row}", "text")


@contextmanager
def stopped(runner: Runner[Chunk, Row]) -> Iterator[None]:
    """Whatever a test finds, its runner ends."""
    try:
        yield
    finally:
        runner.stop()


def full_and_stays_so(client: BulkClient, num_jobs: int, turns: list[int]) -> None:
    """Wait until so many jobs are in the queue, and see that some turns more add none."""
    wait_for(lambda: sum(client.stats().queued.values()) == num_jobs)
    before = len(turns)
    wait_for(lambda: len(turns) > before + 2)
    assert num_jobs == sum(client.stats().queued.values())


CHUNKS: Sequence[Chunk] = [range(start, start + 5) for start in range(0, 60, 5)]


@pytest.mark.usefixtures("service")
def test_rows_come_in_order_of_their_items(client: BulkClient) -> None:
    """
    However the jobs end, each chunk is written once, with a row for each item in its place.
    """

    def mixed(chunk: Chunk) -> Iterator[Document | RowFault | Kept[Row]]:
        for row, item in zip(chunk, read(chunk), strict=True):
            if row % 3 == 1:
                yield RowFault(row, None, "invalid_json", "no")
            else:
                yield Kept(("kept",)) if row % 3 == 2 else item

    rows = Rows()

    counts = Runner(client, Echo(), mixed, rows.write).run(CHUNKS)

    one: list[Row] = [("d0", "done", "done"), ("fault 1",), ("kept",)]
    expected = [[(f"d{row}", "done", "done"), (f"fault {row}",), ("kept",)][row % 3] for row in range(60)]
    assert one == rows.in_order()[:3]
    assert expected == rows.in_order()
    assert (60, 12, 40) == (counts.rows, counts.chunks, counts.jobs)


@pytest.mark.usefixtures("service")
def test_a_document_may_take_several_rounds(client: BulkClient) -> None:
    """
    The jobs of a round follow the results of the one before.
    """
    rows = Rows()

    Runner(client, Echo(rounds=3), read, rows.write, limits=Limits(jobs=7)).run(CHUNKS)

    assert [(f"d{row}", *["done"] * 6) for row in range(60)] == rows.in_order()


def test_no_more_is_in_the_queue_than_allowed(client: BulkClient, server_url: str, queue: str) -> None:
    """
    With nobody to do the work, as many jobs wait as may; the input is not read ahead of that.
    """
    taken: list[int] = []

    def reading(chunk: Chunk) -> Iterator[Document | RowFault | Kept[Row]]:
        for item in read(chunk):
            taken.append(1)
            yield item

    most: list[int] = []
    rows = Rows()
    runner = Runner(
        client,
        Echo(),
        reading,
        rows.write,
        limits=Limits(jobs=8),
        on_turn=lambda counts: most.append(counts.in_flight),
    )
    with ThreadPoolExecutor(1) as threads, stopped(runner):
        run = threads.submit(runner.run, CHUNKS)
        full_and_stays_so(client, 8, most)
        assert 4 == len(taken)
        with RunningService(server_url, queue):
            run.result(30)

    assert 8 == max(most)
    assert 60 == len(rows.in_order())


def test_tokens_are_bounded_too(client: BulkClient, server_url: str, queue: str) -> None:
    """
    Jobs are in the queue as long as their estimates fit; one that is larger than the limit goes alone.
    """
    rows, turns = Rows(), list[int]()
    # a job is estimated at 102 tokens
    task, limits = Echo(text="x" * 300), Limits(tokens=350)
    runner = Runner(client, task, read, rows.write, limits=limits, on_turn=lambda _: turns.append(1))
    with ThreadPoolExecutor(1) as threads, stopped(runner):
        run = threads.submit(runner.run, CHUNKS)
        full_and_stays_so(client, 3, turns)
        with RunningService(server_url, queue):
            run.result(30)

    assert 60 == len(rows.in_order())


def test_a_job_above_the_limit_goes_alone(client: BulkClient, server_url: str, queue: str) -> None:
    """
    A limit that is too small slows a job down, and does not stop it.
    """
    rows, turns = Rows(), list[int]()
    task, limits = Echo(text="x" * 300), Limits(tokens=10)
    runner = Runner(client, task, read, rows.write, limits=limits, on_turn=lambda _: turns.append(1))
    with ThreadPoolExecutor(1) as threads, stopped(runner):
        run = threads.submit(runner.run, CHUNKS[:2])
        full_and_stays_so(client, 1, turns)
        with RunningService(server_url, queue):
            run.result(30)

    assert 10 == len(rows.in_order())


@pytest.mark.usefixtures("service")
def test_a_refused_job_is_its_rows_end_alone(client: BulkClient) -> None:
    """
    What can never be submitted ends as failed; the others of the same call are done.
    """

    class Large(Echo):
        def work(self, document: Document) -> Work[Row]:
            text = "x" * 9_000_000 if document.row == 7 else "x"
            [result] = yield [Job.build(id=f"large-{document.row}", prompt=text, options={"max_tokens": 2})]
            return (document.custom_id, result.failure.code if result.failure else result.status)

    rows = Rows()

    Runner(client, Large(), read, rows.write).run(CHUNKS)

    assert [(f"d{row}", "payload_too_large" if row == 7 else "done") for row in range(60)] == rows.in_order()


def test_a_server_that_forgot_all_is_told_again(
    client: BulkClient, server_url: str, queue: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    After a flush the batch is made anew and the jobs are submitted again; no row is missing.
    """
    monkeypatch.setattr("pagemill.gathering.LOOK_S", 0.1)
    client.create_batch("night")
    rows = Rows()
    turns: list[Counts] = []
    runner = Runner(
        client,
        Echo(batch="night"),
        read,
        rows.write,
        limits=Limits(jobs=20),
        reopen=lambda: client.create_batch("night"),
        on_turn=turns.append,
    )
    with ThreadPoolExecutor(1) as threads, stopped(runner):
        run = threads.submit(runner.run, CHUNKS)
        wait_for(lambda: client.batch_status("night").total == 20)
        redis.flushdb()
        with RunningService(server_url, queue):
            run.result(60)

    assert [(f"d{row}", "done", "done") for row in range(60)] == rows.in_order()


def test_a_server_that_restarts_is_waited_for(tmp_path: Path) -> None:
    """
    While it is away nothing is lost, and afterwards the run goes on.
    """
    rows, turns = Rows(), list[int]()
    with RedisProcess(tmp_path / "redis") as server, BulkClient(server.url, queue="q") as client:
        runner = Runner(
            client, Echo(), read, rows.write, limits=Limits(jobs=6), on_turn=lambda counts: turns.append(counts.jobs)
        )
        with ThreadPoolExecutor(1) as threads, stopped(runner):
            run = threads.submit(runner.run, CHUNKS)
            wait_for(lambda: turns and turns[-1] == 6)
            server.kill()
            server.start()
            with RunningService(server.url, "q"):
                run.result(60)
        accepted = client.stats().totals["accepted"]

    assert [(f"d{row}", "done", "done") for row in range(60)] == rows.in_order()
    assert 120 == accepted


@pytest.mark.usefixtures("service")
def test_a_store_that_is_away_is_waited_for(client: BulkClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A chunk that cannot be read or written is tried again from where that was; no row is lost or doubled.
    """
    monkeypatch.setattr(module.random, "uniform", lambda low, high: 0.01)  # noqa: ARG005
    rows, failures, cuts = Rows(), iter(range(3)), iter(range(2))

    def reading(chunk: Chunk) -> Iterator[Document | RowFault | Kept[Row]]:
        for item in read(chunk):
            if isinstance(item, Document) and item.row == 13 and next(cuts, None) is not None:
                raise StoreAway("not now")
            yield item

    def write(chunk: Chunk, written: list[Row]) -> None:
        if chunk.start == 5 and next(failures, None) is not None:
            raise StoreAway("not now")
        rows.write(chunk, written)

    Runner(client, Echo(), reading, write).run(CHUNKS)

    assert [(f"d{row}", "done", "done") for row in range(60)] == rows.in_order()


@pytest.mark.usefixtures("service")
def test_what_breaks_the_output_ends_the_run(client: BulkClient) -> None:
    """
    An error of the output comes out of `run`, and nothing hangs.
    """

    def write(chunk: Chunk, rows: list[Row]) -> None:
        raise ZeroDivisionError(f"{chunk} of {len(rows)}")

    with pytest.raises(ZeroDivisionError):
        Runner(client, Echo(), read, write).run(CHUNKS)


def test_a_stopped_runner_leaves_its_jobs_in_the_queue(client: BulkClient, server_url: str, queue: str) -> None:
    """
    `stop` returns soon; the next runner finds the jobs again, and none runs twice.
    """

    def full(counts: Counts) -> None:
        if counts.jobs == 10:
            first.stop()

    first = Runner(client, Echo(), read, Rows().write, limits=Limits(jobs=10), on_turn=full)
    counts = first.run(CHUNKS)
    assert 10 == counts.jobs
    rows = Rows()

    with RunningService(server_url, queue):
        again = Runner(client, Echo(), read, rows.write, limits=Limits(jobs=10)).run(CHUNKS)

    assert [(f"d{row}", "done", "done") for row in range(60)] == rows.in_order()
    assert (120, 10) == (again.jobs, again.resubmitted)
    assert 120 == client.stats().totals["accepted"]
