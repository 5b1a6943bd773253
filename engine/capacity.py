"""How much the engine could take on, for whoever feeds it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Freeable:
    """
    What a priority may take from less urgent work, beside what is free.

    Args:
        seqs: Seats of running sequences that it could preempt.
        tokens: Tokens of KV cache that these hold, and that less urgent requests which wait were promised.
        passed: Less urgent sequences that wait; it goes ahead of them.
    """

    seqs: int = 0
    tokens: int = 0
    passed: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """
    What the engine could take now; the puller asks before it claims.

    Args:
        free_seqs: Seats that no sequence has; those that wait want theirs from these.
        free_tokens: Tokens of KV cache that are free, or cached and evictable, less the
            headroom of what runs and what the waiting requests will need.
        waiting_seqs: Sequences that wait inside the engine already.
        total_tokens: Size of the whole KV cache.
        max_model_len: Longest prompt plus answer.
        freeable: What preemption would add, by priority; a priority beyond the end gains nothing.
    """

    free_seqs: int
    free_tokens: int
    waiting_seqs: int
    total_tokens: int
    max_model_len: int
    freeable: tuple[Freeable, ...] = ()

    def freeable_by(self, priority: int) -> Freeable:
        return self.freeable[priority] if priority < len(self.freeable) else Freeable()
