"""
Attention of a run of new tokens per sequence: whole prompts, and chunks behind a cached prefix.

Keys and values of the new tokens are read where the layer has just computed them; those of a
prefix are gathered from its blocks first. So the product runs over contiguous memory, without
a page table.

On a CPU each chunk is a call of its own, planned in a `PrefillPlan`. On a GPU a `VarlenPrefill`
has them in parts, those that are attended where they were computed and those that are attended in the
cache, and each is one launch.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.fp8_kv import as_bytes, dequantise_kv
from kernels.gather_kv import gather_kv


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
    kv_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
    dtype: torch.dtype | None = None,
) -> PrefillPlan:
    """
    Find each chunk's prefix and mask for `prefill_attention`.

    Args:
        kv_cache: That of any layer.
        block_tables: [num_seqs, max_blocks] int32; 0, the null block, past the end.
        query_start: [num_seqs + 1] int32, where each sequence's new tokens begin.
        seq_lens: [num_seqs] int32, tokens before and among the new ones.
        window: The token at i sees j where i - window < j <= i; None is all up to i.
        dtype: What is computed in; None is that of the cache, which with scales it is not.
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
                mask=_mask(stop - start, end - begin, window, dtype or kv_cache.dtype),
            )
        )
    return PrefillPlan(block_tables, query_start, seq_lens, window, tuple(chunks))


@dataclass(frozen=True, slots=True)
class VarlenPart:
    """
    Chunks that one launch attends; the last token of each is the last of its keys.

    Args:
        num_tokens: Of all chunks.
        query_start: [num_chunks + 1] int32 on the device, where each chunk's tokens begin among the part's.
        key_start: [num_chunks + 1] int32 on the device, where its keys begin; `query_start` itself
            for chunks without a prefix.
        max_query, max_key: Tokens and keys of the longest.
        num_keys: key_start[num_chunks], for a device is not asked.
        block_tables: [num_slots, max_blocks] int32; None where chunks are attended where they were computed.
        slots: [num_chunks] int32, each chunk's row of `block_tables`; None there too.
    """

    num_tokens: int
    query_start: Tensor
    key_start: Tensor
    max_query: int
    max_key: int
    num_keys: int
    block_tables: Tensor | None = None
    slots: Tensor | None = None


@dataclass(frozen=True, slots=True)
class VarlenPrefill:
    """
    What all layers of a step with one window share, on a GPU.

    Args:
        window: The token at i sees j where i - window < j <= i; None is all up to i.
        fresh: Chunks that start their sequences; None if there are none. Their tokens come first.
        behind: Other chunks, in parts: the keys of one, a prefix and the new ones, are gathered at a time.
    """

    window: int | None
    fresh: VarlenPart | None
    behind: tuple[VarlenPart, ...]


