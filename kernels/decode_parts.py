"""
How the sequences of a batch are cut for decode attention: found out on the device, once for all layers.

A program that reads a long sequence alone would end long after the others, and a small batch would
leave most of the GPU idle. So what is long beside the batch is cut into parts of equal length, and a
launch has a program for each part, those of the first row first. With the longest sequences in the
first rows none is left to run alone at the end. A graph launches as many programs as a batch of its
size can have parts; those behind the last one find nothing to do.

Source: Dao et al. 2023, "Flash-Decoding".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cascade_attention import Cascade
from kernels.decode_config import decode_config

# programs that a batch's tokens are dealt to, or more: ten for each of an H200's 132 multiprocessors
MIN_PROGRAMS = 1320
# where the parts would be shorter than `SHORT_PART` for it, four are enough
FEWEST_PROGRAMS = 528
SHORT_PART = 512
# a part of fewer tokens takes longer to start and to join than to read; all are multiples of it
PART_UNIT = 64
# of one sequence
MAX_PARTS = 32
# an item is a row, and a part of it from this bit on
PART_SHIFT = 16


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """
    The parts of a batch, and where their results meet.

    Args:
        items: [max_items] int32, the row and the part of each program; -1 behind the last.
        shares: [num_seqs] int32, tokens of a part, the last of which may be shorter.
        firsts: [num_seqs + 1] int32, the first item of each row; then how many there are.
        outputs: [max_items, num_heads, head_dim] float32, of parts, one layer's at a time.
        lses: [max_items, num_heads] float32, their log-sum-exps to base 2.
        arrivals: [num_seqs * programs_a_seq] int32, parts that are done; zeros between two calls.
    """

    items: Tensor
    shares: Tensor
    firsts: Tensor
    outputs: Tensor
    lses: Tensor
    arrivals: Tensor

    def rows(self, num_seqs: int, programs_a_seq: int) -> "DecodeParts":
        """The same memory for a smaller batch."""
        count = max_items(num_seqs, programs_a_seq)
        return DecodeParts(
            self.items[:count],
            self.shares[:num_seqs],
            self.firsts[: num_seqs + 1],
            self.outputs[:count],
            self.lses[:count],
            self.arrivals[: num_seqs * programs_a_seq],
        )


def programs_of(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """
    Programs that read a part: some have several KV heads.

    Args:
        dtype: Of the cache.
    """
    heads = decode_config(head_dim, num_heads // num_kv_heads, dtype, 1)["heads"]
    return num_kv_heads // heads if num_kv_heads % heads == 0 else num_kv_heads


def max_items(num_seqs: int, programs_a_seq: int) -> int:
    """Most parts that a batch is cut into, however long its sequences are."""
    return min(MAX_PARTS * num_seqs, num_seqs + -(-MIN_PROGRAMS // programs_a_seq))


def make_parts(
    max_num_seqs: int, programs_a_seq: int, num_heads: int, head_dim: int, device: torch.device
) -> DecodeParts:
    """Memory for the parts of any batch up to a largest; see `cut_sequences`."""
    count = max_items(max_num_seqs, programs_a_seq)
    return DecodeParts(
        items=torch.full((count,), -1, dtype=torch.int32, device=device),
        shares=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
        firsts=torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device),
        outputs=torch.empty(count, num_heads, head_dim, dtype=torch.float32, device=device),
        lses=torch.empty(count, num_heads, dtype=torch.float32, device=device),
        arrivals=torch.zeros(max_num_seqs * programs_a_seq, dtype=torch.int32, device=device),
    )


def cut_sequences(
    parts: DecodeParts, seq_lens: Tensor, window: int | None, programs_a_seq: int, cascade: Cascade | None = None
) -> None:
    """
    Fill in the items, shares and firsts of a batch.

    Args:
        parts: Of as many rows.
        seq_lens: [num_seqs] int32.
        window: The newest token sees so many at most; None is all.
        cascade: Prefixes that are attended without these programs; where there is no window alone.
    """
    if seq_lens.is_cuda:
        from kernels.cuda.decode_parts import cut_sequences_triton

        cut_sequences_triton(parts, seq_lens, window, programs_a_seq, cascade)
    else:
        cut_sequences_reference(parts, seq_lens, window, programs_a_seq, cascade)


def cut_sequences_reference(
    parts: DecodeParts, seq_lens: Tensor, window: int | None, programs_a_seq: int, cascade: Cascade | None = None
) -> None:
    lengths = seq_lens.long()
    if window is not None:
        lengths = lengths.clamp(max=window)
    if cascade is not None:
        lengths = lengths - cascade.rows[: len(lengths), 0]
    longest = longest_part(int(lengths.sum()), programs_a_seq)
    counts = (-(-lengths // longest)).clamp(1, MAX_PARTS)
    shares = (-(-lengths // (counts * PART_UNIT))).clamp(min=1) * PART_UNIT
    counts = (-(-lengths // shares)).clamp(min=1)
    parts.shares.copy_(shares)
    parts.firsts.copy_(torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    parts.items.fill_(-1)
    found = [row | part << PART_SHIFT for row, count in enumerate(counts.tolist()) for part in range(count)]
    parts.items[: len(found)] = torch.tensor(found, dtype=torch.int32)


def longest_part(num_tokens: int, programs_a_seq: int) -> int:
    """
    How many tokens are not cut.

    Args:
        num_tokens: That the whole batch attends to.
    """
    work = num_tokens * programs_a_seq
    return max(PART_UNIT, -(-work // MIN_PROGRAMS), min(SHORT_PART, -(-work // FEWEST_PROGRAMS)))
