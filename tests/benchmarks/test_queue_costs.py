"""The measurements of the queue run, on little work, and give their figures."""

from collections.abc import Iterator

import pytest

from benchmarks import queue, queue_scripts
from producers.local_redis import local_redis


@pytest.fixture
def url() -> Iterator[str]:
    """
    A server of its own: the measurements expect an empty one.
    """
    with local_redis() as url:
        yield url


def test_the_workers_time_is_split_by_thread(url: str) -> None:
    """
    Every job is answered, and the threads' shares add up to no more than the process's time.
    """
    args = queue.parse(["--jobs", "100", "--prompt-chars", "100", "--max-tokens", "8"])

    line = queue.own_time(url, args)

    assert {"MainThread", "engine", "intake"} <= line["by_thread_us"].keys()
    assert sum(line["by_thread_us"].values()) <= line["cpu_us_per_job"] * 1.05
    assert {"parse", "intake", "engine", "pack", "unpack", "result", "json", "finish"} == line["pieces_us"].keys()


def test_the_cost_of_traces_is_measured_beside_none(url: str) -> None:
    """
    Spans are made in one of three cases, and are sent.
    """
    args = queue.parse(["--jobs", "60", "--prompt-chars", "100", "--max-tokens", "8", "--repeat", "1"])

    line = queue.with_traces(url, args)

    assert {"off", "unrecorded", "on"} == line["cpu_us_per_job"].keys()
    # of 60 jobs, and of 200 that warm the worker up
    assert line["bytes_per_job"] > 1000


def test_submits_are_compared_with_bare_appends(url: str) -> None:
    """
    Both rates are of the same number of jobs.
    """
    line = queue_scripts.submit_rate(url, 50, 100)

    assert {"submit_many", "xadd"} == line["jobs_s"].keys()


def test_scripts_are_compared_with_bare_ones(url: str) -> None:
    """
    Each script has a latency of its own and one of the bare script beside it.
    """
    line = queue_scripts.latencies(url, 400, 100)

    assert {"pull", "bare_pull", "finish", "bare_finish"} == line["ms"].keys()


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """
    A misspelt part is told, with those there are.
    """
    assert 2 == queue.main(["--parts", "wroker"])
    assert "there are engine, worker, submit, scripts" in capsys.readouterr().err
