from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine.errors import ModelNotFound, UnknownArchitecture, WeightsMismatch
from engine.model.gguf import convert, hugging_face_name, split_halves

SIZES = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
CONTROL, NORMAL = 3, 1
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_tokens() -> list[str]:
    """The 256 characters that stand for bytes, in the order of a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + place) for place in range(len(hidden))]


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: Any, arch: str, *, splitter: str, tokenizer: str = "gpt2") -> None:
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(50_000.0)
    tokens = ["<|end|>", "<|user|>", *byte_tokens(), "he", "ll", "hell", "12"]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL, CONTROL] + [NORMAL] * 260)
    writer.add_token_merges(["h e", "l l", "he ll", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = gguf_name(name)
        values = tensor.numpy()
        part = theirs.split(".")[-2]
        if arch == "llama" and part in heads:
            values = interleave(values, heads[part])
        writer.add_tensor(theirs, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, **changes)).eval()


def tiny_qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(2)
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters=rope)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("proj.bias"):
            torch.nn.init.normal_(weight)
    return model


@pytest.mark.parametrize(
    ("arch", "splitter", "make"),
    [
        ("llama", "smollm", lambda: tiny_llama(tie_word_embeddings=True)),
        ("llama", "llama-bpe", lambda: tiny_llama(tie_word_embeddings=False)),
        ("qwen2", "qwen2", tiny_qwen2),
    ],
    ids=["llama-tied", "llama-untied", "qwen2"],
)
def test_converted_folder_gives_the_logits_of_the_original(tmp_path: Path, arch: str, splitter: str, make: Any) -> None:
    """
    Names, shapes, permuted rows and sizes survive the way through GGUF and back, bit for bit.
    """
    original = make()
    write_gguf(tmp_path / "tiny.gguf", original, arch, splitter=splitter)

    convert(tmp_path / "tiny.gguf", tmp_path / "folder")

    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(original(ids).logits, converted(ids).logits)


def test_splitter_cuts_digits_singly_for_smollm(tmp_path: Path) -> None:
    """
    SmolLM2 never merges digits, though its merges would; special tokens are whole; text comes back.
    """
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tie_word_embeddings=True), "llama", splitter="smollm")
    convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    tokenizer = Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    text = "<|user|>hello 12 é🚀<|end|>"

    encoded = tokenizer.encode(text)

    assert ["<|user|>", "hell", "o", "Ġ", "1", "2"] == encoded.tokens[:6]
    assert [1, 0] == [encoded.ids[0], encoded.ids[-1]]
    assert text == tokenizer.decode(encoded.ids, skip_special_tokens=False)
    assert "hello 12 é🚀" == tokenizer.decode(encoded.ids)


def test_bos_goes_first_where_the_family_wants_it(tmp_path: Path) -> None:
    """
    Llama 3 files need not say that BOS is added; SmolLM2's say nothing and get none.
    """
    first = {}
    for splitter in ("llama-bpe", "smollm"):
        write_gguf(tmp_path / f"{splitter}.gguf", tiny_llama(tie_word_embeddings=True), "llama", splitter=splitter)
        convert(tmp_path / f"{splitter}.gguf", tmp_path / splitter)
        first[splitter] = Tokenizer.from_file(str(tmp_path / splitter / "tokenizer.json")).encode("hello").tokens[0]

    assert {"llama-bpe": "<|user|>", "smollm": "hell"} == first


def test_split_halves_undoes_the_interleaving() -> None:
    """
    Rows come back in the order that they had, for every head.
    """
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)

    assert np.array_equal(rows, split_halves(interleave(rows, 3), 3))


def test_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    """
    A second conversion reads nothing and changes nothing.
    """
    folder = tmp_path / "folder"
    folder.mkdir()

    convert(tmp_path / "missing.gguf", folder)

    assert [] == list(folder.iterdir())


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    """
    The error names the file, and nothing is left behind.
    """
    (tmp_path / "broken.gguf").write_bytes(b"not a model at all, though long enough to be read")

    for name in ("missing.gguf", "broken.gguf"):
        with pytest.raises(ModelNotFound, match=name):
            convert(tmp_path / name, tmp_path / "folder")
    assert ["broken.gguf"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        ("bert", {"splitter": "smollm"}, "bert"),
        ("llama", {"splitter": "poro"}, "poro"),
        ("llama", {"splitter": "smollm", "tokenizer": "llama"}, "byte-level BPE"),
    ],
)
def test_unknown_kinds_are_refused_by_name(tmp_path: Path, arch: str, changes: dict[str, str], named: str) -> None:
    """
    An architecture, splitter or tokenizer without a mapping is an error, never a guess.
    """
    write_gguf(tmp_path / "odd.gguf", tiny_llama(tie_word_embeddings=True), arch, **changes)

    with pytest.raises(UnknownArchitecture, match=named):
        convert(tmp_path / "odd.gguf", tmp_path / "folder")
    assert ["odd.gguf"] == [path.name for path in tmp_path.iterdir()]


def test_unknown_tensor_is_refused() -> None:
    """
    A tensor that would silently be left out is an error.
    """
    with pytest.raises(WeightsMismatch, match="ffn_gate_exps"):
        hugging_face_name("blk.0.ffn_gate_exps.weight")
