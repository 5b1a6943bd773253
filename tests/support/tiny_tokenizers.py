"""Small real tokenizers of the common kinds, trained or written here, as model folders."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A worker pulls a job from the stream; the engine answers it.",
    "Größe, café, naïve, 東京, 你好, привет, 🙂👍🏽 and 👩‍👩‍👧 are text too.",
    "Numbers like 1, 22 and 333; code like x += y[0]  # with  two spaces\n\tand tabs.",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: bytes as printable characters, so any token may end inside a character."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's kind: spaces as a mark, a prefix space, and single bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(SENTENCES[:2])) - {" "})
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("o", "g"), ("▁", "▁"), ("i", "n")]
    pieces += ["▁", *letters, "é", "你", *dict.fromkeys("".join(pair) for pair in merges)]
    vocab = {piece: token_id for token_id, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """A unigram-like kind whose decoder takes off the first token's space."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """BERT's kind, whose decoder sets spaces between tokens and tidies punctuation."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace, "word-piece": word_piece}


def add_bos(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Make the tokenizer put <s> before every text, as Llama 3's does."""
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """Write a model folder with tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config), encoding="utf-8")
    return folder
