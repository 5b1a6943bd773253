"""Tiny random models of every architecture, made by transformers and saved as model folders."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.tiny_tokenizers import byte_level, save

VOCAB = 199

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "attn_implementation": "sdpa",
    "dtype": "float64",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

TINY_CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, head_dim=16),
    "mistral": MistralConfig(**_SHAPE, sliding_window=8),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2 with windows": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
}


def make_tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """
    A random float64 model that computes in float64 throughout.

    transformers rounds its norms to float32 even there; torch's own norm takes their place.

    Args:
        changes: What its configuration has instead.
    """
    torch.manual_seed(0)
    config = deepcopy(TINY_CONFIGS[name])
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                exact = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                exact.weight = nn.Parameter(0.5 + torch.rand_like(child.weight))
                setattr(parent, child_name, exact)
        if isinstance(parent, nn.Linear) and parent.bias is not None:
            nn.init.normal_(parent.bias)
    return model.eval()


def save_tiny_model(name: str, path: Path, **options: Any) -> PreTrainedModel:
    """Save the model as a Hugging Face folder of safetensors; options as those of save_pretrained."""
    model = make_tiny_model(name)
    model.save_pretrained(path, **options)
    return model


def save_calm_model(name: str, path: Path) -> None:
    """Save a model of small weights, whose answers hang less on the last bits of what it computes."""
    make_tiny_model(name, initializer_range=0.1).save_pretrained(path)


def save_tiny_writer(path: Path, *, max_model_len: int = 4096) -> None:
    """Save a model that reads and writes text, of bytes and pieces of them: a folder that a worker can serve."""
    tokenizer = byte_level()
    model = make_tiny_model("qwen3", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=max_model_len)
    model.save_pretrained(path)
    save(tokenizer, path)
