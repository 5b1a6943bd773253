"""Decode attention on the GPU against float64, at real sizes."""

from dataclasses import replace

import pytest
import torch

from kernels.cuda.decode_attention import launch
from kernels.decode_attention import decode_attention, paged_decode_reference
from kernels.decode_parts import cut_sequences, make_parts, programs_of
from tests.support.numerics import assert_near
from tests.support.paged import PagedBatch, paged_batch

FP8 = torch.float8_e4m3fn
SEQ_LENS = [1, 15, 16, 17, 255, 1000, 2049, 640]


def batch_of(num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16) -> PagedBatch:
    torch.manual_seed(0)
    return paged_batch(
        SEQ_LENS, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda"
    )


def check(
    batch: PagedBatch, query: torch.Tensor, window: int | None, longest_part: int | None, softcap: float = 0.0
) -> None:
    plan, scale = batch.plan(query.shape[1], window, longest_part), query.shape[2] ** -0.5

    actual = decode_attention(query, batch.kv_cache, plan, scale, softcap=softcap, kv_scales=batch.kv_scales)

    expected = paged_decode_reference(
        query.double(), batch.kv_cache, plan, scale, softcap=softcap, kv_scales=batch.kv_scales
    )
    assert_near(expected, actual, None if batch.kv_scales is None else 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(8, 4), (2, 7), (3, 1), (1, 8)])
def test_equals_float64(dtype: torch.dtype, head_dim: int, num_kv_heads: int, group_size: int) -> None:
    """
    In every dtype, in parts and whole.
    """
    batch = batch_of(num_kv_heads, head_dim, dtype)
    query_dtype = torch.bfloat16 if dtype == FP8 else dtype
    query = torch.randn(len(SEQ_LENS), num_kv_heads * group_size, head_dim, device="cuda").to(query_dtype)

    for longest_part in (None, 128):
        check(batch, query, None, longest_part)


@pytest.mark.parametrize("longest_part", [None, 64, 1024])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_windows_and_caps(longest_part: int | None, window: int | None, softcap: float) -> None:
    """
    A window hides what is older, and a cap bends the scores, in blocks of 32 too.
    """
    batch = batch_of(4, 128, torch.bfloat16, block_size=32)
    query = 3 * torch.randn(len(SEQ_LENS), 16, 128, dtype=torch.bfloat16, device="cuda")

    check(batch, query, window, longest_part, softcap)


@pytest.mark.parametrize("streams", [(16, 4, 1, 4), (32, 2, 2, 4), (16, 1, 2, 2), (32, 1, 1, 1), (128, 1, 1, 8)])
@pytest.mark.parametrize("stages", [3, 5, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_streams(streams: tuple[int, int, int, int], stages: int, dtype: torch.dtype) -> None:
    """
    However tokens and heads are dealt out to warps, the result is the same.
    """
    batch = batch_of(2, 64, dtype)
    query = torch.randn(len(SEQ_LENS), 14, 64, dtype=torch.bfloat16, device="cuda")
    plan = batch.plan(14)
    config = dict(zip(("tile", "slices", "heads", "warps"), streams, strict=True)) | {"stages": stages}

    actual = launch(query, batch.kv_cache, plan, 0.125, 0.0, batch.kv_scales, config)

    expected = paged_decode_reference(query.double(), batch.kv_cache, plan, 0.125, kv_scales=batch.kv_scales)
    assert_near(expected, actual, 1e-2 if dtype == FP8 else None)


def test_a_graph_follows_the_lengths() -> None:
    """
    A captured step is replayed for other lengths and other slots: it cuts them anew.
    """
    batch = batch_of(2, 128, torch.bfloat16)
    query = torch.randn(len(SEQ_LENS), 8, 128, dtype=torch.bfloat16, device="cuda")
    programs = programs_of(8, 2, 128, torch.bfloat16)
    parts = make_parts(len(SEQ_LENS), programs, 8, 128, query.device)
    plan = replace(batch.plan(8), parts=parts)

    def step() -> torch.Tensor:
        cut_sequences(parts, batch.seq_lens, None, programs)
        return decode_attention(query, batch.kv_cache, plan, 0.088)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    before = parts.items.tolist()

    batch.seq_lens.copy_(batch.seq_lens.flip(0))
    batch.slots.copy_(batch.slots.flip(0))
    graph.replay()

    assert before != parts.items.tolist()
    assert 0 == parts.arrivals.count_nonzero()
    assert_near(paged_decode_reference(query.double(), batch.kv_cache, plan, 0.088), out)


@pytest.mark.parametrize("num_seqs", [1, 33, 1024])
def test_cutting_equals_the_reference(num_seqs: int) -> None:
    """
    One program finds the parts of all sequences.
    """
    torch.manual_seed(0)
    lengths = torch.randint(1, 8192, (num_seqs,), dtype=torch.int32)
    expected, actual = (make_parts(num_seqs, 4, 8, 64, torch.device(kind)) for kind in ("cpu", "cuda"))

    cut_sequences(actual, lengths.cuda(), 4096, 4)

    cut_sequences(expected, lengths, 4096, 4)
    for name in ("items", "shares", "firsts"):
        assert torch.equal(getattr(expected, name), getattr(actual, name).cpu()), name
