"""The scheduler's choices that have a price: how to preempt, and how much room to keep for growth."""

from enum import StrEnum


class Preemption(StrEnum):
    """How a sequence gives up its blocks."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class PreemptionPolicy:
    """
    Picks the cheaper way to preempt a sequence.

    Swapping copies its blocks out and in again; recomputing runs its tokens through the model
    once more. For an 8B model on PCIe, 131 kB a token at 50 GB/s cost 5 us both ways, and
    computing it 22 us; a small model on a slow bus may be the other way round.

    Args:
        mode: "auto" compares the costs; "swap" and "recompute" take one way always. Without room
            on the host every mode recomputes.
        bytes_per_token: KV cache of one token, all layers.
        copy_bytes_per_s: Between device and host, one way.
        prefill_tokens_per_s: What the model computes of a prompt.
    """

    def __init__(
        self,
        mode: str = "auto",
        *,
        bytes_per_token: int = 0,
        copy_bytes_per_s: float = 5e9,
        prefill_tokens_per_s: float = 5e3,
    ) -> None:
        if mode not in ("auto", "swap", "recompute"):
            raise ValueError(f'preemption is "{mode}"; want "auto", "swap" or "recompute"')
        self.mode = mode
        self._swap_s_per_token = 2 * bytes_per_token / copy_bytes_per_s
        self._recompute_s_per_token = 1 / prefill_tokens_per_s

    def choose(self, *, num_slots: int, num_tokens: int, has_room: bool) -> Preemption:
        """
        Choose for one sequence.

        Args:
            num_slots: Token slots of the blocks that a swap would copy.
            num_tokens: Tokens that would be computed again.
            has_room: Whether the host pool can take it.
        """
        if not has_room or self.mode == "recompute":
            return Preemption.RECOMPUTE
        if self.mode == "swap":
            return Preemption.SWAP
        swap_s = num_slots * self._swap_s_per_token
        return Preemption.SWAP if swap_s < num_tokens * self._recompute_s_per_token else Preemption.RECOMPUTE


class Headroom:
    """
    How many tokens of growth of every running sequence admission leaves room for.

    Each preemption doubles it, up to `most`, and each step without one brings it a little
    closer to `least`: sequences that evict each other are soon not admitted together.
    """

    def __init__(self, *, least: int = 16, most: int = 512, decay: float = 0.99) -> None:
        self.least = least
        self.most = most
        self.decay = decay
        self._tokens = float(least)

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def preempted(self) -> None:
        """Note a step that had to preempt."""
        self._tokens = min(self.most, 2 * self._tokens)

    def quiet(self) -> None:
        """Note a step that did not."""
        self._tokens = max(self.least, self._tokens * self.decay)
