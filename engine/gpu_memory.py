"""
How a GPU's memory is shared out: weights, activations, graphs, and the KV cache with what is left.

The process may use `gpu_memory_utilization` of the whole memory, and never what others hold.
What one step needs is measured, not guessed: load the weights, run the largest step once,
capture the largest graphs, and take the KV cache from the rest. Everything but the readings of
the device is arithmetic on bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.config import GIB
from engine.errors import NotEnoughMemory
from engine.model.config import ModelConfig

# copies to pinned host memory over PCIe 5, one way; what a GPU of the H100's kind computes of a prompt; and what one of
# the H200's reads of its memory
GPU_COPY_BYTES_PER_S = 45e9
GPU_PREFILL_FLOPS = 400e12
GPU_READ_BYTES_PER_S = 4.3e12

# left free where others fill the GPU: drivers and libraries take a little more while running
SPARE_BYTES = 256 * 2**20

# at the first reading our own CUDA context counts as used too: so much says nothing of other processes
_CONTEXT_BYTES = GIB

_END_OTHERS = "end the other processes on this GPU (`nvidia-smi` lists them), or choose one with CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """
    A reading of one GPU, in bytes.

    Args:
        total: Memory of the GPU.
        free: Of it, what nobody holds.
        reserved: What torch's allocator of this process holds.
        peak: The most that `reserved` has been since `reset_peak`.
    """

    total: int
    free: int
    reserved: int = 0
    peak: int = 0

    @property
    def outside(self) -> int:
        """What is held beside our allocator: other processes, contexts, kernels, libraries."""
        return self.total - self.free - self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """
    What this process needs beside the KV cache, in bytes.

    Args:
        activations: Peak of the largest step.
        graphs: Of all CUDA graphs.
        non_torch: Kernels and libraries that were loaded since the start.
    """

    weights: int
    activations: int
    graphs: int
    non_torch: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.graphs + self.non_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceNeed:
    """What the KV cache must hold at least: one sequence of max_model_len, and the null block."""

    max_model_len: int
    block_size: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return (-(-self.max_model_len // self.block_size) + 1) * self.block_bytes

    def tokens_in(self, num_bytes: int) -> int:
        """Tokens that a cache of so many bytes holds."""
        return max(0, num_bytes // self.block_bytes - 1) * self.block_size


def snapshot(device: torch.device) -> MemorySnapshot:
    """Read the device, with all that was launched done; memory that torch caches counts as reserved."""
    torch.cuda.synchronize(device)
    return _read(device)


def reset_peak(device: torch.device) -> None:
    """Give cached memory back and measure `peak` from here."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def memory_use(start: MemorySnapshot, loaded: MemorySnapshot, profiled: MemorySnapshot, *, graphs: int) -> MemoryUse:
    """
    Tell from three readings what is used for what.

    Args:
        start: Before the weights were loaded.
        loaded: After `reset_peak` with the weights in place.
        profiled: After the largest step has run once.
        graphs: Bytes of all CUDA graphs, as `graph_memory` gives.
    """
    return MemoryUse(
        weights=loaded.reserved - start.reserved,
        activations=max(0, profiled.peak - loaded.reserved),
        graphs=graphs,
        # what others took meanwhile counts as ours here: it is gone for the cache either way
        non_torch=max(0, profiled.outside - start.outside),
    )


