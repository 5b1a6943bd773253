"""What config.json says of a network, in the words of the engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelNotFound, StartupError, UnknownArchitecture
from engine.model.architectures import Architecture, find_architecture

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """
    The shape of a decoder.

    Args:
        architecture: Its name in the table of architectures.
        windows: Per layer its sliding window in tokens, or None for full attention.
        rope: Parameters of the rotary embedding with `rope_type` and `rope_theta`, as
            transformers 5 names them.
        max_positions: Longest sequence the model was made for.
        dtype: Of the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    rope: Mapping[str, Any]
    max_positions: int
    dtype: torch.dtype

    @property
    def layer_weights(self) -> int:
        """Elements of all layers' products."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def step_weights(self) -> int:
        """Elements that a decode step reads: the same, and the head's."""
        return self.layer_weights + self.hidden_size * self.vocab_size

    @classmethod
    def load(cls, path: Path) -> "ModelConfig":
        """
        Read `config.json` of a model folder.

        Raises:
            ModelNotFound: there is no folder, or no config.json that can be read.
            UnknownArchitecture: the engine does not have this network, or not this variant.
            StartupError: a needed key is missing.
        """
        if not path.is_dir():
            raise ModelNotFound(f"there is no model folder at {path}: check --model, or run `pagemill models pull`")
        raw = read_json(path / "config.json")
        if raw is None:
            raise ModelNotFound(f"{path} has no config.json: a Hugging Face model folder is wanted")
        return cls.parse(raw)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """As `load`, from the contents of config.json."""
        name, architecture = find_architecture(raw.get("architectures") or [])
        values = {**architecture.defaults, **{key: value for key, value in raw.items() if value is not None}}
        if values.get("hidden_act", "silu") != "silu":
            raise UnknownArchitecture(f"hidden_act is {values['hidden_act']!r}; supported is 'silu'")
        if quantization := values.get("quantization_config"):
            method = quantization.get("quant_method", "an unknown method")
            raise UnknownArchitecture(f"the checkpoint is quantised by {method}: take one in float16 or bfloat16")
        try:
            num_layers, num_heads = int(values["num_hidden_layers"]), int(values["num_attention_heads"])
            hidden_size = int(values["hidden_size"])
            return cls(
                architecture=name,
                vocab_size=int(values["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(values["intermediate_size"]),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=int(values.get("num_key_value_heads", num_heads)),
                head_dim=int(values.get("head_dim", hidden_size // num_heads)),
                norm_eps=float(values.get("rms_norm_eps", 1e-6)),
                qkv_bias=_decide(architecture.qkv_bias, values),
                output_bias=_decide(architecture.output_bias, values),
                mlp_bias=_decide(architecture.mlp_bias, values),
                qk_norm=architecture.qk_norm,
                tied_embeddings=bool(values.get("tie_word_embeddings", False)),
                windows=_windows(architecture, raw, values, num_layers),
                rope=_rope(values),
                max_positions=int(values["max_position_embeddings"]),
                dtype=_dtype(values),
            )
        except KeyError as error:
            raise StartupError(f"config.json lacks {error.args[0]!r}, which {name} needs") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """
    Read a JSON object; None where there is no such file.

    Raises:
        ModelNotFound: the file is there and is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} holds no JSON object")
    return value


def eos_token_ids(path: Path) -> frozenset[int]:
    """
    Every token that ends an answer: what config.json, generation_config.json and the
    tokenizer name, together.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids = (read_json(path / name) or {}).get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])

    settings = read_json(path / "tokenizer_config.json") or {}
    token = settings.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = (read_json(path / "tokenizer.json") or {}).get("added_tokens", [])
    found.update(entry["id"] for entry in added if entry["content"] == content)
    return frozenset(found)


def _decide(setting: bool | str, values: Mapping[str, Any]) -> bool:
    return bool(values.get(setting, False)) if isinstance(setting, str) else setting


def _windows(
    architecture: Architecture, raw: Mapping[str, Any], values: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    # a null says "no window" here, where a missing key says "the default one"
    window = values.get("sliding_window") if raw.get("sliding_window", 0) is not None else None
    if architecture.window == "all":
        return (window,) * num_layers
    if architecture.window == "none" or window is None or not values.get("use_sliding_window", False):
        return (None,) * num_layers
    full = values.get("max_window_layers", 0)
    kinds = values.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings as one: `rope_scaling` with rope_theta beside it, and `rope_parameters`."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnknownArchitecture("rope_parameters differ by layer type; supported is one set for all layers")
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    rope.pop("type", None)
    if "partial_rotary_factor" in values:
        rope.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
    rope["rope_theta"] = float(rope.get("rope_theta") or values.get("rope_theta", 10000.0))
    if rope["rope_type"] in ("yarn", "longrope", "llama3"):
        original = rope.get("original_max_position_embeddings") or values["max_position_embeddings"]
        rope["original_max_position_embeddings"] = values.get("original_max_position_embeddings", original)
    return rope


def _dtype(values: Mapping[str, Any]) -> torch.dtype:
    name = str(values.get("dtype", values.get("torch_dtype", "float32"))).removeprefix("torch.")
    if name not in _DTYPES:
        raise StartupError(f"config.json says dtype {name!r}; want one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
