"""`pagemill.bulk`: a bulk job for a date, however often its message comes."""

import datetime
from importlib import import_module
from typing import Any

from producers.tasks.failures import failure


class RunsElsewhere(Exception):
    """Raised when another process works on that job's output now."""


def run_bulk(name: str, date: str) -> dict[str, Any]:
    """
    Run a bulk job for a date, to its end; what an earlier run has done of it is not done again.

    Raises:
        TaskFailure: the date is none.
        RunsElsewhere: it is to be tried again later, should that process die.
        PagemillError: as bulk raises it.
    """
    try:
        day = datetime.date.fromisoformat(date)
    except (TypeError, ValueError):
        raise failure("invalid_arguments", f"date is {date!r}: want one like 2026-11-30") from None
    # loaded here: what bulk depends on, the ingress does not
    schedule, errors = import_module("producers.bulk.schedule"), import_module("producers.bulk.errors")
    try:
        report: dict[str, Any] = schedule.run_for_date(name, day)
    except errors.Occupied as error:
        raise RunsElsewhere(str(error)) from error
    return report
