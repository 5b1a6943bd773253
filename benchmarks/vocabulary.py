"""A tokenizer for model shapes, which have none: the worker makes text of what comes out."""

import json
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


def write(folder: Path, size: int) -> None:
    """
    Write a byte-level BPE of exactly `size` tokens, the most of four letters, as tokenizer.json.

    Text from random ids then has about as many characters a token as a real vocabulary gives.

    Args:
        size: From 256, the single bytes, up to some 475,000.
    """
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    words = ("".join(letters) for length in (2, 3, 4) for letters in product(ascii_lowercase, repeat=length))
    for word in islice(words, max(0, size - len(tokens))):
        merges.append((word[:-1], word[-1]))
        tokens.append(word)
    if len(tokens) != size:
        raise ValueError(f"a vocabulary of {size:,} tokens cannot be made of letters")
    tokenizer = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
