"""Whatever happens to the workers, each job has exactly one result."""

import pytest

from tests.chaos.driver import Report, chaos


def assert_disturbed(report: Report) -> None:
    """A run in which nothing happened to the workers proves nothing."""
    assert 0 < min(report.kills, report.worker_kills, report.drains, report.pauses, report.server_restarts), report
    assert 0 < report.poison == report.dead, report
    assert 0 < report.taken_over, report


def test_every_job_has_one_result_whatever_happens_to_the_workers() -> None:
    """
    Kills, drains, pauses beyond the lease, a restart of the server and poison lose no job and double none.
    """
    report = chaos(jobs=300, workers=3, lease_s=2.0, seed=1, poison=1, restarts=1, timeout_s=100)

    assert [] == report.faults
    assert_disturbed(report)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_job_has_one_result_in_a_long_run() -> None:
    """
    The same for 3,000 jobs.
    """
    report = chaos(jobs=3000, workers=3, lease_s=2.0, seed=2, poison=5, restarts=2, timeout_s=800)

    assert [] == report.faults
    assert_disturbed(report)
