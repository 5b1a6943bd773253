"""The pass over shared prefixes on the GPU against float64, at real sizes, and in a graph."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.cascade_attention import cascade_layout, pack_prefixes
from kernels.decode_attention import PagedDecode, decode_attention, paged_decode_reference
from kernels.decode_parts import cut_sequences, make_parts, programs_of
from tests.support.numerics import assert_near
from tests.support.paged import PagedBatch, cut, paged_batch
from tests.support.shared import cascaded, share

FP8 = torch.float8_e4m3fn
# of 32 sequences 18 share 1,216 tokens, 9 share 640, and 5 nothing
NUM_SEQS, LONG, SHORT = 32, range(18), range(20, 29)


def batch_of(num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16) -> PagedBatch:
    torch.manual_seed(0)
    lengths = [1281 + 13 * row if row in LONG else 650 + row for row in range(NUM_SEQS)]
    lengths[0], lengths[19], lengths[24] = 1217, 1, 641
    return paged_batch(
        lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda"
    )


def with_pass(batch: PagedBatch, plain: PagedDecode, query: torch.Tensor) -> PagedDecode:
    """As the engine lays it out for these heads."""
    num_kv_heads, head_dim = batch.kv_cache.shape[2], query.shape[2]
    layout = cascade_layout(NUM_SEQS, query.shape[1], num_kv_heads, head_dim, batch.kv_cache.dtype)
    assert layout is not None
    return cascaded(plain, layout, share(batch, [(list(LONG), 1216), (list(SHORT), 640)]), head_dim)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_kv_heads", "group_size", "longest_part"),
    [
        (torch.bfloat16, 128, 8, 4, None),
        (torch.bfloat16, 128, 8, 4, 64),
        (torch.bfloat16, 64, 2, 7, None),
        (torch.bfloat16, 80, 3, 1, 64),
        (torch.bfloat16, 256, 1, 8, None),
        (torch.float16, 96, 1, 8, None),
        (torch.float16, 64, 8, 4, 64),
        (torch.float32, 64, 2, 7, None),
        (torch.float32, 128, 8, 4, None),
        (FP8, 128, 8, 4, None),
        (FP8, 64, 3, 1, 64),
    ],
    ids=str,
)
def test_equals_float64(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group_size: int, longest_part: int | None
) -> None:
    """
    In every dtype, whole and in parts behind the prefix.
    """
    batch = batch_of(num_kv_heads, head_dim, dtype)
    query_dtype = torch.bfloat16 if dtype == FP8 else dtype
    query = torch.randn(NUM_SEQS, num_kv_heads * group_size, head_dim, device="cuda").to(query_dtype)
    plain, scale = batch.plan(query.shape[1]), head_dim**-0.5
    plan = with_pass(batch, plain, query)
    if longest_part is not None:
        plan = cut(plan, query.shape[1], batch.kv_cache, longest_part)

    actual = decode_attention(query, batch.kv_cache, plan, scale, kv_scales=batch.kv_scales)

    expected = paged_decode_reference(query.double(), batch.kv_cache, plain, scale, kv_scales=batch.kv_scales)
    assert_near(expected, actual, None if batch.kv_scales is None else 1e-2)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_caps(dtype: torch.dtype, block_size: int) -> None:
    """
    A cap bends the scores of both kernels, in blocks of 32 too.
    """
    batch = batch_of(4, 128, dtype, block_size)
    query = 3 * torch.randn(NUM_SEQS, 16, 128, dtype=torch.bfloat16, device="cuda")
    plain = batch.plan(16)
    plan = with_pass(batch, plain, query)

    actual = decode_attention(query, batch.kv_cache, plan, 0.088, softcap=3.0, kv_scales=batch.kv_scales)

    expected = paged_decode_reference(
        query.double(), batch.kv_cache, plain, 0.088, softcap=3.0, kv_scales=batch.kv_scales
    )
    assert_near(expected, actual, 1e-2 if dtype == FP8 else None)


def test_a_graph_follows_the_prefixes() -> None:
    """
    A captured step is replayed for others who share, then for nobody who does.
    """
    batch = batch_of(2, 128, torch.bfloat16)
    query = torch.randn(NUM_SEQS, 8, 128, dtype=torch.bfloat16, device="cuda")
    plain = batch.plan(8)
    plan = with_pass(batch, plain, query)
    layout = cascade_layout(NUM_SEQS, 8, 2, 128, torch.bfloat16)
    assert layout is not None
    numbers = np.zeros(layout.num_numbers, dtype=np.int32)
    sent = torch.zeros(layout.num_numbers, dtype=torch.int32, device="cuda")
    programs = programs_of(8, 2, 128, torch.bfloat16)
    parts = make_parts(NUM_SEQS, programs, 8, 128, query.device)
    empty = replace(cascaded(plain, layout, [], 128), parts=parts)
    assert plan.cascade is not None
    assert empty.cascade is not None
    sections = {name: getattr(empty.cascade, name) for name in layout.sections}

    def step() -> torch.Tensor:
        cut_sequences(parts, empty.seq_lens, None, programs, empty.cascade)
        return decode_attention(query, batch.kv_cache, empty, 0.088)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    expected = paged_decode_reference(query.double(), batch.kv_cache, plain, 0.088)

    prefixes = share(batch, [(list(SHORT), 640), (list(LONG)[4:], 1216)])
    for shared in (prefixes, prefixes[:1], []):
        pack_prefixes(layout, shared, NUM_SEQS, numbers)
        sent.copy_(torch.from_numpy(numbers))
        for name, section in sections.items():
            section.copy_(sent[layout.sections[name]].view(section.shape))
        graph.replay()

        assert_near(expected, out)
