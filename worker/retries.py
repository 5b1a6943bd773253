"""
When a job is tried again after a fault that may pass, and when it is given up.

Pauses have full jitter: each is drawn evenly from nothing to a limit that doubles with every fault
of the same kind in a row, so that jobs that failed together do not come back together. When a job
is due is said by the server's clock.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# engine: it failed while it had the job. answer: it gave one that is no text. memory: there was none
# to read the job. store: it cannot be reached. payload: this worker cannot read it there. version:
# the job is of a wire format newer than this worker's
Fault = Literal["engine", "answer", "memory", "store", "payload", "version"]


@dataclass(frozen=True, slots=True)
class Policy:
    """
    How jobs are tried again after one kind of fault.

    Args:
        base_s: Longest pause after the first fault; it doubles with each further one.
        cap_s: Longest pause at all.
        max_retries: So many tries may follow the first one; then the job is given up.
        counts: A try is an attempt: those of all kinds together are bounded too.
    """

    base_s: float
    cap_s: float
    max_retries: int
    counts: bool = False

    def pause_s(self, num_faults: int, rng: random.Random) -> float:
        """How long to wait after so many faults in a row."""
        # 2**32 of the smallest base is beyond any cap, and a larger power could overflow
        return rng.uniform(0.0, min(self.cap_s, self.base_s * 2.0 ** min(32, num_faults - 1)))


# What is not a worker's fault is waited for, about half an hour to an hour by the mean of the pauses.
POLICIES: Mapping[Fault, Policy] = {
    "engine": Policy(base_s=2.0, cap_s=60.0, max_retries=64, counts=True),
    # it may be the device, or one wrong bit; what comes from the weights comes again
    "answer": Policy(base_s=1.0, cap_s=10.0, max_retries=1, counts=True),
    "memory": Policy(base_s=5.0, cap_s=120.0, max_retries=4, counts=True),
    "store": Policy(base_s=1.0, cap_s=60.0, max_retries=120),
    "payload": Policy(base_s=1.0, cap_s=60.0, max_retries=60),
    "version": Policy(base_s=0.5, cap_s=30.0, max_retries=120),
}


def num_faults_with(fault: Fault, earlier: str, num_earlier: int) -> int:
    """Faults of this kind in a row, this one included; another kind before it begins the count anew."""
    return num_earlier + 1 if earlier == fault else 1


def next_pause_s(policy: Policy, num_faults: int, rng: random.Random) -> float | None:
    """How long to wait before the next try; None where there is none any more."""
    return policy.pause_s(num_faults, rng) if num_faults <= policy.max_retries else None
