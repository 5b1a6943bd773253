"""What a chaos run did, and what came of it."""

from dataclasses import asdict, dataclass, field
from typing import Any

# a killed worker's jobs run elsewhere within so many leases, those of one that was told to stop within so many seconds
KILLED_LEASES = 1.25
STOPPED_S = 1.0


@dataclass(slots=True)
class Report:
    """
    Args:
        results: Jobs that have ended.
        missing: Jobs without an end; duplicated: with more than one.
        dead: Dead letters; poison: jobs that kill whoever runs them, as submitted.
        longest_resume_s: From a worker's end at the hands of the driver to the moment when the last of
            its jobs was in another's, or had ended; of killed workers, of those whose supervisor
            outlived them, and of those that were told to stop. Without jobs that were suspects by
            then, without workers that the server's restarts got in the way of, and without time in which no
            worker was up.
        faults: Whatever is wrong, in words.
    """

    jobs: int
    workers: int
    lease_s: float
    seed: int
    poison: int = 0
    results: int = 0
    missing: int = 0
    duplicated: int = 0
    dead: int = 0
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
    taken_over: int = 0
    faults: list[str] = field(default_factory=list)

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