@overload
def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    plan: PrefillPlan,
    scale: float,
    *,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    plan: VarlenPrefill,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    plan: PrefillPlan | VarlenPrefill,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """
    Attend each new token to those up to it in its own sequence.

    Args:
        query: [num_tokens, num_heads, head_dim], new tokens of all sequences end to end.
        key, value: [num_tokens, num_kv_heads, head_dim], of the same tokens, rounded as the cache is.
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], read for what precedes
            them; under a `VarlenPrefill` it must hold the new tokens of the chunks in `behind` too.
        plan: `plan_prefill` of these sequences on a CPU, a `VarlenPrefill` on a GPU.
        scale: Multiplies the scores; 1 / sqrt(head_dim) as a rule.
        softcap: Scores become softcap * tanh(score / softcap); 0 leaves them. On a GPU.
        kv_scales: [2, num_blocks, num_kv_heads, block_size] float32, what each token's keys and
            values in a float8_e4m3fn cache are multiplied by.
        out: [num_tokens, num_heads, head_dim], contiguous, where the result goes; None makes memory for it.

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of `query`: `out`, where it is given.

    Source: Dao 2023, arXiv:2307.08691, for the tiling that SDPA does.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if isinstance(plan, PrefillPlan):
        assert softcap == 0.0
        prefill_attention_reference(query, key, value, kv_cache, plan, scale, kv_scales, out)
        return out
    row = 0
    if plan.fresh is not None:
        row = plan.fresh.num_tokens
        varlen_attention(query[:row], key[:row], value[:row], plan.fresh, plan.window, scale, softcap, out[:row])
    for part in plan.behind:
        assert part.block_tables is not None
        assert part.slots is not None
        keys, values = gather_kv(
            kv_cache, part.block_tables, part.slots, part.key_start, part.num_keys, kv_scales, query.dtype
        )
        rows = slice(row, row + part.num_tokens)
        varlen_attention(query[rows], keys, values, part, plan.window, scale, softcap, out[rows])
        row += part.num_tokens
        # those of one part are there at a time
        del keys, values
    return out


def prefill_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    plan: PrefillPlan,
    scale: float,
    kv_scales: Tensor | None,
    out: Tensor,
) -> None:
    for chunk in plan.chunks:
        members = slice(chunk.start, chunk.stop)
        keys, values = key[members], value[members]
        if chunk.num_prefix:
            prefix = _gather_blocks(kv_cache, kv_scales, chunk.prefix_blocks, query.dtype)
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


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: VarlenPart,
    window: int | None,
    scale: float,
    softcap: float,
    out: Tensor,
) -> None:
    """
    Attend chunks of tokens to keys and values that lie end to end as they do.

    Args:
        query: [num_tokens, num_heads, head_dim], last dim contiguous.
        key, value: [num_keys, num_kv_heads, head_dim], last dim contiguous.
        part: Where chunks and keys begin.
        window, scale, softcap: As `prefill_attention` has them.
        out: [num_tokens, num_heads, head_dim], contiguous, the dtype of `query`; filled in.
    """
    if query.is_cuda:
        from kernels.cuda.prefill_attention import varlen_attention_triton

        varlen_attention_triton(query, key, value, part, window, scale, softcap, out)
    else:
        out.copy_(varlen_attention_reference(query, key, value, part, window, scale, softcap))


def varlen_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, part: VarlenPart, window: int | None, scale: float, softcap: float = 0.0
) -> Tensor:
    """One chunk after another, in float64 where the query is, else in float32."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group_size = query.shape[1] // key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    bounds = zip(pairwise(part.query_start.tolist()), pairwise(part.key_start.tolist()), strict=True)
    for (start, stop), (first_key, stop_key) in bounds:
        # heads first
        rows = query[start:stop].to(dtype).transpose(0, 1)
        keys, values = (
            x[first_key:stop_key].to(dtype).transpose(0, 1).repeat_interleave(group_size, dim=0) for x in (key, value)
        )
        scores = rows @ keys.mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        num_tokens = stop - start
        hidden = _hidden(num_tokens, stop_key - first_key - num_tokens, window, query.device)
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        out[start:stop] = (weights @ values).transpose(0, 1).to(query.dtype)
    return out


def _gather_blocks(kv_cache: Tensor, kv_scales: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values of blocks end to end, [2, num_slots, num_kv_heads, head_dim]."""
    if kv_scales is None:
        return kv_cache.transpose(2, 3).index_select(1, blocks).flatten(1, 2)
    stored = as_bytes(kv_cache).transpose(2, 3).index_select(1, blocks).view(kv_cache.dtype)
    scales = kv_scales.transpose(2, 3).index_select(1, blocks)
    return dequantise_kv(stored, scales, dtype).flatten(1, 2)


def _mask(num_tokens: int, num_prefix: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
    if num_prefix == 0 and (window is None or num_tokens <= window):
        return None
    hidden = _hidden(num_tokens, num_prefix, window, torch.device("cpu"))
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _hidden(num_tokens: int, num_prefix: int, window: int | None, device: torch.device) -> Tensor:
    """[num_tokens, num_prefix + num_tokens], whether a token may not see a key."""
    rows = torch.arange(num_prefix, num_prefix + num_tokens, device=device)[:, None]
    columns = torch.arange(num_prefix + num_tokens, device=device)
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    return hidden
