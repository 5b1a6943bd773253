"""How long requests wait in an engine, for their first token, and how long its steps last."""

from dataclasses import replace

import numpy as np
import pytest

from engine.request import Request, RequestTimes
from engine.sampling_params import SamplingParams
from tests.support.clock import Clock
from worker.fake_engine import FakeEngine
from worker.timings import NO_TIMINGS, SNAPSHOT_EVERY_S, STEP_BOUNDS, WAIT_BOUNDS, Histogram, Stopwatch


def request(name: str, priority: int = 0) -> Request:
    return Request(name, np.arange(1, 5, dtype=np.int32), SamplingParams(max_tokens=3), priority=priority)


def filled(histogram: Histogram) -> dict[float, int]:
    """The bounds of those buckets that have something."""
    return {
        bound: count for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True) if count
    }


def test_waiting_is_counted_by_priority() -> None:
    """
    From a request's coming to the step that it is in first, and to the end of the one that gave its first token.
    """
    clock = Clock()
    stopwatch = Stopwatch(clock)
    stopwatch.enter(request("urgent"))
    stopwatch.enter(request("bulk", priority=2))

    stopwatch.stepped(0.3, 0.39, started=["urgent"], answered=[])
    stopwatch.stepped(0.4, 0.44, started=[], answered=["urgent"])
    stopwatch.stepped(7.0, 9.0, started=["bulk"], answered=["bulk"])
    timings = stopwatch.timings(fresh=True)

    assert [{0.5: 1}, {}, {10.0: 1}] == [filled(one) for one in timings.queued]
    assert [{0.5: 1}, {}, {10.0: 1}] == [filled(one) for one in timings.first_tokens]
    assert {0.1: 1, 0.05: 1, 2.0: 1} == filled(timings.steps)
    assert timings.steps.total == pytest.approx(2.13)
    assert (0.3, 7.0, 0.44, 9.0) == (
        timings.queued[0].total,
        timings.queued[2].total,
        timings.first_tokens[0].total,
        timings.first_tokens[2].total,
    )


def test_a_bound_counts_what_is_equal_to_it() -> None:
    """
    As Prometheus has it; and what is beyond all bounds is counted too.
    """
    stopwatch = Stopwatch(Clock())
    for length in (STEP_BOUNDS[3], STEP_BOUNDS[-1], STEP_BOUNDS[-1] + 1):
        stopwatch.stepped(0.0, length, [], [])

    assert {STEP_BOUNDS[3]: 1, STEP_BOUNDS[-1]: 1, float("inf"): 1} == filled(stopwatch.timings(fresh=True).steps)


def test_who_has_left_is_forgotten() -> None:
    """
    Nothing is kept of a request that has left, and nothing is counted for it any more.
    """
    stopwatch = Stopwatch(Clock())
    stopwatch.enter(request("a"))
    stopwatch.leave("a")
    stopwatch.leave("never came")
    stopwatch.stepped(1.0, 2.0, started=["a"], answered=["a"])

    assert 0 == len(stopwatch)
    assert 0 == sum(one.num_values for one in stopwatch.timings(fresh=True).queued)


def test_a_request_that_asks_gets_its_times() -> None:
    """
    When it was first in a step, and when its first token came; others get none.
    """
    stopwatch = Stopwatch(Clock())
    for name in ("asks", "asks too", "does not"):
        stopwatch.enter(replace(request(name), timed=name != "does not"))
    stopwatch.stepped(1.0, 2.0, started=["asks", "does not"], answered=[])
    stopwatch.stepped(3.0, 4.0, started=[], answered=["asks", "does not"])

    left = [stopwatch.leave(name) for name in ("asks", "asks too", "does not", "never came")]
    assert [RequestTimes(1.0, 4.0), RequestTimes(), None, None] == left


def test_counts_are_passed_on_now_and_then() -> None:
    """
    The same object is given until some time has passed, or nothing follows: whoever sends it can tell.
    """
    clock = Clock()
    stopwatch = Stopwatch(clock)
    assert NO_TIMINGS is stopwatch.timings(fresh=True)
    stopwatch.stepped(0.0, 0.1, [], [])
    assert NO_TIMINGS is stopwatch.timings(fresh=False)

    clock.now += SNAPSHOT_EVERY_S
    first = stopwatch.timings(fresh=False)
    stopwatch.stepped(0.1, 0.2, [], [])

    assert 1 == first.steps.num_values
    assert first is stopwatch.timings(fresh=False)
    assert 2 == stopwatch.timings(fresh=True).steps.num_values


def test_empty_timings_have_the_bounds_of_full_ones() -> None:
    """
    So that the metrics have all their series from the start.
    """
    assert STEP_BOUNDS == NO_TIMINGS.steps.bounds
    assert {WAIT_BOUNDS} == {one.bounds for one in (*NO_TIMINGS.queued, *NO_TIMINGS.first_tokens)}


def test_the_fake_engine_names_who_starts_and_who_gets_a_first_token() -> None:
    """
    Each request once, also where it gives way to a more urgent one in between.
    """
    engine = FakeEngine(kv_tokens=10, tokens_per_s=200.0, sleep=lambda _: None)
    started: list[str] = []
    answered: list[str] = []
    engine.add(request("bulk", priority=2))
    for turn in range(20):
        if turn == 1:
            engine.add(request("urgent"))
        outputs = engine.step()
        started += outputs.started
        answered += outputs.answered

    assert ["bulk", "urgent"] == started == answered
    assert (1, 20) == (engine.stats().num_preemptions, engine.stats().num_steps)
