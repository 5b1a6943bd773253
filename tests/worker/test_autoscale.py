"""How many workers a queue wants, and why."""

from dataclasses import replace

import pytest

from pagemill.messages import QueueStats
from pagemill.survey import HORIZONS_S, Survey
from tests.support.clock import Clock
from worker.autoscale import BUSY_S, Autoscaler, Demand, Limits, decide, demand_of, needed_tokens_per_s

IDLE = Demand(queued_tokens=0, queued_jobs=0, other_jobs=0, num_workers=0)
LIMITS = Limits(target_s=100.0, min_workers=0, max_workers=10)


def survey(
    *,
    queued: int = 0,
    tokens: int = 0,
    running: int = 0,
    drain: float = 0.0,
    due: tuple[int, ...] = (0,) * len(HORIZONS_S),
    workers: dict[str, dict[str, str]] | None = None,
) -> Survey:
    return Survey(
        stats=QueueStats({"bulk": queued}, {"bulk": tokens}, running, 0, 0, 0, 0, {}),
        oldest_age_s={},
        deadline_s=None,
        due=due,
        drain_tokens_per_s=drain,
        retried={},
        cancelled_waiting=0,
        tenant_tokens={},
        workers=workers or {},
        server={},
    )


def busy(count: int) -> dict[str, dict[str, str]]:
    return {f"w{number}": {"state": "running", "running": "4", "kv_usage": "0.5"} for number in range(count)}


@pytest.mark.parametrize(
    ("demand", "tokens_per_s", "wanted", "why"),
    [
        (IDLE, 100.0, 0, "nothing to do"),
        (replace(IDLE, other_jobs=1), 100.0, 1, "1 jobs have not ended"),
        (replace(IDLE, queued_jobs=5, queued_tokens=10), 100.0, 1, "5 jobs have not ended"),
        (replace(IDLE, queued_jobs=5, queued_tokens=30_000), 100.0, 3, "30,000 tokens wait"),
        (replace(IDLE, queued_jobs=5, queued_tokens=30_001), 100.0, 4, "30,001 tokens wait"),
        # twice as fast workers, half as many
        (replace(IDLE, queued_jobs=5, queued_tokens=30_000), 200.0, 2, "30,000 tokens wait"),
        (replace(IDLE, queued_jobs=5, queued_tokens=9_000_000), 100.0, 10, "wanted were 900"),
        # what runs fills two workers and a bit, of the seven that are there
        (replace(IDLE, other_jobs=9, num_workers=7, filled=2.1), 100.0, 3, "of 2.1 workers"),
        # 10 of 100 jobs are due in 20 s: 1,000 tokens
        (
            replace(IDLE, queued_jobs=100, queued_tokens=10_000, due=((20.0, 10), (500.0, 20))),
            10.0,
            10,
            "10,000 tokens wait",
        ),
        (
            replace(IDLE, queued_jobs=100, queued_tokens=10_000, due=((20.0, 10), (500.0, 20))),
            100.0,
            1,
            "100 jobs have not ended",
        ),
        (
            replace(IDLE, queued_jobs=100, queued_tokens=10_000, due=((20.0, 90),)),
            100.0,
            5,
            "90 jobs have a deadline within 20 s",
        ),
        # nobody knows what a worker does: none is taken away
        (replace(IDLE, queued_jobs=5, queued_tokens=30_000, num_workers=4), None, 4, "to know its rate"),
        (replace(IDLE, queued_jobs=5, queued_tokens=30_000), None, 1, "5 jobs have not ended"),
    ],
)
def test_the_largest_want_decides(demand: Demand, tokens_per_s: float | None, wanted: int, why: str) -> None:
    """
    The least number that empties the backlog in time, meets the deadlines and keeps what runs; with its reason.
    """
    decision = decide(demand, LIMITS, tokens_per_s)

    assert wanted == decision.desired_workers
    assert why in decision.reason


def test_the_operator_has_the_last_word() -> None:
    """
    Never below the least number, never above the most.
    """
    limits = replace(LIMITS, min_workers=2, max_workers=3)

    assert (2, "min_workers") == ((found := decide(IDLE, limits, 100.0)).desired_workers, found.reason)
    assert 3 == decide(replace(IDLE, queued_jobs=1, queued_tokens=10**9), limits, 100.0).desired_workers


def test_no_start_helps_with_what_is_due_at_once() -> None:
    """
    Deadlines nearer than the first horizon count as that; those between two count as the nearer one.
    """
    due = (3, 3, 5, *(5 for _ in HORIZONS_S[3:]))

    found = demand_of(survey(queued=5, tokens=500, due=due))

    assert [(15.0, 3), (HORIZONS_S[1], 5)] == list(found.due)
    assert needed_tokens_per_s(found) == max(300 / 15, 500 / HORIZONS_S[1])


def test_the_rate_of_a_worker_is_learned_while_all_are_busy() -> None:
    """
    After half a minute in which jobs waited; and kept when the queue is empty.
    """
    clock = Clock()
    autoscaler = Autoscaler(LIMITS, clock=clock)
    full = survey(queued=50, tokens=60_000, running=8, drain=400.0, workers=busy(2))

    assert 2 == autoscaler.follow(full).desired_workers
    clock.now += BUSY_S / 2
    autoscaler.follow(full)
    assert autoscaler.tokens_per_s is None
    clock.now += BUSY_S / 2
    decision = autoscaler.follow(full)

    assert 200.0 == autoscaler.tokens_per_s
    assert 3 == decision.desired_workers
    clock.now += 600
    autoscaler.follow(survey(drain=1.0))
    assert 200.0 == autoscaler.tokens_per_s


def test_a_trickle_teaches_nothing() -> None:
    """
    While the queue is empty now and then the fleet idles, and how fast it drains says nothing of a worker.
    """
    clock = Clock()
    autoscaler = Autoscaler(LIMITS, tokens_per_s=150.0, clock=clock)
    for _ in range(20):
        clock.now += BUSY_S * 0.9
        autoscaler.follow(survey(queued=1, tokens=100, running=1, drain=2.0, workers=busy(1)))
        autoscaler.follow(survey(running=1, drain=2.0, workers=busy(1)))

    assert 150.0 == autoscaler.tokens_per_s


def test_more_work_never_wants_fewer() -> None:
    """
    Whatever else there is, another job, another deadline or a slower worker takes no worker away.
    """
    base = replace(IDLE, queued_jobs=10, queued_tokens=5_000, num_workers=1, due=((60.0, 4),))
    wanted = decide(base, LIMITS, 20.0).desired_workers

    assert wanted <= decide(replace(base, queued_jobs=20, queued_tokens=10_000), LIMITS, 20.0).desired_workers
    assert wanted <= decide(replace(base, due=((60.0, 9),)), LIMITS, 20.0).desired_workers
    assert wanted <= decide(base, LIMITS, 10.0).desired_workers
    assert wanted <= decide(replace(base, filled=4.0), LIMITS, 20.0).desired_workers
