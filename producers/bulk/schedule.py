"""Bulk jobs by name and day, as a scheduler runs them: once a day, however often it asks."""

import os
from collections.abc import Mapping
from datetime import date
from typing import Any

from pagemill.bulk_client import BulkClient
from producers.bulk.errors import SpecError
from producers.bulk.jobs import Hooks, run_job
from producers.bulk.spec import BulkSpec, read_section


def run_for_date(
    name: str, day: date, *, client: BulkClient | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """
    Do the job `[bulk.<name>]` of pagemill.toml for a day, and give its figures as JSON values.

    A day that is done is not done again, and one that was interrupted goes on.

    Args:
        client: None makes one from the settings.

    Raises:
        SpecError: there is no such job, or its output is the same for all days.
        BulkError, PagemillError: as `run_job`.
    """
    spec = BulkSpec.build(read_section(name, environment))
    if "{date}" not in spec.output:
        raise SpecError(
            f"the output of [bulk.{name}] is {spec.output}: put {{date}} into it, so that each day has its own"
        )
    if client is not None:
        return run_job(spec.on(day), client, Hooks()).model_dump(mode="json")
    with BulkClient() as own:
        return run_job(spec.on(day), own, Hooks()).model_dump(mode="json")
