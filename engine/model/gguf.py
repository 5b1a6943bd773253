"""
Turn a GGUF checkpoint into a Hugging Face folder that every loader reads.

One file holds weights, sizes, tokenizer and chat template under names of its own. What
differs from the Hugging Face layout, and is undone here:

1. tensors are quantised: each is dequantised to float32, one at a time;
2. the rows of Q and K of the llama family are interleaved, because llama.cpp rotates
   neighbouring pairs where Hugging Face rotates the two halves of a head;
3. the tokenizer is a list of tokens and merges; how text is split before the merges is
   only named (`tokenizer.ggml.pre`), so the splitters are written out below.

The tokenizer and config files are small and written whole; weights go to shards of 2 GB, so
that memory stays bounded. The folder appears at once, by a rename, or not at all.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from engine.errors import ModelNotFound, UnknownArchitecture, WeightsMismatch
from engine.model.gguf_tokenizer import tokenizer_config, tokenizer_json

SHARD_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Family:
    """How one GGUF architecture maps to Hugging Face."""

    architecture: str
    model_type: str
    interleaved: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
}

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, target: Path) -> None:
    """
    Write the folder `target` from the GGUF file `source`; does nothing when it is there.

    Raises:
        ModelNotFound: `source` is missing or is no GGUF file.
        UnknownArchitecture: its architecture, tokenizer or rotary scaling has no mapping.
        WeightsMismatch: it holds a tensor that the architecture does not have.
    """
    if target.exists():
        return
    checkpoint = Checkpoint.open(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    # beside the target, so that the rename stays within one file system
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_folder(checkpoint, scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        # another process may have finished the same folder first
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Checkpoint:
    """One GGUF file, its fields by name and its tensors under Hugging Face names."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader
        self.name = str(self.field("general.architecture"))
        if self.name not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise UnknownArchitecture(f"the GGUF architecture is {self.name!r}; converted are {known}")
        self.family = FAMILIES[self.name]

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path}: check the path of the GGUF file")
        try:
            reader = gguf.GGUFReader(os.fspath(path))
        except (ValueError, IndexError, OSError) as error:
            raise ModelNotFound(f"{path} is not a readable GGUF file ({error}): fetch it again") from None
        return cls(reader)

    def field(self, name: str, default: Any = None) -> Any:
        found = self._reader.get_field(name)
        return default if found is None else found.contents()

    def size(self, name: str, default: Any = None) -> Any:
        """
        A field under the architecture's own prefix.

        Raises:
            WeightsMismatch: it is missing and has no default.
        """
        value = self.field(f"{self.name}.{name}", default)
        if value is None:
            raise WeightsMismatch(f"the GGUF file has no field {self.name}.{name}: fetch a complete one")
        return value

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self._reader.tensors)

    def config(self) -> dict[str, Any]:
        """
        The contents of config.json.

        Raises:
            UnknownArchitecture: the file scales its rotary frequencies.
        """
        names = self.tensor_names
        scaling = self.size("rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in names:
            message = "the GGUF file scales its rotary frequencies, which is not converted: use the Hugging Face folder"
            raise UnknownArchitecture(message)

        num_heads = self.size("attention.head_count")
        hidden_size = self.size("embedding_length")
        config = {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
            "hidden_size": hidden_size,
            "intermediate_size": self.size("feed_forward_length"),
            "num_hidden_layers": self.size("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.size("attention.head_count_kv", num_heads),
            "head_dim": self.size("attention.key_length", hidden_size // num_heads),
            "hidden_act": "silu",
            "max_position_embeddings": self.size("context_length"),
            # GGUF keeps it in float32: 9.999999747378752e-06 was written as 1e-05
            "rms_norm_eps": float(str(np.float32(self.size("attention.layer_norm_rms_epsilon")))),
            "rope_theta": float(self.size("rope.freq_base", 10_000.0)),
            "tie_word_embeddings": "output.weight" not in names,
            "dtype": "float32",
        }
        if self.family.interleaved:
            config["attention_bias"] = "blk.0.attn_q.bias" in names
        window = self.size("attention.sliding_window", 0)
        if window and self.name == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return config | self.special_ids()

    def special_ids(self) -> dict[str, int]:
        """The ids of BOS, EOS and padding that the file names."""
        wanted = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        found = {name: self.field(f"tokenizer.ggml.{ours}_token_id") for name, ours in wanted.items()}
        return {name: int(value) for name, value in found.items() if value is not None}

    def tensors(self) -> Iterator[tuple[str, int, "Tensor"]]:
        """Name, bytes as float32, and the tensor itself, in the order of the file."""
        num_heads = self.size("attention.head_count")
        heads = {"attn_q": num_heads, "attn_k": self.size("attention.head_count_kv", num_heads)}
        for raw in self._reader.tensors:
            part = raw.name.split(".")[2] if raw.name.startswith("blk.") else ""
            num_interleaved = heads.get(part, 0) if self.family.interleaved else 0
            yield hugging_face_name(raw.name), int(raw.n_elements) * 4, Tensor(raw, num_interleaved)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor still in the file; `num_interleaved` heads have their rows in pairs."""

    raw: Any
    num_interleaved: int

    def load(self) -> NDArray[np.float32]:
        values = gguf.quants.dequantize(self.raw.data, self.raw.tensor_type).astype(np.float32, copy=False)
        # GGUF lists dimensions from the fastest; numpy from the slowest
        values = values.reshape(tuple(int(size) for size in reversed(self.raw.shape)))
        if self.num_interleaved:
            values = split_halves(values, self.num_interleaved)
        return np.ascontiguousarray(values)


def hugging_face_name(name: str) -> str:
    """
    The Hugging Face name of a GGUF tensor.

    Raises:
        WeightsMismatch: when there is none.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and layer.isdigit() and part in _PER_LAYER:
        return f"model.layers.{layer}.{_PER_LAYER[part]}.{kind}"
    raise WeightsMismatch(f"the GGUF file holds a tensor {name!r} that is not converted: use the Hugging Face folder")


def split_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """
    Undo llama.cpp's interleaving: rows x0 y0 x1 y1 … of each head become x0 x1 … y0 y1 ….

    Args:
        rows: [num_heads * head_dim, ...], a weight or a bias.
    """
    half = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    config = checkpoint.config()
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", checkpoint.special_ids())
    (folder / "tokenizer.json").write_text(tokenizer_json(checkpoint.field), encoding="utf-8")
    length = config["max_position_embeddings"]
    _write_json(folder / "tokenizer_config.json", tokenizer_config(checkpoint.field, max_length=length))
    _write_weights(checkpoint, folder)


def _write_weights(checkpoint: Checkpoint, folder: Path) -> None:
    shards: list[list[tuple[str, Tensor]]] = [[]]
    filled = total = 0
    for name, num_bytes, tensor in checkpoint.tensors():
        if shards[-1] and filled + num_bytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, tensor))
        filled += num_bytes
        total += num_bytes

    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        single = len(shards) == 1
        file_name = "model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        path = folder / file_name
        save_file({name: tensor.load() for name, tensor in shard}, path, metadata={"format": "pt"})
        # safetensors writes for the owner alone; a cache may be shared
        path.chmod(0o644)
        where |= dict.fromkeys((name for name, _ in shard), file_name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
