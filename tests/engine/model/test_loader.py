"""Checkpoints: whole and sharded, tied and doubled heads, and what a wrong one says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelNotFound, WeightsMismatch
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from tests.support.tiny_models import save_tiny_model


def load(path: Path, dtype: torch.dtype = torch.float64) -> Decoder:
    return load_model(path, dtype=dtype)[0]


def tensors_of(model: Decoder) -> dict[str, torch.Tensor]:
    return dict(model.tensors())


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path)
    return tmp_path


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    save_tiny_model("mistral", tmp_path)
    return tmp_path


def rewrite(path: Path, *, drop: str = "", **added: torch.Tensor) -> None:
    """Change the checkpoint of a folder; added names have _ for a dot."""
    file = path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != drop}
    tensors |= {name.replace("__", "."): tensor for name, tensor in added.items()}
    save_file(tensors, file)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    """
    A checkpoint in shards loads as the same one in a single file.
    """
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    save_tiny_model("qwen3", whole)
    save_tiny_model("qwen3", sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2

    expected, actual = tensors_of(load(whole)), tensors_of(load(sharded))

    assert expected.keys() == actual.keys()
    assert [] == [name for name, tensor in expected.items() if not torch.equal(tensor, actual[name])]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """
    A shard that the index names and that is not there makes the model incomplete.
    """
    save_tiny_model("qwen3", tmp_path, max_shard_size="50KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()

    with pytest.raises(ModelNotFound, match=shard.name):
        load(tmp_path)


def test_a_damaged_file_is_named(tied: Path) -> None:
    """
    A file cut short is not a model, and the error says which file.
    """
    file = tied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])

    with pytest.raises(ModelNotFound, match=r"model\.safetensors cannot be read"):
        load(tied)


def test_a_folder_without_safetensors_says_what_is_read(tied: Path) -> None:
    """
    Other formats are not guessed at.
    """
    (tied / "model.safetensors").unlink()

    with pytest.raises(ModelNotFound, match="safetensors"):
        load(tied)


def test_a_tied_head_is_the_embedding(tied: Path) -> None:
    """
    With tied embeddings the head needs no tensor, and one that is there a second time is not read.
    """
    rewrite(tied, lm_head__weight=torch.full((199, 48), torch.nan))

    model = load(tied)

    assert torch.equal(model.embedding.weight, model.head.weight)


def test_missing_and_unexpected_tensors_are_named(untied: Path) -> None:
    """
    An untied head that is missing, and a tensor that no layer has, are both in the message.
    """
    rewrite(untied, drop="lm_head.weight", model__extra__weight=torch.zeros(3))

    with pytest.raises(WeightsMismatch, match=r"1 missing \(lm_head\.weight\); 1 unexpected \(model\.extra\.weight\)"):
        load(untied)


def test_old_rotary_frequencies_are_passed_over(untied: Path) -> None:
    """
    Frequencies that early checkpoints carry are none of the network's tensors, and no fault.
    """
    rewrite(untied, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))

    assert torch.isfinite(load(untied).embedding.weight).all()


def test_a_wrong_shape_is_named(tied: Path) -> None:
    """
    A config that does not fit its checkpoint says which tensor, and both shapes.
    """
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))

    with pytest.raises(WeightsMismatch, match=r"mlp\..*_proj\.weight .*80.*config\.json makes it .*96"):
        load(tied)


def test_weights_are_cast(tied: Path) -> None:
    """
    The dtype that was asked for wins over the checkpoint's.
    """
    expected = tensors_of(load(tied))["model.layers.1.self_attn.o_proj.weight"].to(torch.bfloat16)

    actual = tensors_of(load(tied, torch.bfloat16))["model.layers.1.self_attn.o_proj.weight"]

    assert torch.equal(expected, actual)


def test_dummy_weights_need_config_alone(tied: Path) -> None:
    """
    Drawn weights are finite, the same at every load, and need no checkpoint.
    """
    (tied / "model.safetensors").unlink()

    first, second = (load_model(tied, dtype=torch.float64, load_format="dummy")[0] for _ in range(2))

    again = tensors_of(second)
    assert [] == [name for name, tensor in tensors_of(first).items() if not torch.equal(tensor, again[name])]
    assert all(bool(tensor.isfinite().all()) for tensor in again.values())
