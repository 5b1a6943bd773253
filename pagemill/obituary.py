"""What a supervisor tells the queue of a worker that has died."""

from dataclasses import dataclass
from typing import Literal

from redis import Redis

from pagemill.keys import QueueKeys
from pagemill.scripts import Arg, Call, load, run

# entries that one script takes; more take another call
LOOKS = 128

# of what a process said when it died, enough for a dead letter
MAX_WHY = 1000


@dataclass(frozen=True, slots=True)
class DeathReport:
    """
    What became of the jobs that a dead worker held.

    Args:
        returned: They went back as they were, or ended by a cancel or a deadline.
        suspects: They run next on a worker that has nothing else, in groups.
        dead: Each had been alone with a worker that died for the second time: a dead letter.
    """

    returned: int = 0
    suspects: int = 0
    dead: int = 0


def report_death(
    redis: Redis, queue: str, worker_id: str, *, cause: Literal["lapse", "crash"], why: str
) -> DeathReport:
    """
    Take all jobs from a worker that has died, at once and not when its lease has run out.

    May be repeated, also after an error: what it did is done, and the rest follows. The worker can
    claim nothing any more; one that lives after all hears by its next renewal that it lost its jobs.

    Args:
        redis: From `pagemill.connection.connect`.
        cause: "lapse" where it was ended from outside, which says nothing of its jobs: they go back
            as they are. "crash" where one of them may have ended it: they become suspects, and one
            that was alone when two workers died is a dead letter.
        why: How it ended, in words; it stands in the status of suspects and in the dead letter.

    Raises:
        QueueUnavailable: the server cannot be reached, or refuses.
    """
    args: list[Arg] = [worker_id, cause, _short(why), LOOKS]
    call = Call(load("obituary"), QueueKeys(queue).base, args, _read)
    report, more = DeathReport(), True
    while more:
        more, part = run(redis, call)
        report = DeathReport(report.returned + part.returned, report.suspects + part.suspects, report.dead + part.dead)
    return report


def _read(reply: list[int]) -> tuple[bool, DeathReport]:
    return reply[0] == 1, DeathReport(*reply[1:])


def _short(text: str) -> str:
    # the last words of a process need not be text
    return text[:MAX_WHY].encode(errors="replace").decode()
