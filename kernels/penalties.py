"""
Lower the logits of tokens that were there before.

Source: repetition penalty, Keskar et al. 2019, arXiv:1909.05858, section 4.1; presence and
frequency penalties as OpenAI's API defines them.
"""

import numpy as np
import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor, rows: Tensor, slots: Tensor, in_prompt: Tensor, output_counts: Tensor, strengths: Tensor
) -> None:
    """
    Penalise, in place, the tokens that some rows have seen; other rows are not touched.

    First the repetition penalty, over prompt and output: a positive logit is divided by it,
    any other multiplied. Then, over the output alone, the presence penalty is taken off once
    and the frequency penalty once per occurrence.

    Args:
        logits: [num_rows, vocab] float32 or float64.
        rows: [n] int64, the rows to penalise, each once.
        slots: [n] int64, where each of them is in the next two.
        in_prompt: [num_slots, vocab] bool.
        output_counts: [num_slots, vocab] int32, occurrences in the output.
        strengths: [n, 3] repetition (1 is none), presence and frequency (0 is none).
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cuda.penalties import apply_penalties_triton

        apply_penalties_triton(logits, rows, slots, in_prompt, output_counts, strengths)
        return
    pick = apply_penalties_cpu if logits.device.type == "cpu" else apply_penalties_reference
    pick(logits, rows, slots, in_prompt, output_counts, strengths)


def apply_penalties_reference(
    logits: Tensor, rows: Tensor, slots: Tensor, in_prompt: Tensor, output_counts: Tensor, strengths: Tensor
) -> None:
    before = logits[rows]
    counts = output_counts[slots]
    repetition, presence, frequency = strengths.to(logits.dtype)[:, :, None].unbind(dim=1)

    seen = in_prompt[slots] | (counts > 0)
    after = torch.where(before > 0, before / repetition, before * repetition)
    after = torch.where(seen, after, before)
    logits[rows] = after - presence * (counts > 0) - frequency * counts


def apply_penalties_cpu(
    logits: Tensor, rows: Tensor, slots: Tensor, in_prompt: Tensor, output_counts: Tensor, strengths: Tensor
) -> None:
    values, prompt, output = logits.detach().numpy(), in_prompt.numpy(), output_counts.numpy()
    factors = strengths.to(logits.dtype).numpy()
    for row, slot, (repetition, presence, frequency) in zip(rows.tolist(), slots.tolist(), factors, strict=True):
        # a row has seen some hundreds of the vocabulary's tokens: touch those alone
        tokens = np.flatnonzero(prompt[slot] | (output[slot] > 0))
        seen = values[row, tokens]
        counts = output[slot, tokens].astype(seen.dtype)

        seen = np.where(seen > 0, seen / repetition, seen * repetition)
        values[row, tokens] = seen - presence * (counts > 0) - frequency * counts
