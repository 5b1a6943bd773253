"""The bytes that each token adds to a text, by the rules of the tokenizer's decoder."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import tokenizers

from engine.errors import GrammarsUnavailable

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(backend: tokenizers.Tokenizer, vocab_size: int, left_out: Collection[int]) -> list[bytes]:
    """
    Give each token's bytes as they stand inside a text, by id.

    Some decoders take one space off the start of the whole text; that is no token's doing and not seen here.

    Args:
        left_out: Tokens without text, as special ones; these, and ids that do not exist, get no bytes.

    Raises:
        GrammarsUnavailable: the decoder joins tokens by what stands beside them.
    """
    steps = _steps(json.loads(backend.to_str())["decoder"])
    kinds = {step["type"] for step in steps}
    byte_level = "ByteLevel" in kinds
    spaces = {step["replacement"] for step in steps if step["type"] == "Metaspace"}
    spaces |= {step["pattern"]["String"] for step in steps if step["type"] == "Replace"}
    table = {char: byte for byte, char in enumerate(_byte_level_chars())}
    out = []
    for token_id in range(vocab_size):
        token = None if token_id in left_out else backend.id_to_token(token_id)
        if token is None:
            out.append(b"")
        elif byte_level:
            # a token with other characters is an added one, and stands for itself
            known = all(char in table for char in token)
            out.append(bytes(table[char] for char in token) if known else token.encode())
        elif "ByteFallback" in kinds and (piece := _BYTE_PIECE.fullmatch(token)):
            out.append(bytes([int(piece[1], 16)]))
        else:
            for mark in spaces:
                token = token.replace(mark, " ")
            out.append(token.encode())
    return out


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        decoder = {"type": "no"}
    steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    for step in steps:
        kind = step["type"]
        plain = kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")
        marks = kind == "Replace" and "String" in step["pattern"] and step["content"] == " "
        strips = kind == "Strip" and step["content"] == " " and step["stop"] == 0
        if not (plain or marks or strips):
            raise GrammarsUnavailable(
                f"the tokenizer of this model has a decoder ({kind}) whose text grammars cannot follow: "
                "leave json_schema, regex and choice out"
            )
    return steps


def _byte_level_chars() -> list[str]:
    """The printable character that stands for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
