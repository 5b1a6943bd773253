"""For how long a payload has been unreadable."""

from worker.deferrals import MAX_NOTES, Deferrals


class Clock:
    """Stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_runs_from_the_first_note() -> None:
    """
    Each note says how long ago the first was, until the payload is read.
    """
    clock = Clock()
    deferrals = Deferrals(forget_s=10.0, clock=clock)
    ages = []
    for now in (0.0, 5.0, 12.0):
        clock.now = now
        ages.append(deferrals.note("job"))
    deferrals.clear("job")
    ages.append(deferrals.note("job"))

    assert [0.0, 5.0, 12.0, 0.0] == ages


def test_a_job_that_was_elsewhere_meanwhile_begins_anew() -> None:
    """
    After a long gap the old note says nothing.
    """
    clock = Clock()
    deferrals = Deferrals(forget_s=10.0, clock=clock)
    deferrals.note("job")
    clock.now = 11.0

    assert 0.0 == deferrals.note("job")


def test_the_notes_are_bounded() -> None:
    """
    The oldest go when there are too many.
    """
    clock = Clock()
    deferrals = Deferrals(forget_s=10.0, clock=clock)
    for number in range(MAX_NOTES + 1):
        deferrals.note(f"job-{number}")
    clock.now = 1.0

    assert (0.0, 1.0) == (deferrals.note("job-0"), deferrals.note(f"job-{MAX_NOTES}"))
