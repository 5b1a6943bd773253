"""Penalties in place: a logit is read and written only where its token was seen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
NUM_WARPS = 4


def apply_penalties_triton(
    logits: Tensor, rows: Tensor, slots: Tensor, in_prompt: Tensor, output_counts: Tensor, strengths: Tensor
) -> None:
    """As `apply_penalties_reference`, in float32; logits may also be bf16 or fp16."""
    vocab = logits.shape[1]
    assert logits.stride(1) == in_prompt.stride(1) == output_counts.stride(1) == strengths.stride(1) == 1
    if not len(rows):
        return
    _penalties_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
        logits, rows, slots, in_prompt.view(torch.uint8), output_counts, strengths,
        logits.stride(0), in_prompt.stride(0), output_counts.stride(0), strengths.stride(0), vocab,
        BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _penalties_kernel(
    logits_ptr, rows_ptr, slots_ptr, in_prompt_ptr, counts_ptr, strengths_ptr,
    row_stride, prompt_stride, counts_stride, strengths_stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place).to(tl.int64)
    slot = tl.load(slots_ptr + place).to(tl.int64)
    repetition = tl.load(strengths_ptr + place * strengths_stride)
    presence = tl.load(strengths_ptr + place * strengths_stride + 1)
    frequency = tl.load(strengths_ptr + place * strengths_stride + 2)

    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    counts = tl.load(counts_ptr + slot * counts_stride + ids, mask=inside, other=0)
    in_prompt = tl.load(in_prompt_ptr + slot * prompt_stride + ids, mask=inside, other=0)
    seen = (in_prompt != 0) | (counts > 0)

    logits = logits_ptr + row * row_stride + ids
    before = tl.load(logits, mask=seen, other=0.0).to(tl.float32)
    after = tl.where(before > 0, tl.math.div_rn(before, repetition), before * repetition)
    after = after - presence * (counts > 0).to(tl.float32) - frequency * counts.to(tl.float32)
    tl.store(logits, after, mask=seen)
