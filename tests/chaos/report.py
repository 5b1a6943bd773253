"""What a chaos run did, and what came of it."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.audit import Audit

# a killed worker's jobs run elsewhere within so many leases, those of one that was told to stop within so many seconds
KILLED_LEASES = 1.25
STOPPED_S = 1.0


@dataclass(slots=True, kw_only=True)
class Report(Audit):
    """
    Args:
        poison: Jobs that kill whoever runs them, as submitted.
        longest_resume_s: From a worker's end at the hands of the driver to the moment when the last of
            its jobs was in another's, or had ended; of killed workers, of those whose supervisor
            outlived them, and of those that were told to stop. Without jobs that were suspects by
            then, without workers that the server's restarts got in the way of, and without time in which no
            worker was up.
    """

    jobs: int
    workers: int
    seats: int
    lease_s: float
    seed: int
    poison: int = 0
    longest_resume_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    kills: int = 0
    worker_kills: int = 0
    drains: int = 0
    pauses: int = 0
    server_restarts: int = 0
    starts: int = 0
    reclaimed: int = 0
    released: int = 0
    fenced: int = 0

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def late(self) -> list[str]:
        """Resumes that took longer than promised; on a machine that is shared they may."""
        bounds = {
            "killed": KILLED_LEASES * self.lease_s,
            "orphaned": KILLED_LEASES * self.lease_s,
            "stopped": STOPPED_S,
        }
        return [f"{kind}: {took} s" for kind, took in self.longest_resume_s.items() if took > bounds[kind]]

    def line(self) -> dict[str, Any]:
        return asdict(self) | {"late": self.late, "ok": self.ok}
