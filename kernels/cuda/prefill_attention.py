"""
Attention of runs of new tokens on a GPU, over adjacent keys and values.

Two engines do the same product. FlashAttention-2, which torch carries, is the faster for short
prompts. The kernels here take over for long ones, and for what it lacks: float32, other head
sizes, soft caps. One reads tiles through TMA descriptors; the plain one reads them through pointers
and takes any strides.

Source: Dao 2023, arXiv:2307.08691, for the loop over keys.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import tuned
from kernels.cuda.launching import start_kernel
from kernels.prefill_attention import VarlenPart

LOG2_E = 1.4426950408889634
DOT_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# FlashAttention-2 pads others to the next of these
FLASH_HEAD_DIMS = (32, 64, 96, 128, 192, 256)


class Tiles(NamedTuple):
    """
    How a kernel here is cut.

    Args:
        rows, keys: Of a tile of scores, powers of 2, 16 at least.
        stages: Tiles of keys and values in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def varlen_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: VarlenPart,
    window: int | None,
    scale: float,
    softcap: float,
    out: Tensor,
) -> None:
    """See `kernels.prefill_attention.varlen_attention`."""
    config, tiles = _config_for(query.shape[2], query.shape[1] // key.shape[1], query.dtype)
    if part.max_key >= config["tma_from"] and takes_tma(query, key, value, out):
        attend(query, key, value, part, window, scale, softcap, tiles["tma"], tma=True, out=out)
    elif softcap or part.max_key >= config["plain_from"] or not takes_flash(query):
        attend(query, key, value, part, window, scale, softcap, tiles["plain"], tma=False, out=out)
    else:
        out.copy_(attend_flash(query, key, value, part, window, scale))


@functools.cache
def _config_for(head_dim: int, group_size: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, Tiles]]:
    """The configuration on the GPU at hand, and the tiles of each kernel in it."""
    name = str(dtype).removeprefix("torch.")
    config = tuned("prefill_attention", padded_dim=_padded(head_dim), group_size=group_size, dtype=name)
    return config, {kernel: tiles_of(config, kernel) for kernel in ("plain", "tma")}


def tiles_of(config: dict[str, int], kernel: str) -> Tiles:
    """Those of "plain" or "tma" in a configuration."""
    return Tiles(*(config[f"{kernel}_{name}"] for name in Tiles._fields))


def takes_flash(query: Tensor) -> bool:
    """Whether FlashAttention-2 has a kernel for these heads."""
    return query.is_cuda and query.dtype.itemsize == 2 and query.shape[2] in FLASH_HEAD_DIMS


