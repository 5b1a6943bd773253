"""
Rebuild a byte-level BPE tokenizer from the fields of a GGUF file.

The file lists tokens, their types and the merges. How text is cut into words before merging
is a name, `tokenizer.ggml.pre`; `SPLITTERS` spells out the names that are known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import UnknownArchitecture

Field = Callable[[str], Any]

# values of tokenizer.ggml.token_type
CONTROL = 3
USER_DEFINED = 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Splitter:
    """
    How text is cut before the merges.

    Args:
        pattern: Words, by regular expression; None is GPT-2's own, after single digits.
        nfc: Compose characters first.
        whole_words: A word that is a token is taken as it is, without merging (Llama 3).
        bos: Whether BOS goes first where the file does not say.
    """

    pattern: str | None = None
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is None:
            first: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
        else:
            first = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        return pre_tokenizers.Sequence([first, by_bytes])


SPLITTERS = {
    "smollm": Splitter(),
    "llama-bpe": Splitter(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole_words=True, bos=True),
    "qwen2": Splitter(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", nfc=True),
}


def tokenizer_json(field: Field) -> str:
    """
    The contents of tokenizer.json.

    Raises:
        UnknownArchitecture: the tokenizer is not byte-level BPE, or its splitter is not known.
    """
    splitter = _splitter(field)
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [_pair(merge) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitter.whole_words))
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(tokens, field("tokenizer.ggml.token_type") or []))

    if _adds_bos(field, splitter):
        bos_id = int(field("tokenizer.ggml.bos_token_id"))
        bos = tokens[bos_id]
        # in a template a special token stands by name, its id beside it
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    return tokenizer.to_str()


def tokenizer_config(field: Field, *, max_length: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json: special tokens by name, and the chat template."""
    tokens: list[str] = field("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        # the class that reads tokenizer.json as it stands; GPT2Tokenizer would drop the digit splitter
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(field, _splitter(field)),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = field(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            config[f"{ours}_token"] = tokens[int(token_id)]
    template = field("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _splitter(field: Field) -> Splitter:
    kind = field("tokenizer.ggml.model")
    if kind != "gpt2":
        message = f"the GGUF tokenizer is {kind!r}; byte-level BPE ('gpt2') is converted: use the Hugging Face folder"
        raise UnknownArchitecture(message)
    name = field("tokenizer.ggml.pre")
    if name not in SPLITTERS:
        known = ", ".join(sorted(SPLITTERS))
        raise UnknownArchitecture(f"the GGUF pre-tokenizer is {name!r}; converted are {known}")
    return SPLITTERS[name]


def _adds_bos(field: Field, splitter: Splitter) -> bool:
    told = field("tokenizer.ggml.add_bos_token")
    wanted = splitter.bos if told is None else bool(told)
    return wanted and field("tokenizer.ggml.bos_token_id") is not None


def _pair(merge: str) -> tuple[str, str]:
    # byte-level tokens hold no space: it is written as Ġ
    left, _, right = merge.partition(" ")
    return left, right


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    kinds = {CONTROL: True, USER_DEFINED: False}
    return [
        AddedToken(token, special=kinds[kind], normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in kinds
    ]
