"""Engines of a tiny model with few seats, on the card unless another device is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.load import load_engine
from tests.support import tiny_tokenizers

Load = Callable[..., LLMEngine]

MODELS = ("qwen3", "llama with biases", "mistral", "qwen2 with windows")
CACHE_BYTES = 32 << 20


def loader(save_model: Callable[[str, Path], object], name: str, folder: Path, **settings: object) -> Load:
    """
    Save a model, and return what loads an engine of it by `load(device, **settings)`.

    Args:
        save_model: Of tests.support.tiny_models.
        settings: Of all engines, which each may overrule.
    """
    save_model(name, folder)
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), folder)
    base = EngineConfig(
        model=folder,
        dtype="float32",
        block_size=16,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        max_model_len=256,
        kv_cache_bytes=CACHE_BYTES,
        swap_space_bytes=CACHE_BYTES,
    )
    base = replace(base, **settings)  # type: ignore[arg-type]

    def load(device: str = "cuda", **others: object) -> LLMEngine:
        return load_engine(replace(base, device=device, **others))  # type: ignore[arg-type]

    return load


def small_cache(load: Load, device: str = "cuda", **settings: object) -> LLMEngine:
    """An engine that has to preempt: room for about a third of what runs."""
    tokens = load(device).kv_tokens
    assert tokens
    return load(device, kv_cache_bytes=CACHE_BYTES * 18 * 16 // tokens, **settings)
