"""Brings up a model on a GPU: weights, a trial step, the KV cache in what is left, graphs."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import ResolvedConfig
from engine.cuda.cascade import CascadeGate
from engine.cuda.graphs import Sampling, cascade_sizes, graph_sizes
from engine.cuda.kv_cache import CudaKVCache
from engine.cuda.model_runner import CudaModelRunner
from engine.cuda.plan import MAX_GATHERED_KEYS
from engine.cuda.prefill_graphs import PrefillShape, prefill_shapes
from engine.gpu_memory import (
    MemorySnapshot,
    SequenceNeed,
    check_weights_fit,
    explained,
    graph_memory,
    kv_budget,
    memory_use,
    reset_peak,
    snapshot,
    swap_space,
    weight_bytes,
)
from engine.kv_cache import CacheShape, bytes_per_block
from engine.memory import available_bytes
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from engine.sampler import Sampler
from engine.state import SamplingState
from kernels.cuda.copy_blocks import BOUNCE_BYTES

# graphs that are captured on trial, to know what all of them take
_TRIAL_GRAPHS = 4
# cuBLAS takes it anew in the thread that will run the steps (32 MiB on Hopper, its largest)
_WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class CudaModel:
    """Weights on a GPU, and what its memory was before they came."""

    decoder: Decoder
    start: MemorySnapshot


def load_on_gpu(
    path: Path,
    config: ResolvedConfig,
    model_config: ModelConfig,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
) -> CudaModel:
    """
    Load the weights, after a look at whether they will fit.

    Raises:
        NotEnoughMemory: they do not.
    """
    # what an earlier engine of this process left in torch's cache is no use of others
    reset_peak(device)
    start = snapshot(device)
    check_weights_fit(weight_bytes(model_config, dtype), start, config.gpu_memory_utilization)
    with explained("loading the weights", "end other processes on this GPU", device):
        decoder, _ = load_model(
            path, dtype=dtype, max_model_len=max_model_len, load_format=config.load_format, device=device
        )
    return CudaModel(decoder, start)


def build_runner(
    model: CudaModel,
    config: ResolvedConfig,
    *,
    cache_dtype: torch.dtype,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    device: torch.device,
) -> CudaModelRunner:
    """
    Measure what steps take, give the rest of the GPU's share to the KV cache, and capture the graphs.

    Raises:
        NotEnoughMemory: one sequence of max_model_len does not fit what is left.
    """
    decoder = model.decoder
    state = SamplingState(
        max_num_seqs=config.max_num_seqs + 1, vocab_size=vocab_size, eos_token_ids=eos_token_ids, device=device
    )
    runner = CudaModelRunner(
        decoder,
        CudaKVCache(_trial_shape(decoder, config, cache_dtype), device),
        Sampler(state, vocab_size),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        cascade=_cascade_gate(config),
    )
    host_bytes = swap_space(config.swap_space_bytes, available_bytes(), config.preemption)
    later = _WORKSPACE_BYTES + (BOUNCE_BYTES if host_bytes else 0)
    cache_bytes = _measure(model, runner, config, max_model_len, device, later=later)
    shape = CacheShape.fit(
        decoder.config,
        block_size=config.block_size,
        dtype=cache_dtype,
        cache_bytes=cache_bytes,
        host_bytes=host_bytes,
        max_model_len=max_model_len,
    )
    with explained("making the KV cache", "lower gpu_memory_utilization or swap_space_bytes", device):
        runner.kv_cache = CudaKVCache(shape, device)
    if config.cuda_graphs:
        with explained("capturing the CUDA graphs", "lower max_num_seqs, or set cuda_graphs to false", device):
            seqs = config.max_num_seqs
            runner.capture_graphs(graph_sizes(seqs), cascade_sizes(seqs), _prefill_shapes(runner, config))
    return runner


def _cascade_gate(config: ResolvedConfig) -> CascadeGate | None:
    # without the prefix cache no two sequences have a block in common
    if not (config.cascade and config.prefix_caching):
        return None
    return CascadeGate(config.cascade_min_seqs, config.cascade_min_tokens)


def _prefill_shapes(runner: CudaModelRunner, config: ResolvedConfig) -> list[PrefillShape]:
    return prefill_shapes(
        runner.model.config,
        runner.model.dtype,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )


def _measure(
    model: CudaModel,
    runner: CudaModelRunner,
    config: ResolvedConfig,
    max_model_len: int,
    device: torch.device,
    *,
    later: int,
) -> int:
    """Bytes for the KV cache; `later` are those that something else takes after it."""
    decoder = model.decoder
    reset_peak(device)
    loaded = snapshot(device)
    with explained("running the largest step once", "lower max_num_batched_tokens or max_num_seqs", device):
        # first, for its logits stay: memory of its own, which is none of the graphs'
        runner.try_decode(config.max_num_seqs)
        runner.try_largest_step(config.max_num_batched_tokens)
    profiled = snapshot(device)
    graphs = _measure_graphs(runner, config, device) if config.cuda_graphs else 0
    block_bytes = bytes_per_block(decoder.config, block_size=config.block_size, dtype=runner.kv_cache.shape.dtype)
    # one layer's gathered keys and values are there while a chunk behind a prefix is computed, as wide as it computes
    token_bytes = bytes_per_block(decoder.config, block_size=1, dtype=decoder.dtype) // decoder.config.num_layers
    gathered = max(MAX_GATHERED_KEYS, max_model_len) * token_bytes
    use = memory_use(model.start, loaded, profiled, graphs=graphs + gathered + later)
    need = SequenceNeed(max_model_len=max_model_len, block_size=config.block_size, block_bytes=block_bytes)
    return kv_budget(model.start, use, need, utilization=config.gpu_memory_utilization, wanted=config.kv_cache_bytes)


def _measure_graphs(runner: CudaModelRunner, config: ResolvedConfig, device: torch.device) -> int:
    sizes, prefills = graph_sizes(config.max_num_seqs), _prefill_shapes(runner, config)
    more = cascade_sizes(config.max_num_seqs) if runner.cascade else []
    reset_peak(device)
    before = snapshot(device)
    with explained("capturing the first CUDA graphs", "lower max_num_seqs, or set cuda_graphs to false", device):
        # of each pool the largest graph is among them, which makes it as large as it gets; of prompts that is the one
        # of many or the one of long ones, as other kernels attend them
        runner.capture_graphs(sizes[-_TRIAL_GRAPHS:], more[-1:], prefills[-2:])
    assert runner.graphs is not None
    assert runner.prefill_graphs is not None
    count = len(runner.graphs) + len(runner.prefill_graphs)
    after = snapshot(device)
    runner.forget_graphs()
    taken = before.free - after.free
    reset_peak(device)
    # the pools are shared; each graph adds its own nodes
    pools = after.reserved - before.reserved
    each = max(0, taken - pools) // count
    wanted = (len(sizes) + len(more)) * len(Sampling) + len(prefills)
    return graph_memory([pools + each] + [each] * (count - 1), wanted)


def _trial_shape(decoder: Decoder, config: ResolvedConfig, cache_dtype: torch.dtype) -> CacheShape:
    """A cache of the null block and one more: steps on trial write nothing."""
    model = decoder.config
    return CacheShape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        num_blocks=2,
        num_host_blocks=0,
        dtype=cache_dtype,
    )
