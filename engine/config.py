"""The engine's settings: one frozen value, read once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import StartupError

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """
    What an operator decides about one engine.

    Args:
        model: Folder with config.json and safetensors.
        dtype: "auto" is float32 on a CPU.
        block_size: Tokens of one KV block.
        max_num_seqs: Most sequences that run at once.
        max_num_batched_tokens: Token budget of one step.
        max_model_len: Longest prompt plus answer; None takes the model's own limit.
        kv_cache_bytes: Size of the KV cache; None takes a quarter of the free memory, 2 GiB at most.
        swap_space_bytes: Host memory for preempted sequences; None takes a tenth of the free
            memory, 1 GiB at most.
        prefix_caching: Find blocks of equal prompts again.
        shared_tenants: Prompts of parties that do not trust each other share the cache: its
            blocks are then found by a hash that nobody can collide on purpose.
        preemption: How blocks are won back: by swap, by recompute, or whichever is cheaper.
        load_format: "dummy" fills the shapes of config.json with random weights.
        num_threads: Threads of the CPU backend; None leaves torch's default.
    """

    model: Path
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    swap_space_bytes: int | None = None
    prefix_caching: bool = True
    shared_tenants: bool = False
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise StartupError(f"{name} is {value}; want 1 or more")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise StartupError(f"max_model_len is {self.max_model_len}; want 2 or more: a prompt and an answer token")
