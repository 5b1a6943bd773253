"""Builds an engine from its settings; the only place that knows all of its parts."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.block_manager import BlockManager
from engine.config import GIB, EngineConfig, ResolvedConfig
from engine.errors import ModelNotFound, NotEnoughMemory, StartupError
from engine.fingerprint import fingerprint
from engine.gpu import cache_dtype, compute_dtype, pick_device
from engine.gpu_memory import GPU_COPY_BYTES_PER_S, GPU_PREFILL_FLOPS, GPU_READ_BYTES_PER_S
from engine.grammar_compiler import GrammarCompiler
from engine.kv_cache import CacheShape, KVCache, bytes_per_block
from engine.llm_engine import LLMEngine
from engine.memory import available_bytes
from engine.model.config import ModelConfig, eos_token_ids
from engine.model.loader import load_model
from engine.model_runner import ModelRunner
from engine.output import OutputProcessor
from engine.pacing import is_worthwhile
from engine.policy import PreemptionPolicy
from engine.prefix import blake2b_128, xxh3_128
from engine.queue_policy import queue_policy
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.state import SamplingState
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.cuda.model_runner import CudaModelRunner

# what two cores compute of a prompt, what one copies between two places of its memory, and what both read of it
_CPU_PREFILL_FLOPS = 5e10
_CPU_COPY_BYTES_PER_S = 5e9
_CPU_READ_BYTES_PER_S = 12e9


@dataclass(frozen=True, slots=True)
class _Parts:
    """What both kinds of runner are made of."""

    config: ResolvedConfig
    model: ModelConfig
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def load_engine(config: EngineConfig) -> LLMEngine:
    """
    Load a model and make it ready to run.

    Raises:
        ModelNotFound, UnknownArchitecture, WeightsMismatch: the model folder is at fault.
        NotEnoughMemory: one sequence of max_model_len does not fit the KV cache.
        NoGPU, DriverTooOld, GPUTooOld: the device cannot be used, or not for what is asked.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = pick_device(config.device)
    limits = config.resolved(device.type)
    path = config.model
    if not (path / "config.json").is_file():
        raise ModelNotFound(
            f'there is no config.json in "{path}": give a model folder, or fetch one with `pagemill models pull`'
        )
    model_config = ModelConfig.load(path)
    dtype = compute_dtype(config.dtype, model_config.dtype, device)
    kv_dtype = cache_dtype(config.kv_cache_dtype, dtype, device)
    max_model_len = _max_model_len(config, model_config)

    tokenizer = _load_tokenizer(path, config)
    ends = eos_token_ids(path)
    vocab_size = min(model_config.vocab_size, tokenizer.vocab_size) if tokenizer else model_config.vocab_size

    parts = _Parts(limits, model_config, dtype, kv_dtype, max_model_len, vocab_size, ends)
    on_gpu = device.type == "cuda"
    runner: CudaModelRunner | ModelRunner = _cuda_runner(parts, device) if on_gpu else _cpu_runner(parts)
    return LLMEngine(
        scheduler=Scheduler(
            _blocks(config, runner.kv_cache.shape),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=max_model_len,
            preemption=_preemption(parts, on_gpu=on_gpu),
            policy=queue_policy(config.policy, paced=_paced(parts, on_gpu=on_gpu)),
        ),
        runner=runner,
        outputs=OutputProcessor(tokenizer, ends, max_model_len),
        tokenizer=tokenizer,
        vocab_size=model_config.vocab_size,
        model_name=path.name,
        # one that was made before the setting existed stays right
        fingerprint=fingerprint(path, str(dtype), config.load_format, *["fp8 cache"] * (kv_dtype != dtype)),
        depth=2 if on_gpu else 1,
        grammars=GrammarCompiler(partial(tokenizer.token_bytes, vocab_size), ends) if tokenizer else None,
    )


def _cpu_runner(parts: _Parts) -> ModelRunner:
    config = parts.config
    # what is free before the weights are read counts less than what is free after
    model, _ = load_model(
        config.model, dtype=parts.dtype, max_model_len=parts.max_model_len, load_format=config.load_format
    )
    shape = _fit(config, parts.model, parts.cache_dtype, parts.max_model_len)
    state = SamplingState(
        max_num_seqs=config.max_num_seqs, vocab_size=parts.vocab_size, eos_token_ids=parts.eos_token_ids
    )
    return ModelRunner(model, KVCache(shape), Sampler(state, parts.vocab_size), state)


def _cuda_runner(parts: _Parts, device: torch.device) -> "CudaModelRunner":
    # its kernels are Triton's, which machines without a GPU need not have
    from engine.cuda.build import build_runner, load_on_gpu

    config = parts.config
    model = load_on_gpu(
        config.model, config, parts.model, dtype=parts.dtype, max_model_len=parts.max_model_len, device=device
    )
    return build_runner(
        model,
        config,
        cache_dtype=parts.cache_dtype,
        vocab_size=parts.vocab_size,
        eos_token_ids=parts.eos_token_ids,
        max_model_len=parts.max_model_len,
        device=device,
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


def _preemption(parts: _Parts, *, on_gpu: bool) -> PreemptionPolicy:
    model, block_size = parts.model, parts.config.block_size
    return PreemptionPolicy(
        parts.config.preemption,
        bytes_per_token=bytes_per_block(model, block_size=block_size, dtype=parts.cache_dtype) // block_size,
        copy_bytes_per_s=GPU_COPY_BYTES_PER_S if on_gpu else _CPU_COPY_BYTES_PER_S,
        prefill_tokens_per_s=(GPU_PREFILL_FLOPS if on_gpu else _CPU_PREFILL_FLOPS) / (2 * model.layer_weights),
    )


def _paced(parts: _Parts, *, on_gpu: bool) -> bool:
    num_bytes = parts.model.step_weights * parts.dtype.itemsize
    return is_worthwhile(num_bytes / (GPU_READ_BYTES_PER_S if on_gpu else _CPU_READ_BYTES_PER_S))
