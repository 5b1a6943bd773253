"""
Attention of a run of new tokens per sequence: whole prompts, and chunks behind a cached prefix.

Keys and values of the new tokens are read where the layer has just computed them; those of a
prefix are gathered from its blocks first. So the product runs over contiguous memory, without
a page table.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """
    The new tokens of one sequence.

    Args:
        start, stop: Their places among the tokens of the step.
        skipped: Slots at the head of the first prefix block that nobody sees.
        num_prefix: Tokens of the prefix that the chunk sees.
        prefix_blocks: int64, where these lie.
        mask: [num_tokens, num_prefix + num_tokens], 0 where visible, else -inf; None is causal.
    """

    start: int
    stop: int
    skipped: int
    num_prefix: int
    prefix_blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """
    What all layers of a step with one window share.

    Args:
        block_tables, query_start, seq_lens, window: As `plan_prefill` got them.
    """

    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    window: int | None
    chunks: tuple[PrefillChunk, ...]


def plan_prefill(
    kv_cache: Tensor, block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, window: int | None = None
) -> PrefillPlan:
    """
    Find each chunk's prefix and mask for `prefill_attention`.

    Args:
        kv_cache: That of any layer.
        block_tables: [num_seqs, max_blocks] int32; 0, the null block, past the end.
        query_start: [num_seqs + 1] int32, where each sequence's new tokens begin.
        seq_lens: [num_seqs] int32, tokens before and among the new ones.
        window: The token at i sees j where i - window < j <= i; None is all up to i.
    """
    block_size = kv_cache.shape[3]
    bounds = query_start.tolist()
    chunks = []
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start, stop = bounds[seq], bounds[seq + 1]
        end = seq_len - (stop - start)
        begin = min(end, max(0, end + 1 - window)) if window else 0
        first_block = begin // block_size
        chunks.append(
            PrefillChunk(
                start=start,
                stop=stop,
                skipped=begin - first_block * block_size,
                num_prefix=end - begin,
                prefix_blocks=block_tables[seq, first_block : -(-end // block_size)].long(),
                mask=_mask(stop - start, end - begin, window, kv_cache.dtype),
            )
        )
    return PrefillPlan(block_tables, query_start, seq_lens, window, tuple(chunks))


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: PrefillPlan, scale: float
) -> Tensor:
    """
    Attend each new token to those up to it in its own sequence.

    Args:
        query: [num_tokens, num_heads, head_dim], new tokens of all sequences end to end.
        key, value: [num_tokens, num_kv_heads, head_dim], of the same tokens.
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], read for what precedes them.
        plan: `plan_prefill` of these sequences.
        scale: Multiplies the scores; 1 / sqrt(head_dim) as a rule.

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of `query`.

    Source: Dao 2023, arXiv:2307.08691, for the tiling that SDPA does.
    """
    return prefill_attention_reference(query, key, value, kv_cache, plan, scale)


def prefill_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: PrefillPlan, scale: float
) -> Tensor:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for chunk in plan.chunks:
        members = slice(chunk.start, chunk.stop)
        keys, values = key[members], value[members]
        if chunk.num_prefix:
            prefix = kv_cache.transpose(2, 3).index_select(1, chunk.prefix_blocks).flatten(1, 2)
            prefix = prefix[:, chunk.skipped : chunk.skipped + chunk.num_prefix]
            keys, values = torch.cat([prefix[0], keys]), torch.cat([prefix[1], values])
        attended = F.scaled_dot_product_attention(
            query[members].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[members] = attended[0].transpose(0, 1)
    return out


def _mask(num_tokens: int, num_prefix: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
    if num_prefix == 0 and (window is None or num_tokens <= window):
        return None
    rows = torch.arange(num_prefix, num_prefix + num_tokens)[:, None]
    columns = torch.arange(num_prefix + num_tokens)
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