def takes_tma(*tensors: Tensor) -> bool:
    """Whether TMA can read and write these: 16-bit elements, rows and heads aligned to 16 bytes, sm_90."""
    return all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 for x in tensors) and all(
        x.dtype.itemsize == 2 and x.is_cuda and _capability(x.get_device()) >= (9, 0) for x in tensors
    )


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _workspace(size: int, _alignment: int, _stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, part: VarlenPart, window: int | None, scale: float
) -> Tensor:
    """Attend with torch's FlashAttention-2, whose causal mask is aligned to the last query and key."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        part.query_start,
        part.key_start,
        part.max_query,
        part.max_key,
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return out


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: VarlenPart,
    window: int | None,
    scale: float,
    softcap: float,
    tiles: Tiles,
    *,
    tma: bool,
    out: Tensor | None = None,
) -> Tensor:
    """
    Attend with a kernel of this file.

    Args:
        query, key, value: Last dim contiguous.
        tma: Read through descriptors; only where `takes_tma`.
        out: Contiguous; None makes memory for the result.
    """
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    num_heads, head_dim = query.shape[1:]
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    windowed = window is not None and window < part.max_key
    # tiles of one rank of all heads and sequences run together: heads of a group share keys in the L2 cache
    grid = (num_heads, part.query_start.numel() - 1, -(-part.max_query // tiles.rows))
    kernel, own = (_tma_kernel, {}) if tma else (_plain_kernel, {"PRECISION": "ieee"})
    if tma:
        # descriptors made on the device lie in global memory; the setting is the calling thread's own
        triton.set_allocator(_workspace)
    start_kernel(
        kernel,
        grid,
        query,
        key,
        value,
        out,
        part.query_start,
        part.key_start,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *out.stride()[:2],
        num_heads // key.shape[1],
        window if windowed else 0,
        # the kernels' exponentials have base 2
        LOG2_E if softcap else scale * LOG2_E,
        2 * LOG2_E * scale / softcap if softcap else 0.0,
        softcap,
        D=head_dim,
        DP=_padded(head_dim),
        BM=tiles.rows,
        BN=tiles.keys,
        HAS_WINDOW=windowed,
        HAS_CAP=softcap != 0.0,
        CDT=DOT_DTYPES[query.dtype],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **own,
    )
    return out


@triton.jit
def _fold(acc, total, peak, scores, values, scale_log2, CDT: tl.constexpr, PRECISION: tl.constexpr):
    """Add one tile of keys to the running softmax: scores [BM, BN] are -inf where hidden."""
    # `peak` starts finite, so that a row that sees nothing of a tile gets 0 and not NaN
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(CDT), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def _hide(scores, positions, keys, window, HAS_WINDOW: tl.constexpr):
    """Set to -inf what a row may not see: later keys, and those older than the window."""
    # rows past the sequence's end see keys past it, which are read as 0: nobody reads such a row
    visible = keys[None, :] <= positions[:, None]
    if HAS_WINDOW:
        visible &= keys[None, :] > positions[:, None] - window
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _cap(scores, cap_in, cap):
    """cap * tanh(scores * cap_in / 2), in a form that large scores do not overflow."""
    return cap - 2 * cap / (tl.exp2(scores * cap_in) + 1)


@triton.jit
def _tile_of(query_start, key_start, window, BM: tl.constexpr, BN: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Which rows this program has, and which keys they see: counts, first row, first and last key."""
    seq = tl.program_id(1)
    first_query = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - first_query
    first_key = tl.load(key_start + seq)
    num_keys = tl.load(key_start + seq + 1) - first_key
    # the last tile sees most keys and starts first, so that no long one is left to run alone
    row = (tl.cdiv(num_queries, BM) - 1 - tl.program_id(2)) * BM
    # of its row 0: queries are the last tokens of their keys
    position = num_keys - num_queries + row
    stop = tl.minimum(num_keys, position + BM)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(0, position - window + 1) // BN * BN
    return first_query.to(tl.int64), first_key.to(tl.int64), num_queries, num_keys, row, position, start, stop


