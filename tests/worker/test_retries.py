"""When a job is tried again, and when it is given up."""

import random
from typing import get_args

import pytest

from worker.retries import POLICIES, Fault, Policy, next_pause_s, num_faults_with

EACH = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def drawn(policy: Policy, num_faults: int, num: int = 2000) -> list[float]:
    rng = random.Random(7)
    return [policy.pause_s(num_faults, rng) for _ in range(num)]


def test_each_kind_of_fault_has_a_policy() -> None:
    """
    There is no fault that nobody decided about.
    """
    assert set(get_args(Fault)) == set(POLICIES)


@EACH
def test_pauses_have_full_jitter(policy: Policy) -> None:
    """
    They are spread evenly from nothing to the limit, and so half of it in the mean.
    """
    pauses = drawn(policy, 1)

    assert 0 <= min(pauses) < 0.01 * policy.base_s
    assert 0.99 * policy.base_s < max(pauses) <= policy.base_s
    assert 0.48 * policy.base_s < sum(pauses) / len(pauses) < 0.52 * policy.base_s


def test_the_limit_doubles() -> None:
    """
    Each fault in a row doubles the longest pause, up to the cap.
    """
    policy = Policy(base_s=1.0, cap_s=5.0, max_retries=10)

    longest = [round(max(drawn(policy, num_faults)), 1) for num_faults in (1, 2, 3, 4, 5)]

    assert [1.0, 2.0, 4.0, 5.0, 5.0] == longest


@EACH
def test_no_pause_is_above_the_cap(policy: Policy) -> None:
    """
    However often a job was put off.
    """
    assert max(drawn(policy, 10**6, num=100)) <= policy.cap_s


def test_the_draw_is_the_generators_alone() -> None:
    """
    The same seed gives the same pauses.
    """
    assert drawn(POLICIES["store"], 3) == drawn(POLICIES["store"], 3)


@EACH
def test_in_the_end_a_job_is_given_up(policy: Policy) -> None:
    """
    The retries are those that the policy has, and then there is none.
    """
    rng = random.Random(7)
    pauses = [next_pause_s(policy, num_faults, rng) for num_faults in range(1, policy.max_retries + 3)]

    assert policy.max_retries == sum(pause is not None for pause in pauses)
    assert [None, None] == pauses[-2:]


def test_another_fault_begins_the_count_anew() -> None:
    """
    The payload that can be read at last is no reason to be patient with the engine.
    """
    assert (1, 4, 1) == (
        num_faults_with("store", "", 0),
        num_faults_with("store", "store", 3),
        num_faults_with("engine", "store", 3),
    )


@pytest.mark.parametrize("fault", ["store", "payload", "version"])
def test_a_server_that_is_away_is_waited_for(fault: Fault) -> None:
    """
    What may come back is waited for at least a quarter of an hour in all but one of a hundred cases.
    """
    policy = POLICIES[fault]
    waits = []
    for seed in range(100):
        rng = random.Random(seed)
        waits.append(sum(policy.pause_s(number, rng) for number in range(1, policy.max_retries + 1)))

    assert sorted(waits)[1] > 900
