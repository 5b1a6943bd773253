"""Decode attention that rotates and stores the newest tokens, on the GPU, at real sizes."""

import pytest
import torch

from kernels.cuda.decode_attention import launch
from kernels.cuda.rope import rope_and_store_triton
from kernels.decode_attention import decode_attention, paged_decode_reference
from kernels.decode_parts import cut_sequences, make_parts, programs_of
from kernels.newest_token import NewestTokens, rotate_and_attend
from tests.support.newest import NewestCase, newest_case
from tests.support.numerics import assert_near

SEQ_LENS = [1, 15, 16, 17, 64, 65, 255, 1000, 2049, 640]


def check(case: NewestCase, actual: torch.Tensor, kv_cache: torch.Tensor, window: int | None, softcap: float) -> None:
    """
    Args:
        kv_cache: As it was before.
    """
    query, _, _ = rope_and_store_triton(*case.inputs(kv_cache), case.num_heads)
    assert torch.equal(kv_cache.nan_to_num(6e4), case.kv_cache.nan_to_num(6e4))
    plan = case.batch.plan(case.num_heads, window)
    expected = paged_decode_reference(query.double(), kv_cache, plan, case.scale, softcap=softcap)
    assert_near(expected, actual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(8, 4), (2, 7), (3, 1), (1, 8), (1, 14)])
def test_equals_rotation_then_attention(dtype: torch.dtype, head_dim: int, num_kv_heads: int, group_size: int) -> None:
    """
    What is attended; and the cache has the bits that the rotation alone leaves, in parts and whole.
    """
    for longest_part in (None, 64):
        case = newest_case(SEQ_LENS, num_kv_heads, group_size, head_dim, 16, dtype, "cuda")
        before = case.kv_cache.clone()
        plan = case.batch.plan(case.num_heads, None, longest_part)

        actual = rotate_and_attend(*case.inputs(case.kv_cache), plan, case.num_heads, case.scale)

        check(case, actual, before, None, 0.0)


@pytest.mark.parametrize("longest_part", [None, 64, 1024])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_windows_and_caps(longest_part: int | None, window: int | None, softcap: float) -> None:
    """
    The newest token is in every window, and its score is capped too, in blocks of 32.
    """
    case = newest_case(SEQ_LENS, 4, 4, 128, 32, torch.bfloat16, "cuda")
    before = case.kv_cache.clone()
    plan = case.batch.plan(case.num_heads, window, longest_part)

    actual = rotate_and_attend(*case.inputs(case.kv_cache), plan, case.num_heads, case.scale, softcap=softcap)

    check(case, actual, before, window, softcap)


@pytest.mark.parametrize("streams", [(16, 4, 1, 4), (32, 2, 2, 4), (16, 1, 2, 2), (32, 1, 1, 1), (128, 1, 1, 8)])
@pytest.mark.parametrize("stages", [3, 5, 7])
def test_streams(streams: tuple[int, int, int, int], stages: int) -> None:
    """
    However tokens and heads are dealt out to warps, one stream of each head has the newest token.
    """
    case = newest_case(SEQ_LENS, 2, 7, 64, 16, torch.bfloat16, "cuda")
    before = case.kv_cache.clone()
    config = dict(zip(("tile", "slices", "heads", "warps"), streams, strict=True)) | {"stages": stages}
    newest = NewestTokens(case.rotation, case.slot_mapping)

    actual = launch(case.query, case.kv_cache, case.batch.plan(14), case.scale, 0.0, None, config, newest=newest)

    check(case, actual, before, None, 0.0)


@pytest.mark.parametrize("num_seqs", [1, 32, 64, 65, 300])
@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_dim"), [(2, 7, 64), (8, 4, 128)])
def test_many_sequences_in_a_graph(num_seqs: int, num_kv_heads: int, group_size: int, head_dim: int) -> None:
    """
    As a step runs it: cut on the device, replayed over the same buffers, with a row of padding.
    """
    lengths = torch.randint(1, 3000, (num_seqs,), generator=torch.Generator().manual_seed(num_seqs)).tolist()
    case = newest_case(lengths, num_kv_heads, group_size, head_dim, 16, torch.bfloat16, "cuda")
    if num_seqs > 1:
        case.slot_mapping[-1], case.batch.seq_lens[-1], case.batch.slots[-1] = -1, 1, 0
    before = case.kv_cache.clone()
    programs = programs_of(case.num_heads, num_kv_heads, head_dim, torch.bfloat16)
    parts = make_parts(num_seqs, programs, case.num_heads, head_dim, case.qkv.device)
    plan = case.batch.plan(case.num_heads)
    plan = type(plan)(plan.block_tables, plan.slots, plan.seq_lens, None, parts)
    inputs = case.inputs(case.kv_cache)

    def step() -> torch.Tensor:
        cut_sequences(parts, plan.seq_lens, None, programs)
        return rotate_and_attend(*inputs, plan, case.num_heads, case.scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    case.kv_cache.copy_(before)
    out.fill_(torch.nan)
    graph.replay()

    assert 0 == parts.arrivals.count_nonzero()
    query, _, _ = rope_and_store_triton(*case.inputs(before), case.num_heads)
    assert torch.equal(before.nan_to_num(6e4), case.kv_cache.nan_to_num(6e4))
    assert_near(decode_attention(query, before, plan, case.scale).double(), out)


def test_what_is_not_finite_stays_with_its_head() -> None:
    """
    A query of one head; and a row of padding, whatever lies there, gives zeros.
    """
    case = newest_case([40, 0], 2, 4, 64, 16, torch.float16, "cuda")
    case.slot_mapping[1] = -1
    case.qkv[0].view(-1, 64)[1] = torch.nan
    case.qkv[1] = torch.inf

    plan = case.batch.plan(case.num_heads, None)
    out = rotate_and_attend(*case.inputs(case.kv_cache), plan, case.num_heads, case.scale)

    assert [1] == out[0].isnan().any(-1).nonzero().flatten().tolist()
    assert 0 == out[1].count_nonzero()
