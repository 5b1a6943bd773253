"""Token masks in place: of a logit that is allowed nothing is read or written, of 32 tokens one word of the mask."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
NUM_WARPS = 4


def apply_token_masks_triton(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """As `apply_token_masks_reference`; logits may also be bf16 or fp16."""
    vocab = logits.shape[1]
    assert logits.stride(1) == masks.stride(1) == 1
    assert masks.dtype == torch.int32
    if not len(rows):
        return
    _masks_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
        logits, rows, masks, logits.stride(0), masks.stride(0), vocab, BLOCK=BLOCK, num_warps=NUM_WARPS
    )


@triton.jit
def _masks_kernel(logits_ptr, rows_ptr, masks_ptr, row_stride, mask_stride, vocab, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(masks_ptr + place * mask_stride + ids // 32, mask=ids < vocab, other=-1)
    forbidden = (words >> (ids % 32)) & 1 == 0
    logits = logits_ptr + row * row_stride + ids
    # taken off, not set: a NaN or inf stays what it is
    values = tl.load(logits, mask=forbidden, other=0.0)
    tl.store(logits, values - float("inf"), mask=forbidden)
