"""What all contenders load: a folder, with weights or with shapes alone."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks import shapes
from engine.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class Model:
    """
    Args:
        name: Of the shape, or of the folder.
        folder: In Hugging Face layout.
        vocab: Token ids that its embedding has.
        dummy: There are no weights in the folder: random ones are run.
    """

    name: str
    folder: Path
    vocab: int
    dummy: bool


def find_model(name: str, scratch: Path) -> Model:
    """
    The model of a shape's name, which is written to `scratch`, of a folder, or whatever else a worker takes.

    Raises:
        StartupError: it is none of these, or not on this machine.
    """
    dummy = name in shapes.SHAPES
    folder = shapes.write(name, scratch) if dummy else _on_this_machine(name)
    try:
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    except (OSError, KeyError) as error:
        raise ModelNotFound(f"{folder} has no config.json with a vocab_size: {error}") from None
    return Model(name if dummy else folder.name, folder.resolve(), vocab, dummy)


def _on_this_machine(name: str) -> Path:
    # shapes need nothing of the worker, and run where it is not installed
    from worker.models import resolve_model

    return resolve_model(name)
