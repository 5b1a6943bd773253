"""How the engine's time is shared among the requests in it."""

import random

import pytest

from worker.metering import Meter


def test_a_step_is_shared_by_those_that_are_there() -> None:
    """
    Whoever comes later pays for no step before, and whoever is alone pays for the whole of one.
    """
    meter = Meter()
    meter.enter("a")
    meter.spend(0.010)
    meter.enter("b")
    meter.spend(0.020)
    first = meter.leave("a")
    meter.spend(0.005)

    assert (20, 15, 0) == (first, meter.leave("b"), len(meter))


def test_what_is_cut_off_one_share_goes_to_the_next() -> None:
    """
    Three requests that share 10 ms get 3, 3 and 4.
    """
    meter = Meter()
    for name in "abc":
        meter.enter(name)
    meter.spend(0.0101)

    assert [3, 3, 4] == [meter.leave(name) for name in "abc"]


def test_a_request_that_never_entered_took_nothing() -> None:
    """
    One that was refused, or has left already, has no share.
    """
    meter = Meter()
    meter.enter("a")
    meter.spend(1)
    meter.leave("a")

    assert (0, 0) == (meter.leave("a"), meter.leave("b"))


@pytest.mark.parametrize("seed", range(5))
def test_shares_add_up_to_the_time_spent(seed: int) -> None:
    """
    Whatever comes and goes, the sum of all shares is the engine's time to the millisecond.
    """
    rng = random.Random(seed)
    meter = Meter()
    inside: list[str] = []
    spent_s, total_ms = 0.0, 0
    for turn in range(5000):
        for number in range(rng.choice([0, 0, 1, 3])):
            inside.append(f"{turn}-{number}")
            meter.enter(inside[-1])
        elapsed_s = rng.expovariate(1 / 0.03)
        spent_s += elapsed_s if inside else 0
        meter.spend(elapsed_s)
        while inside and rng.random() < 0.5:
            total_ms += meter.leave(inside.pop(rng.randrange(len(inside))))
    total_ms += sum(meter.leave(name) for name in inside)

    assert abs(1000 * spent_s - total_ms) <= 1
