"""From a model folder to a network that can run."""

from pathlib import Path
from typing import Literal

import torch

from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.weights import fill_randomly, load_weights


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
) -> tuple[Decoder, ModelConfig]:
    """
    Build the network of a Hugging Face model folder and load its safetensors.

    Args:
        dtype: Of weights and activations; the checkpoint's are cast to it.
        max_model_len: Longest sequence; None takes the model's own limit.
        load_format: "dummy" draws weights instead: config.json alone is needed.

    Raises:
        ModelNotFound: the folder is not there or not complete.
        UnknownArchitecture: the engine does not have this network.
        WeightsMismatch: the checkpoint is not one of this network.
    """
    config = ModelConfig.load(path)
    model = Decoder(config, max_model_len=max_model_len or config.max_positions, dtype=dtype, device=device)
    if load_format == "dummy":
        fill_randomly(dict(model.tensors()))
    else:
        # with tied embeddings some checkpoints hold the head a second time
        redundant = frozenset({"lm_head.weight"} if config.tied_embeddings else ())
        load_weights(path, dict(model.tensors()), redundant=redundant)
    model.pack()
    return model, config