@triton.jit(do_not_specialize=["group_size", "window"])
def _plain_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, query_start, key_start,
    query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head,
    group_size, window, scale_log2, cap_in, cap,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, CDT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first_query, first_key, num_queries, num_keys, row, position, start, stop = _tile_of(
        query_start, key_start, window, BM, BN, HAS_WINDOW
    )
    if row < 0:
        return
    head = tl.program_id(0)
    kv_head = head // group_size
    rows, columns, dims = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, DP)
    query_ptr += (first_query + row) * query_token + head * query_head
    key_ptr += (first_key + start) * key_token + kv_head * key_head
    value_ptr += (first_key + start) * value_token + kv_head * value_head
    inside = (row + rows < num_queries)[:, None] & (dims < D)[None, :]
    query = tl.load(query_ptr + rows[:, None] * query_token + dims[None, :], mask=inside, other=0.0).to(CDT)
    key_offsets = columns[:, None] * key_token + dims[None, :]
    value_offsets = columns[:, None] * value_token + dims[None, :]

    peak = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    # tiles that every row sees in full need no mask; with a window all are masked
    masked = start
    if not HAS_WINDOW:
        masked = (position + 1) // BN * BN
        for _ in tl.range(0, masked, BN):
            if D == DP:
                key, value = tl.load(key_ptr + key_offsets), tl.load(value_ptr + value_offsets)
            else:
                key = tl.load(key_ptr + key_offsets, mask=(dims < D)[None, :], other=0.0)
                value = tl.load(value_ptr + value_offsets, mask=(dims < D)[None, :], other=0.0)
            scores = tl.dot(query, key.to(CDT).T, input_precision=PRECISION)
            if HAS_CAP:
                scores = _cap(scores, cap_in, cap)
            acc, total, peak = _fold(acc, total, peak, scores, value.to(CDT), scale_log2, CDT, PRECISION)
            key_ptr += BN * key_token
            value_ptr += BN * value_token
    for n in tl.range(masked, stop, BN):
        # rows past the end are another sequence's or nobody's: 0 * NaN would be NaN
        present = (n + columns < num_keys)[:, None] & (dims < D)[None, :]
        key = tl.load(key_ptr + key_offsets, mask=present, other=0.0).to(CDT)
        value = tl.load(value_ptr + value_offsets, mask=present, other=0.0).to(CDT)
        scores = tl.dot(query, key.T, input_precision=PRECISION)
        if HAS_CAP:
            scores = _cap(scores, cap_in, cap)
        scores = _hide(scores, position + rows, n + columns, window, HAS_WINDOW)
        acc, total, peak = _fold(acc, total, peak, scores, value, scale_log2, CDT, PRECISION)
        key_ptr += BN * key_token
        value_ptr += BN * value_token

    acc /= tl.where(total > 0, total, 1.0)[:, None]
    out_ptr += (first_query + row) * out_token + head * out_head
    tl.store(out_ptr + rows[:, None] * out_token + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["group_size", "window"])
def _tma_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, query_start, key_start,
    query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head,
    group_size, window, scale_log2, cap_in, cap,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, CDT: tl.constexpr,
):  # fmt: skip
    first_query, first_key, num_queries, num_keys, row, position, start, stop = _tile_of(
        query_start, key_start, window, BM, BN, HAS_WINDOW
    )
    if row >= 0:
        head = tl.program_id(0)
        kv_head = head // group_size
        # each descriptor ends where its sequence does: what is past it reads as 0 and is not written
        queries = tl.make_tensor_descriptor(
            query_ptr + first_query * query_token + head * query_head, [num_queries, D], [query_token, 1], [BM, DP]
        )
        keys = tl.make_tensor_descriptor(
            key_ptr + first_key * key_token + kv_head * key_head, [num_keys, D], [key_token, 1], [BN, DP]
        )
        values = tl.make_tensor_descriptor(
            value_ptr + first_key * value_token + kv_head * value_head, [num_keys, D], [value_token, 1], [BN, DP]
        )
        outs = tl.make_tensor_descriptor(
            out_ptr + first_query * out_token + head * out_head, [num_queries, D], [out_token, 1], [BM, DP]
        )
        query = queries.load([row, 0])
        positions = position + tl.arange(0, BM)
        columns = tl.arange(0, BN)

        peak = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        # tiles that every row sees in full need no mask; with a window all are masked
        masked = start
        if not HAS_WINDOW:
            masked = (position + 1) // BN * BN
            for n in tl.range(0, masked, BN):
                scores = tl.dot(query, keys.load([n, 0]).T)
                if HAS_CAP:
                    scores = _cap(scores, cap_in, cap)
                acc, total, peak = _fold(acc, total, peak, scores, values.load([n, 0]), scale_log2, CDT, "ieee")
        for n in tl.range(masked, stop, BN):
            scores = tl.dot(query, keys.load([n, 0]).T)
            if HAS_CAP:
                scores = _cap(scores, cap_in, cap)
            scores = _hide(scores, positions, n + columns, window, HAS_WINDOW)
            acc, total, peak = _fold(acc, total, peak, scores, values.load([n, 0]), scale_log2, CDT, "ieee")

        acc /= tl.where(total > 0, total, 1.0)[:, None]
        outs.store([row, 0], acc.to(out_ptr.dtype.element_ty))
