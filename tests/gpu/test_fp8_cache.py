"""
Keys and values in eight bits on the card: near the CPU's answers, and nearer than those without rounding.

A difference in the last bit can move a number to the next of float8's steps, so that no two orders of
sums need to agree to the last token; and a GPU attends in float16 there. What must hold is that scales,
blocks and rounding are those of the CPU: without any of them answers are far off.
"""

import pytest
import torch

from engine.cuda.kv_cache import CudaKVCache
from engine.cuda.model_runner import CudaModelRunner
from engine.kv_cache import CacheShape
from engine.llm_engine import LLMEngine
from engine.request import BlockCopy
from kernels.decode_attention import decode_attention, paged_decode_reference
from kernels.fp8_kv import quantise_kv
from kernels.gather_kv import gather_kv
from tests.support.answers import answer_differences, make_greedy_requests, run_all
from tests.support.card_engine import MODELS, Load, loader, small_cache
from tests.support.numerics import assert_near
from tests.support.paged import paged_batch
from tests.support.tiny_models import save_calm_model

FLOAT8 = torch.float8_e4m3fn

# of log-probabilities; noise of 1e-5 in keys and values gives half of the first, and of 1e-3 the second
MEAN_OF_PROMPTS, MEAN_OF_ANSWERS = 0.004, 0.01


@pytest.fixture(scope="module", params=MODELS)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    return loader(save_calm_model, request.param, tmp_path_factory.mktemp("model"), kv_cache_dtype="fp8")


def assert_near_answers(engine: LLMEngine, other: LLMEngine, seed: int) -> None:
    requests = make_greedy_requests(seed)
    prompts, answers = answer_differences(run_all(engine, requests), run_all(other, requests))
    assert prompts <= MEAN_OF_PROMPTS
    assert answers <= MEAN_OF_ANSWERS


def test_answers_are_near_those_of_the_cpu(load: Load) -> None:
    """
    Prompts in chunks behind prefixes in eight bits, then decodes in graphs.
    """
    assert_near_answers(load("cpu"), load(), seed=4)


def test_rounding_is_seen(load: Load) -> None:
    """
    The CPU's answers with eight bits are nearer than the card's own without.
    """
    requests = make_greedy_requests(seed=5)
    expected = run_all(load("cpu"), requests)

    rounded = answer_differences(expected, run_all(load(), requests))
    plain = answer_differences(expected, run_all(load(kv_cache_dtype="auto"), requests))

    assert rounded[0] < plain[0] / 2


def test_graphs_change_nothing_that_counts(load: Load) -> None:
    """
    The scales are read and written where a captured step left them.
    """
    assert_near_answers(load(cuda_graphs=False), load(), seed=6)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_changes_nothing_that_counts(load: Load, mode: str) -> None:
    """
    Blocks come back from pinned memory with their scales, or are rounded as before.
    """
    engine = small_cache(load, preemption=mode)

    assert_near_answers(load("cpu"), engine, seed=7)
    assert engine.stats().num_preemptions


def test_the_memory_holds_more(load: Load) -> None:
    """
    Heads of 8 or 16 numbers in float32 have 2.7 to 3.2 times the tokens; what is found out agrees with what is there.
    """
    engine, plain = load(), load(kv_cache_dtype="auto")
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    shape = runner.kv_cache.shape

    assert shape.num_blocks * shape.num_layers == sum(pool.nbytes for pool in runner.kv_cache.pools) // (
        2 * shape.part_bytes
    )
    assert engine.kv_tokens is not None
    assert plain.kv_tokens is not None
    assert 2.6 < engine.kv_tokens / plain.kv_tokens < 3.3


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(8, 128, 16), (2, 64, 16), (1, 64, 1)])
def test_swaps_bring_numbers_and_scales_back(num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """
    Bit by bit, into other blocks, by DMA through pinned memory.
    """
    shape = CacheShape(
        num_layers=3,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=40,
        num_host_blocks=30,
        dtype=FLOAT8,
    )
    cache = CudaKVCache(shape, torch.device("cuda", 0))
    assert cache.scales is not None
    for layer, scales in zip(cache.layers, cache.scales, strict=True):
        numbers, sizes = quantise_kv(torch.randn(layer.shape, device="cuda"))
        layer.copy_(numbers)
        scales.copy_(sizes)
    layers, scales = ([part.double() for part in parts] for parts in (cache.layers, cache.scales))

    cache.swap([BlockCopy(block, block - 5) for block in range(10, 35)], [])
    for pool in cache.pools:
        pool[:, 1:] = 0
    cache.swap([], [BlockCopy(39 - place, 5 + place) for place in range(25)])

    for before, after in ((layers, cache.layers), (scales, cache.scales)):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one[:, 10:35], other.double()[:, torch.arange(39, 14, -1, device="cuda")])


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(8, 128), (2, 64), (3, 64), (1, 128)])
def test_kernels_read_blocks_with_scales_between(num_kv_heads: int, head_dim: int) -> None:
    """
    Decode attention and the gather of prefixes, over blocks that are not adjacent memory.
    """
    torch.manual_seed(0)
    options = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 16}
    batch = paged_batch([1, 700, 33, 16], dtype=FLOAT8, device="cuda", **options)
    assert batch.kv_scales is not None
    shape = CacheShape(num_layers=1, num_blocks=batch.kv_cache.shape[1], num_host_blocks=0, dtype=FLOAT8, **options)
    cache = CudaKVCache(shape, torch.device("cuda", 0))
    assert cache.scales is not None
    kv_cache, kv_scales = cache.layers[0], cache.scales[0]
    kv_cache.view(torch.uint8).copy_(batch.kv_cache.view(torch.uint8))
    kv_scales.copy_(batch.kv_scales)
    query = torch.randn(4, 4 * num_kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    plan = batch.plan(4 * num_kv_heads, longest_part=256)
    key_start = torch.tensor([0, 1, 701, 734, 750], dtype=torch.int32, device="cuda")

    attended = decode_attention(query, kv_cache, plan, 0.1, kv_scales=kv_scales)
    gathered = gather_kv(kv_cache, batch.block_tables, batch.slots, key_start, 750, kv_scales, torch.bfloat16)

    expected = paged_decode_reference(query.double(), batch.kv_cache, plan, 0.1, kv_scales=batch.kv_scales)
    assert_near(expected, attended, 1e-2)
    packed = gather_kv(batch.kv_cache, batch.block_tables, batch.slots, key_start, 750, batch.kv_scales, torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(packed, gathered, strict=True))
