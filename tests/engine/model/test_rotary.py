"""Rotary tables have the values of transformers at near and far positions."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import StartupError, UnknownArchitecture
from engine.model.config import ModelConfig
from engine.model.rotary import RopeShape, inverse_frequencies, rotary_table

HEAD_DIM = 64
POSITIONS = torch.tensor([0, 1, 4096, 33000])
FACTORS = [1.0 + 0.1 * pair for pair in range(HEAD_DIM // 2)]

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": FACTORS,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def make_config(scaling: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 500000.0, **scaling},
    )


def table_of(raw: dict[str, Any], max_model_len: int) -> torch.Tensor:
    config = ModelConfig.parse(raw)
    return rotary_table(
        RopeShape(
            rope=config.rope,
            rotary_dim=config.head_dim,
            max_positions=config.max_positions,
            max_model_len=max_model_len,
        )
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_equals_transformers(name: str) -> None:
    """
    Cosines and sines of every scaling are bit-equal to those of transformers for the longest sequence.
    """
    config = make_config(SCALINGS[name])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS[None])

    table = table_of(config.to_dict(), max_model_len=33001)[POSITIONS]

    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(HEAD_DIM // 2)
    assert torch.equal(cos[0], table[:, 0])
    assert torch.equal(sin[0] * signs, table[:, 1])


def test_the_old_spelling_means_the_same() -> None:
    """
    `rope_scaling` with "type" and a rope_theta beside it gives the table of `rope_parameters`.
    """
    new = make_config(SCALINGS["llama3"]).to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in SCALINGS["llama3"].items() if key != "rope_type"}
    old |= {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling}}

    assert torch.equal(table_of(new, 4097), table_of(old, 4097))


def test_longrope_is_chosen_by_the_longest_sequence() -> None:
    """
    An engine whose sequences end within the original length takes the short factors for all of them.
    """
    raw = make_config(SCALINGS["longrope"]).to_dict()

    assert not torch.equal(table_of(raw, 4096)[100], table_of(raw, 4097)[100])


def test_an_unknown_type_is_named() -> None:
    """
    The error names the rope type and those that are supported.
    """
    raw = make_config({}).to_dict() | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}

    with pytest.raises(UnknownArchitecture, match=r"'spiral'; supported are default, .*llama3"):
        table_of(raw, 16)


def test_a_scaling_without_its_numbers_says_which_one_is_missing() -> None:
    """
    A rope type whose parameter is not there is a start-up error with the parameter's name.
    """
    shape = RopeShape(rope={"rope_type": "linear", "rope_theta": 1e4}, rotary_dim=8, max_positions=64, max_model_len=64)

    with pytest.raises(StartupError, match=r"lacks 'factor'.*'linear'"):
        inverse_frequencies(shape)
