"""How many blocks fit, and how they lie in memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.cuda.kv_cache import CudaKVCache
from engine.errors import NotEnoughMemory
from engine.kv_cache import CacheShape, KVCache, bytes_per_block
from engine.model.config import ModelConfig

CONFIG = ModelConfig.parse(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
)
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4


def fit(**options: Any) -> CacheShape:
    settings = {"cache_bytes": 6 * BLOCK_BYTES, "host_bytes": 2 * BLOCK_BYTES + 1, "max_model_len": 64} | options
    return CacheShape.fit(CONFIG, block_size=16, dtype=torch.float32, **settings)


def test_blocks_fill_the_memory() -> None:
    """
    As many whole blocks as fit; the null block is one of them and holds no token.
    """
    assert BLOCK_BYTES == bytes_per_block(CONFIG, block_size=16, dtype=torch.float32)

    shape = fit()

    assert (6, 2, 80) == (shape.num_blocks, shape.num_host_blocks, shape.num_tokens)


def test_too_little_for_one_sequence_says_how_much_is_needed() -> None:
    """
    The message has the tokens that fit, those that are wanted, and the settings to change.
    """
    assert 5 == fit(cache_bytes=5 * BLOCK_BYTES).num_blocks

    with pytest.raises(NotEnoughMemory, match=r"holds 48 tokens.* max_model_len 64 .*kv_cache_bytes"):
        fit(cache_bytes=5 * BLOCK_BYTES - 1)


def test_memory_runs_token_by_token() -> None:
    """
    A layer is [2, blocks, heads, block size, head dim], and a block's tokens are one run of memory.
    """
    cache = KVCache(fit())

    assert 3 == len(cache.layers) == len(cache.host_pools)
    layer = cache.layers[0]
    assert (2, 6, 2, 16, 16) == layer.shape
    assert layer.transpose(2, 3).is_contiguous()
    assert 2 == cache.host_pools[0].shape[1]


def test_blocks_of_eight_bits_have_their_scales_behind_them() -> None:
    """
    A float32 for each token and head counts, up to a multiple of 64 bytes.
    """
    sizes = [bytes_per_block(CONFIG, block_size=size, dtype=torch.float8_e4m3fn) for size in (16, 4, 1)]

    assert [2 * 3 * (2 * 16 * (16 + 4)), 2 * 3 * 192, 2 * 3 * 64] == sizes


@pytest.mark.parametrize("on_gpu", [False, True])
def test_scales_are_of_the_memory_of_their_block(on_gpu: bool) -> None:
    """
    What is copied in a swap has the numbers and the scales of a block, and of no other one.
    """
    shape = replace(fit(), dtype=torch.float8_e4m3fn)
    cache = CudaKVCache(shape, torch.device("cpu")) if on_gpu else KVCache(shape)
    assert cache.scales is not None
    layer, scales, pool = cache.layers[1], cache.scales[1], cache.pools[1]
    assert ((2, 6, 2, 16, 16), (2, 6, 2, 16)) == (layer.shape, scales.shape)
    assert 0 == int(pool[:, 0].count_nonzero())
    pool.zero_()

    layer.view(torch.uint8)[0, 3, 1] = 255
    scales[1, 4, :, 7] = -1.0

    assert [[0, 3], [1, 4]] == pool.view(torch.uint8).flatten(2).any(-1).nonzero().tolist()
    assert 16 * 16 == int(pool[0, 3].count_nonzero())
    assert layer.stride(4) == 1
    assert 0 == pool.nbytes % (2 * 6 * 64)