def graph_memory(measured: Sequence[int], num_graphs: int) -> int:
    """
    Memory of all graphs from that of a few.

    Graphs share pools, which the largest make as large as they get; each further one adds its own
    nodes, taken to be as many for all.

    Args:
        measured: Bytes that captures took, one after the other, the pools in that of the first.
        num_graphs: How many will be captured.
    """
    if not measured or num_graphs <= len(measured):
        return sum(measured[:num_graphs])
    further = measured[1:] or measured
    return sum(measured) + (num_graphs - len(measured)) * -(-sum(further) // len(further))


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights on the device, known from the shapes before anything is allocated."""
    hidden, query, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = hidden * (query + 2 * kv) + query * hidden
    if config.qkv_bias:
        attention += query + 2 * kv
    if config.output_bias:
        attention += hidden
    if config.qk_norm:
        attention += 2 * config.head_dim
    mlp = 3 * hidden * config.intermediate_size
    if config.mlp_bias:
        mlp += 2 * config.intermediate_size + hidden
    vocabulary = config.vocab_size * hidden * (1 if config.tied_embeddings else 2)
    return (config.num_layers * (attention + mlp + 2 * hidden) + vocabulary + hidden) * dtype.itemsize


def check_weights_fit(num_bytes: int, start: MemorySnapshot, utilization: float) -> None:
    """
    Refuse weights before they are loaded, not half way.

    Args:
        num_bytes: As `weight_bytes` gives.
        start: Before anything was loaded.

    Raises:
        NotEnoughMemory: the weights alone are more than may be used.
    """
    if num_bytes <= _allowed(start, utilization):
        return
    change = _make_room(num_bytes, start, utilization) or ["take a smaller dtype, a smaller model or a larger GPU"]
    raise NotEnoughMemory(
        _report(
            f"the weights of {_spell(num_bytes)} do not fit the GPU",
            [*_rows(start, utilization), ("weights", num_bytes)],
        )
        + ", or ".join(change)
    )


def kv_budget(
    start: MemorySnapshot, use: MemoryUse, need: SequenceNeed, *, utilization: float, wanted: int | None = None
) -> int:
    """
    Bytes for the KV cache: what is left of the share, or what was asked for.

    Args:
        start: Before anything was loaded; what was used then is left to others.
        wanted: kv_cache_bytes, where it is set.

    Raises:
        NotEnoughMemory: one sequence of max_model_len does not fit what is left, or `wanted` does not.
    """
    left = _allowed(start, utilization) - use.total
    if left >= max(need.num_bytes, wanted or 0):
        return left if wanted is None else wanted
    rows = [
        *_rows(start, utilization),
        ("weights", use.weights),
        ("activations of the largest step", use.activations),
        ("CUDA graphs", use.graphs),
        ("kernels and libraries", use.non_torch),
        ("left for the KV cache", left),
    ]
    if wanted is not None and wanted > left >= need.num_bytes:
        said = f"kv_cache_bytes of {_spell(wanted)} do not fit the GPU"
        change = [
            f"lower kv_cache_bytes to {_spell_down(left)}",
            *_make_room(use.total + wanted, start, utilization),
        ]
    else:
        rows.append(("one sequence of max_model_len", need.num_bytes))
        said = f"the GPU has no room for one sequence of max_model_len {need.max_model_len:,}"
        change = _make_room(use.total + need.num_bytes, start, utilization) + _need_less(left, use, need)
    raise NotEnoughMemory(_report(said, rows) + ", or ".join(change or ["take a smaller model or a larger GPU"]))


def swap_space(wanted: int | None, available: int, preemption: str) -> int:
    """
    Bytes of pinned host memory for preempted sequences.

    torch rounds an allocation of pinned memory up to a power of two, so the usual size is one,
    and a size that was asked for is checked as it will be.

    Args:
        wanted: swap_space_bytes, where it is set.
        available: Host memory that can be taken.

    Raises:
        NotEnoughMemory: the host has less than what was asked for.
    """
    if preemption == "recompute":
        # nothing would ever be swapped out
        return 0
    if wanted is None:
        usual = min(available // 10, 4 * GIB)
        return 1 << (usual.bit_length() - 1) if usual else 0
    pinned = 1 << (wanted - 1).bit_length() if wanted else 0
    if pinned > available:
        raise NotEnoughMemory(
            f"swap_space_bytes is {_spell(wanted)}, which takes {_spell(pinned)} of pinned memory, and the host has "
            f"{_spell(available)} available: lower swap_space_bytes, or set preemption to recompute"
        )
    return wanted


@contextmanager
def explained(doing: str, change: str, device: torch.device) -> Iterator[None]:
    """
    Say what ran out of memory, and what to change, where torch only says that something did.

    Args:
        doing: As "capturing the CUDA graphs".
        change: As "lower max_num_seqs, or set cuda_graphs to false".

    Raises:
        NotEnoughMemory: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        # not all that fails so is a torch.OutOfMemoryError: cuBLAS and graphs allocate for themselves
        if not any(words in str(error) for words in ("out of memory", "ALLOC_FAILED")):
            raise
        now = _read(device)
        rows = [
            ("the whole GPU", now.total),
            ("free", now.free),
            ("held by torch in this process", now.reserved),
            ("held by other processes, and by CUDA itself", now.outside),
        ]
        raise NotEnoughMemory(_report(f"the GPU ran out of memory while {doing}", rows) + change) from error


def _read(device: torch.device) -> MemorySnapshot:
    free, total = torch.cuda.mem_get_info(device)
    return MemorySnapshot(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_reserved(device),
    )


def _allowed(start: MemorySnapshot, utilization: float) -> int:
    # what an earlier engine of this process still holds is of the same share
    return min(int(utilization * start.total) - start.reserved, _attainable(start))


def _attainable(start: MemorySnapshot) -> int:
    """What this process could have at most, whatever its share."""
    return start.free - SPARE_BYTES


def _make_room(num_bytes: int, start: MemorySnapshot, utilization: float) -> list[str]:
    """What would let this process use so many bytes; empty where nothing would."""
    change = []
    if num_bytes > _attainable(start):
        if start.outside <= _CONTEXT_BYTES or num_bytes + start.reserved > start.total - 2 * _CONTEXT_BYTES:
            return []
        change.append(_END_OTHERS)
    if (share := (num_bytes + start.reserved) / start.total) > utilization:
        # up to the next hundredth
        change.append(f"raise gpu_memory_utilization to {min(1.0, (int(100 * share) + 1) / 100):.2f}")
    return [", and ".join(change)] if change else []


def _need_less(left: int, use: MemoryUse, need: SequenceNeed) -> list[str]:
    """What would bring the need down to what is left."""
    missing = need.num_bytes - left
    change = []
    if (fitting := need.tokens_in(left)) > 1:
        change.append(f"lower max_model_len to {fitting:,}")
    if use.activations > missing:
        change.append("lower max_num_batched_tokens")
    if use.graphs >= missing:
        change.append("set cuda_graphs to false")
    return change


def _rows(start: MemorySnapshot, utilization: float) -> list[tuple[str, int]]:
    return [
        ("the whole GPU", start.total),
        ("held at the start: other processes, and CUDA itself", start.total - start.free),
        (f"may be used, at gpu_memory_utilization {utilization:g}", _allowed(start, utilization)),
    ]


def _report(said: str, rows: Sequence[tuple[str, int]]) -> str:
    """A sentence, a table of where the memory goes, and the start of a last line for what to do."""
    lines = [f"  {name:<52}{num_bytes / GIB:>9,.2f} GiB" for name, num_bytes in rows]
    return "\n".join([f"{said}:", *lines, ""])


def _spell(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


def _spell_down(num_bytes: int) -> str:
    """As `_spell`, and never more than it is: a limit can be set as it stands."""
    return f"{num_bytes * 100 // GIB / 100:,.2f} GiB"
