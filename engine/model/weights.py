"""Tensors from a checkpoint's safetensors files, whole or in shards."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelNotFound, WeightsMismatch
from engine.model.config import read_json

# how many names an error spells out
_NAMED = 5


def load_weights(path: Path, targets: Mapping[str, Tensor], *, redundant: frozenset[str] = frozenset()) -> None:
    """
    Copy a checkpoint's tensors into memory that is there, cast to its dtype.

    Args:
        path: Model folder.
        targets: Name to memory; all of them are filled.
        redundant: Names that the checkpoint may have or not, and that are not read.

    Raises:
        ModelNotFound: there are no safetensors, or one of the shards is missing or damaged.
        WeightsMismatch: names or shapes are not those of `targets`.
    """
    found: set[str] = set()
    unexpected: list[str] = []
    for file in _files(path):
        for name, tensor in _read(file, targets, redundant, unexpected):
            target = targets[name]
            if target.shape != tensor.shape:
                raise WeightsMismatch(
                    f"{name} in {file} is {list(tensor.shape)}; config.json makes it {list(target.shape)}"
                )
            target.copy_(tensor)
            found.add(name)
    missing = [name for name in targets if name not in found]
    if missing or unexpected:
        raise WeightsMismatch(
            f"the tensors in {path} are not those of its config.json: {_spell('missing', missing)}; "
            f"{_spell('unexpected', unexpected)}"
        )


def fill_randomly(targets: Mapping[str, Tensor], seed: int = 0) -> None:
    """Fill memory with weights of a plausible size: norms are 1, the rest is drawn."""
    device = next(iter(targets.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(0.0, 0.02, generator=generator)


def _files(path: Path) -> list[Path]:
    index = read_json(path / "model.safetensors.index.json")
    if index is None:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelNotFound(f"{path} has no *.safetensors: other formats are not read, convert the model first")
        return files
    files = sorted({path / name for name in index.get("weight_map", {}).values()})
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelNotFound(f"{path} is not complete: its index names {', '.join(absent)}, which is not there")
    return files


def _read(
    file: Path, targets: Mapping[str, Tensor], redundant: frozenset[str], unexpected: list[str]
) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in targets:
                    yield name, tensors.get_tensor(name)
                # old checkpoints carry the rotary frequencies, which config.json gives
                elif name not in redundant and not name.endswith("rotary_emb.inv_freq"):
                    unexpected.append(name)
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from error


def _spell(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} {kind}" + (f" ({', '.join(names[:_NAMED])}{more})" if names else "")
