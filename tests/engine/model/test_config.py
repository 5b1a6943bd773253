"""Reading config.json, in all the spellings that checkpoints have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelNotFound, StartupError, UnknownArchitecture
from engine.model.config import ModelConfig, eos_token_ids

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}


def make(architecture: str, **options: Any) -> ModelConfig:
    return ModelConfig.parse({**PLAIN, "architectures": [architecture], **options})


def test_missing_keys_mean_the_defaults_of_the_family() -> None:
    """
    A config of the oldest kind is complete: heads, width of heads, norm, rope.
    """
    config = make("LlamaForCausalLM")

    assert (8, 8, 1e-6) == (config.num_kv_heads, config.head_dim, config.norm_eps)
    assert {"rope_type": "default", "rope_theta": 10000.0} == config.rope
    assert (False, False, False) == (config.qkv_bias, config.mlp_bias, config.tied_embeddings)
    assert torch.float32 == config.dtype


@pytest.mark.parametrize(
    ("architecture", "options", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096, 4096)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (None, None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            },
            (8, None, 8, None),
        ),
    ],
)
def test_windows_are_those_that_the_family_reads(
    architecture: str, options: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    """
    A window holds where the family says so: everywhere, nowhere, or by layer and only if switched on.
    """
    assert expected == make(architecture, **options).windows


@pytest.mark.parametrize(
    ("architecture", "options", "biases"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_are_those_of_the_family(
    architecture: str, options: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    """
    Biases of query/key/value, output and MLP.
    """
    config = make(architecture, **options)

    assert biases == (config.qkv_bias, config.output_bias, config.mlp_bias)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_names(key: str) -> None:
    """
    transformers 5 writes dtype, earlier ones torch_dtype.
    """
    assert torch.bfloat16 == make("LlamaForCausalLM", **{key: "bfloat16"}).dtype


@pytest.mark.parametrize("names", [["MambaForCausalLM"], [], None])
def test_an_unknown_architecture_is_named_beside_the_known(names: list[str] | None) -> None:
    """
    The error names what the config asks for and lists what there is.
    """
    named = names[0] if names else "no architecture"

    with pytest.raises(UnknownArchitecture, match=f"{named}; supported are LlamaForCausalLM, .*Qwen3ForCausalLM"):
        ModelConfig.parse({**PLAIN, "architectures": names})


def test_what_changes_the_network_is_refused() -> None:
    """
    Another activation is not run as if it were SiLU.
    """
    with pytest.raises(UnknownArchitecture, match="'gelu'"):
        make("LlamaForCausalLM", hidden_act="gelu")


def test_a_missing_key_is_named() -> None:
    """
    A config without a size says which.
    """
    raw = {key: value for key, value in PLAIN.items() if key != "hidden_size"}

    with pytest.raises(StartupError, match="lacks 'hidden_size'"):
        ModelConfig.parse(raw)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_readable_config_is_not_a_model(tmp_path: Path, content: str | None) -> None:
    """
    No folder, no file, no JSON, no object: the model is not there.
    """
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ModelConfig.load(tmp_path)
    with pytest.raises(ModelNotFound, match="no model folder"):
        ModelConfig.load(tmp_path / "nowhere")


@pytest.mark.parametrize("token", ["<end>", {"content": "<end>", "lstrip": False}])
def test_every_end_counts(tmp_path: Path, token: str | dict[str, Any]) -> None:
    """
    The ends of config, generation config and tokenizer count, whoever names them.
    """
    files: dict[str, Any] = {
        "config.json": {"eos_token_id": 2},
        "generation_config.json": {"eos_token_id": [2, 7]},
        "tokenizer_config.json": {"eos_token": token},
        "tokenizer.json": {"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 1, "content": "<start>"}]},
    }
    assert frozenset() == eos_token_ids(tmp_path)

    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))

    assert frozenset({2, 7, 9}) == eos_token_ids(tmp_path)


def test_a_quantised_checkpoint_is_refused_by_its_method() -> None:
    """
    The weights of a quantised checkpoint are not those of the architecture; the message says by what.
    """
    with pytest.raises(UnknownArchitecture, match="quantised by awq"):
        ModelConfig.parse(PLAIN | {"quantization_config": {"quant_method": "awq", "bits": 4}})


def test_the_old_spelling_of_a_partial_rotation_counts() -> None:
    """
    partial_rotary_factor beside rope_theta means what it means within rope_parameters.
    """
    assert 0.5 == ModelConfig.parse(PLAIN | {"partial_rotary_factor": 0.5}).rope["partial_rotary_factor"]


def test_weights_are_those_of_the_products() -> None:
    """
    Of queries, keys, values and the output, of the MLP, and once of the head: norms and the embedding are looked up.
    """
    config = make("LlamaForCausalLM", num_key_value_heads=2)
    attention = 64 * 64 + 2 * 64 * 16 + 64 * 64

    assert 4 * (attention + 3 * 64 * 96) == config.layer_weights
    assert config.layer_weights + 64 * 100 == config.step_weights
