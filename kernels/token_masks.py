"""Take away the tokens that may not be sampled."""

import math

import numpy as np
import torch
from torch import Tensor


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """
    Take infinity off the logits of forbidden tokens, in place; other rows are not touched.

    What is NaN, or +inf, stays no number: a row that has failed fails.

    Args:
        logits: [num_rows, vocab] float32 or float64.
        rows: [n] int64, the rows to mask, each once.
        masks: [n, at least vocab / 32] int32, contiguous: a bit a token, set where it is allowed, token 0 in the
            lowest bit of the first word.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cuda.token_masks import apply_token_masks_triton

        apply_token_masks_triton(logits, rows, masks)
        return
    pick = apply_token_masks_cpu if logits.device.type == "cpu" else apply_token_masks_reference
    pick(logits, rows, masks)


def apply_token_masks_reference(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    tokens = torch.arange(logits.shape[1], device=logits.device)
    allowed = (masks[:, tokens // 32] >> (tokens % 32)) & 1
    logits[rows] -= torch.where(allowed == 1, 0.0, math.inf).to(logits.dtype)


def apply_token_masks_cpu(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    values = logits.detach().numpy()
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    # inf less inf is NaN, and meant so
    with np.errstate(invalid="ignore"):
        for row, allowed in zip(rows.tolist(), bits, strict=True):
            np.subtract(values[row], np.inf, out=values[row], where=allowed == 0)
