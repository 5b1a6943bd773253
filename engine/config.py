"""The engine's settings: one frozen value, read once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from engine.errors import StartupError

GIB = 1024**3

# in which order bulk work is served; the first is the default
PolicyName = Literal["throughput", "fcfs"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a batch gets where the operator does not say."""

    max_num_seqs: int
    max_num_batched_tokens: int


# by device type: a GPU reads its weights once for all sequences, so that a larger batch is nearly free
USUAL_LIMITS: Mapping[str, BatchLimits] = MappingProxyType(
    {"cpu": BatchLimits(64, 512), "cuda": BatchLimits(1024, 8192)}
)
# a launch has 65,535 rows of programs at most, and a part of a long sequence is a row too
MAX_GPU_SEQS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """
    What an operator decides about one engine.

    Args:
        model: Folder with config.json and safetensors.
        device: "auto" is the GPU where torch was built for CUDA, and the CPU where it was not; a
            GPU that is missing or unusable is an error, never a reason to take the CPU.
        dtype: "auto" is the checkpoint's own on a GPU, and float32 on a CPU.
        kv_cache_dtype: "auto" keeps keys and values as the model computes them; "fp8" in eight bits with a
            scale for each token and head: about half the memory of 16 bits, and answers that differ a little.
        block_size: Tokens of one KV block.
        max_num_seqs: Most sequences that run at once; None is 1,024 on a GPU and 64 on a CPU.
        max_num_batched_tokens: Token budget of one step; None is 8,192 on a GPU and 512 on a CPU.
        max_model_len: Longest prompt plus answer; None takes the model's own limit.
        gpu_memory_utilization: Share of the GPU's whole memory that this process may use, above 0
            and up to 1; what other processes hold is left to them.
        kv_cache_bytes: Size of the KV cache; None takes all that is left of the GPU's share, or on
            a CPU a quarter of the free memory, 2 GiB at most.
        swap_space_bytes: Host memory for preempted sequences; None takes a tenth of the free
            memory, 4 GiB at most beside a GPU and 1 GiB on a CPU.
        cuda_graphs: Replay recorded steps on a GPU; needs memory and time at the start.
        prefix_caching: Find blocks of equal prompts again.
        shared_tenants: Prompts of parties that do not trust each other share the cache: its
            blocks are then found by a hash that nobody can collide on purpose.
        cascade: On a GPU, read a cached prefix that running sequences share once for all of them in each
            decode step; captures some graphs more at the start.
        cascade_min_seqs: Sequences from which on that is done.
        cascade_min_tokens: Tokens of the prefix from which on that is done.
        preemption: How blocks are won back: by swap, by recompute, or whichever is cheaper.
        policy: "throughput" puts bulk work in the order and at the pace in which all of it ends soonest;
            "fcfs" serves it as it comes, as other work always is.
        load_format: "dummy" fills the shapes of config.json with random weights.
        num_threads: Threads of the CPU backend; None leaves torch's default.
    """

    model: Path
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    swap_space_bytes: int | None = None
    cuda_graphs: bool = True
    prefix_caching: bool = True
    shared_tenants: bool = False
    cascade: bool = True
    cascade_min_seqs: int = 8
    cascade_min_tokens: int = 512
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    policy: PolicyName = "throughput"
    load_format: Literal["auto", "dummy"] = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise StartupError(f'device is "{self.device}"; want "auto", "cpu" or "cuda"')
        if self.policy not in POLICIES:
            raise StartupError(f'policy is "{self.policy}"; want "throughput" or "fcfs"')
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise StartupError(f'kv_cache_dtype is "{self.kv_cache_dtype}"; want "auto" or "fp8"')
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "cascade_min_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StartupError(f"{name} is {value}; want 1 or more")
        if self.cascade_min_seqs < 2:
            raise StartupError(f"cascade_min_seqs is {self.cascade_min_seqs}; want 2 or more: one shares with nobody")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise StartupError(f"max_model_len is {self.max_model_len}; want 2 or more: a prompt and an answer token")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise StartupError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization:g}; want a share of the GPU, as 0.9"
            )

    def resolved(self, device_type: str) -> "ResolvedConfig":
        """
        The same settings on a device, "cpu" or "cuda", with what was left open about the batch filled in.

        Raises:
            StartupError: the device's kernels cannot run so many sequences.
        """
        if device_type == "cuda" and (self.max_num_seqs or 0) > MAX_GPU_SEQS:
            raise StartupError(f"max_num_seqs is {self.max_num_seqs}; want {MAX_GPU_SEQS} or less on a GPU")
        usual = USUAL_LIMITS[device_type]
        settings: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        settings["device"] = device_type
        settings["cuda_graphs"] = self.cuda_graphs and device_type == "cuda"
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if settings[name] is None:
                settings[name] = getattr(usual, name)
        return ResolvedConfig(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """Settings whose device is known, so that the limits of a batch are numbers."""

    max_num_seqs: int
    max_num_batched_tokens: int
