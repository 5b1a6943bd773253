"""Log-probabilities of chosen tokens, and of the best ones, without keeping a row's softmax."""

import torch
from torch import Tensor

# stands for -inf, which JSON has no word for
LOGPROB_FLOOR = -9999.0

# rows whose softmax is held at once: 32 of 49,152 float32 are 6 MiB
_ROWS_AT_ONCE = 32


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Give each row's log-probability of one token, and of its `num_top` best.

    Args:
        logits: [rows, vocab] float, as the model gave them.
        token_ids: [rows] int64, the token asked for; ids within the vocabulary.
        num_top: How many of the best, at most vocab.

    Returns:
        [rows] log-probabilities of `token_ids`; [rows, num_top] ids of the best, the lower id
        first where two tie; [rows, num_top] their log-probabilities. Natural logarithms, at
        least float32, finite: none under -9999.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cuda.logprobs import token_logprobs_triton

        return token_logprobs_triton(logits, token_ids, num_top)
    return token_logprobs_reference(logits, token_ids, num_top)


def token_logprobs_reference(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    if not len(logits):
        empty = logits.new_empty(0, num_top)
        return empty.sum(dim=-1), empty.long(), empty
    parts = [
        _some_logprobs(logits[row : row + _ROWS_AT_ONCE], token_ids[row : row + _ROWS_AT_ONCE], num_top)
        for row in range(0, len(logits), _ROWS_AT_ONCE)
    ]
    chosen, best, values = (torch.cat(part) for part in zip(*parts, strict=True))
    return chosen, best, values


def _some_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits if logits.dtype == torch.float64 else logits.float()
    # by the row, unlike logsumexp, whose sum is split over threads where rows are few
    logprobs = rows.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])[:, 0]

    # topk promises no order among equals: by id first, then by value without moving equals
    best = logprobs.topk(num_top, dim=-1).indices.sort(dim=-1).values
    values, order = logprobs.gather(-1, best).sort(dim=-1, descending=True, stable=True)
    return chosen.clamp(min=LOGPROB_FLOOR), best.gather(-1, order), values.clamp(min=LOGPROB_FLOOR)
