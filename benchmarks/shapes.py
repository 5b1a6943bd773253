"""
Model shapes as Hugging Face folders: config.json, no weights and no tokenizer.

Speed depends on the shapes alone, so engines fill them with random ("dummy") weights and no
checkpoint is needed. `python -m benchmarks.shapes qwen2.5-0.5b models` writes one.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

Config = dict[str, Any]

_LLAMA3_VOCAB = 128_256
_QWEN2_VOCAB = 152_064


class _Sizes(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


def _decoder(sizes: _Sizes, vocab: int, tied: bool) -> Config:
    """The fields that every architecture here has."""
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab,
    }


def _llama3(
    sizes: _Sizes,
    *,
    vocab: int = _LLAMA3_VOCAB,
    tied: bool = False,
    head_dim: int | None = None,
    rope_factor: float = 8.0,
    positions: int = 131_072,
) -> Config:
    config = _decoder(sizes, vocab, tied)
    whole_vocab = vocab == _LLAMA3_VOCAB
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128_000 if whole_vocab else 1,
        "eos_token_id": 128_001 if whole_vocab else 2,
        "head_dim": head_dim or sizes.hidden // sizes.heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": rope_factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
    }


def _smollm2(sizes: _Sizes) -> Config:
    return _decoder(sizes, 49_152, True) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "torch_dtype": "float32",
    }


def _qwen2(sizes: _Sizes, *, vocab: int = _QWEN2_VOCAB, tied: bool = False, positions: int = 32_768) -> Config:
    config = _decoder(sizes, vocab, tied)
    return config | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": min(151_643, vocab - 2),
        "eos_token_id": min(151_645, vocab - 1),
        "max_position_embeddings": positions,
        "max_window_layers": sizes.layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    }


SHAPES: dict[str, Config] = {
    "llama-3.1-8b": _llama3(_Sizes(4096, 14_336, 32, 32, 8)),
    "llama-3.1-70b": _llama3(_Sizes(8192, 28_672, 80, 64, 8)),
    "llama-3.2-1b": _llama3(_Sizes(2048, 8192, 16, 32, 8), tied=True, rope_factor=32.0),
    "llama-3.2-3b": _llama3(_Sizes(3072, 8192, 28, 24, 8), tied=True, rope_factor=32.0),
    "qwen2.5-0.5b": _qwen2(_Sizes(896, 4864, 24, 14, 2), vocab=151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(_Sizes(1536, 8960, 28, 12, 2), vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen2(_Sizes(3584, 18_944, 28, 28, 4)),
    "qwen2.5-14b": _qwen2(_Sizes(5120, 13_824, 48, 40, 8)),
    "qwen2.5-32b": _qwen2(_Sizes(5120, 27_648, 64, 40, 8)),
    "smollm2-135m": _smollm2(_Sizes(576, 1536, 30, 9, 3)),
    "tiny-llama": _llama3(_Sizes(128, 256, 2, 4, 2), vocab=1024, head_dim=32, positions=8192),
    "tiny-qwen2": _qwen2(_Sizes(128, 256, 2, 4, 2), vocab=1024, positions=8192),
}


def write(shape: str, root: Path) -> Path:
    """Write root/shape with config.json and generation_config.json, and return that folder."""
    config = SHAPES[shape]
    folder = root / shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("root", type=Path, nargs="?", default=Path("models"))
    args = parser.parse_args(argv)
    print(write(args.shape, args.root))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
