"""Builds an engine from its settings; the only place that knows all of its parts."""

from pathlib import Path

import torch

from engine.block_manager import BlockManager
from engine.config import GIB, EngineConfig
from engine.errors import ModelNotFound, NotEnoughMemory, StartupError
from engine.fingerprint import fingerprint
from engine.kv_cache import CacheShape, KVCache, bytes_per_block
from engine.llm_engine import LLMEngine
from engine.memory import available_bytes
from engine.model.config import ModelConfig, eos_token_ids
from engine.model.loader import load_model
from engine.model_runner import ModelRunner
from engine.output import OutputProcessor
from engine.policy import PreemptionPolicy
from engine.prefix import blake2b_128, xxh3_128
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.state import SamplingState
from engine.tokenizer import Tokenizer

# what two cores compute of a prompt, and what one copies between two places of its memory
_CPU_PREFILL_FLOPS = 5e10
_CPU_COPY_BYTES_PER_S = 5e9


def load_engine(config: EngineConfig) -> LLMEngine:
    """
    Load a model and make it ready to run.

    Raises:
        ModelNotFound, UnknownArchitecture, WeightsMismatch: the model folder is at fault.
        NotEnoughMemory: one sequence of max_model_len does not fit the KV cache.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    path = config.model
    if not (path / "config.json").is_file():
        raise ModelNotFound(
            f'there is no config.json in "{path}": give a model folder, or fetch one with `pagemill models pull`'
        )
    model_config = ModelConfig.load(path)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    max_model_len = _max_model_len(config, model_config)

    # what is free before the weights are read counts less than what is free after
    model, _ = load_model(path, dtype=dtype, max_model_len=max_model_len, load_format=config.load_format)
    tokenizer = _load_tokenizer(path, config)
    shape = _fit(config, model_config, dtype, max_model_len)
    ends = eos_token_ids(path)
    vocab_size = min(model_config.vocab_size, tokenizer.vocab_size) if tokenizer else model_config.vocab_size
    state = SamplingState(max_num_seqs=config.max_num_seqs, vocab_size=vocab_size, eos_token_ids=ends)
    return LLMEngine(
        scheduler=Scheduler(
            _blocks(config, shape),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            preemption=_preemption(config, model_config, bytes_per_block(model_config, block_size=1, dtype=dtype)),
        ),
        runner=ModelRunner(model, KVCache(shape), Sampler(state, vocab_size), state),
        outputs=OutputProcessor(tokenizer, ends, max_model_len),
        tokenizer=tokenizer,
        vocab_size=model_config.vocab_size,
        model_name=path.name,
        fingerprint=fingerprint(path, str(dtype), config.load_format),
    )


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    if config.max_model_len is None:
        return model_config.max_positions
    if config.max_model_len > model_config.max_positions:
        raise StartupError(
            f"max_model_len is {config.max_model_len:,} and the model was made for {model_config.max_positions:,} "
            "positions: lower max_model_len"
        )
    return config.max_model_len


def _load_tokenizer(path: Path, config: EngineConfig) -> Tokenizer | None:
    # shapes without weights have no vocabulary either
    if config.load_format == "dummy" and not (path / "tokenizer.json").is_file():
        return None
    return Tokenizer(path)


def _fit(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_model_len: int) -> CacheShape:
    free = available_bytes()
    cache_bytes = config.kv_cache_bytes if config.kv_cache_bytes is not None else min(free // 4, 2 * GIB)
    host_bytes = config.swap_space_bytes if config.swap_space_bytes is not None else min(free // 10, GIB)
    if config.preemption == "recompute":
        # nothing would ever be swapped out
        host_bytes = 0
    if cache_bytes + host_bytes > free:
        raise NotEnoughMemory(
            f"kv_cache_bytes is {cache_bytes / GIB:,.1f} GiB and swap_space_bytes {host_bytes / GIB:,.1f} GiB, and "
            f"{free / GIB:,.1f} GiB of memory are free beside the model: lower them"
        )
    return CacheShape.fit(
        model,
        block_size=config.block_size,
        dtype=dtype,
        cache_bytes=cache_bytes,
        host_bytes=host_bytes,
        max_model_len=max_model_len,
    )


def _blocks(config: EngineConfig, shape: CacheShape) -> BlockManager:
    return BlockManager(
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        num_host_blocks=shape.num_host_blocks,
        prefix_caching=config.prefix_caching,
        hash_function=blake2b_128 if config.shared_tenants else xxh3_128,
    )


def _preemption(config: EngineConfig, model: ModelConfig, bytes_per_token: int) -> PreemptionPolicy:
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    flops_per_token = 2 * model.num_layers * (attention + mlp)
    return PreemptionPolicy(
        config.preemption,
        bytes_per_token=bytes_per_token,
        copy_bytes_per_s=_CPU_COPY_BYTES_PER_S,
        prefill_tokens_per_s=_CPU_PREFILL_FLOPS / flops_per_token,
    )
