"""The decoders that the engine has, as a table of their differences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from engine.errors import UnknownArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """
    How one family differs from the plain decoder: RMSNorm before each half, rotary
    grouped-query attention, SiLU-gated MLP.

    Args:
        qkv_bias, output_bias, mlp_bias: True, False, or the config key that decides.
        qk_norm: Queries and keys are normed head by head before the rotation.
        window: Which layers see `sliding_window` tokens only: none, all, or those that
            `layer_types` names (the last ones, from max_window_layers, where it is missing)
            if `use_sliding_window` is set.
        defaults: Values of keys that config.json may leave out.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "all", "by layer"] = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            defaults={"max_position_embeddings": 2048},
        ),
        "MistralForCausalLM": Architecture(
            window="all",
            defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        ),
        "Qwen2ForCausalLM": Architecture(
            qkv_bias=True,
            window="by layer",
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 32,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
        ),
        "Qwen3ForCausalLM": Architecture(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            window="by layer",
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 32,
                "head_dim": 128,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
        ),
    }
)


def find_architecture(names: list[str]) -> tuple[str, Architecture]:
    """
    Return the first of a config's `architectures` that is in the table, with its name.

    Raises:
        UnknownArchitecture: none is.
    """
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    named = ", ".join(names) if names else "no architecture"
    raise UnknownArchitecture(f"config.json names {named}; supported are {', '.join(ARCHITECTURES)}")
