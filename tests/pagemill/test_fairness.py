"""Tenants that both have jobs waiting are served tokens in the ratio of their weights."""

import asyncio

import pytest

from benchmarks.fairness import Case, measure

# one tenant has a hundred times the jobs of the other, always; sizes are lognormal
UNEVEN = {"backlog": (2000, 20), "sigma": 0.8, "window": 50_000, "windows": 2}


@pytest.mark.parametrize(
    "case",
    [
        Case("estimates that are off", median=(40.0, 120.0), over=(1.5, 1.5), spread=0.7, **UNEVEN),
        Case("one that asks for four times what it takes", over=(4.0, 1.0), spread=0.5, **UNEVEN),
        Case("3 to 1", weights=(3.0, 1.0), over=(1.5, 1.5), spread=0.7, **UNEVEN),
    ],
    ids=lambda case: case.name,
)
def test_shares_follow_the_weights(newest_server: str, case: Case) -> None:
    """
    In each window of 50,000 tokens, each tenant has its share within 5 %, in tokens that were really generated.
    """
    shares = asyncio.run(measure(newest_server, case))

    assert case.windows == len(shares)
    assert max(map(case.error, shares)) <= 0.05, shares
