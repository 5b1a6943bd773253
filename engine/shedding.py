"""How an engine steps back when its device is out of memory, and when it has tried that enough."""

from engine.errors import DeviceFull

# times in a row that less work is tried: a sixteenth of what ran at first
MAX_SHEDS = 4
# steps after which a next time is not in a row any more
QUIET_STEPS = 1000


class Shedding:
    """
    Halves what runs at a time, each time that it was too much.

    What was taken away does not come back: the memory is somebody else's, or in pieces.
    """

    def __init__(self) -> None:
        self.num_sheds = 0
        self._in_a_row = 0
        self._last_step = 0

    def halve(self, max_num_seqs: int, max_num_batched_tokens: int, num_steps: int) -> tuple[int, int]:
        """
        Both limits for what comes.

        Args:
            num_steps: That the engine has launched so far.

        Raises:
            DeviceFull: less has been tried, and did not help.
        """
        quiet = num_steps - self._last_step >= QUIET_STEPS
        self._in_a_row = 1 if quiet else self._in_a_row + 1
        self._last_step = num_steps
        if self._in_a_row > MAX_SHEDS:
            raise DeviceFull(
                f"the device is out of memory with {max_num_seqs} sequences and {max_num_batched_tokens} tokens at a "
                f"time, after {MAX_SHEDS} attempts with more: lower gpu_memory_utilization, or see who else uses it"
            )
        self.num_sheds += 1
        seqs = max(1, max_num_seqs // 2)
        return seqs, max(seqs, max_num_batched_tokens // 2)
