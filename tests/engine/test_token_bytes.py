"""A text is the bytes of its tokens, one after the other."""

import random
from pathlib import Path

import pytest

from engine.errors import GrammarsUnavailable
from engine.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import KINDS, save, word_piece

FOLLOWED = sorted(KINDS.keys() - {"word-piece"})


@pytest.mark.parametrize("kind", FOLLOWED)
def test_texts_are_the_bytes_of_their_tokens(kind: str, tmp_path: Path) -> None:
    """
    Whatever tokens stand beside each other, but for the one space that some decoders take off the start.
    """
    tokenizer = Tokenizer(save(KINDS[kind](), tmp_path))
    pieces = tokenizer.token_bytes(tokenizer.vocab_size)
    rng = random.Random(5)

    for _ in range(300):
        ids = rng.choices(range(tokenizer.vocab_size), k=rng.randint(1, 12))
        expected = b"".join(pieces[token_id] for token_id in ids)
        # some decoders write one U+FFFD where others write several
        if b"\xef\xbf\xbd" in expected.decode(errors="replace").encode():
            continue
        text = tokenizer.decode(ids)
        assert text in (expected.decode(), expected.decode().removeprefix(" "))


@pytest.mark.parametrize("kind", FOLLOWED)
def test_special_tokens_and_holes_have_no_bytes(kind: str, tmp_path: Path) -> None:
    """
    They are no text: a grammar never asks for them.
    """
    tokenizer = Tokenizer(save(KINDS[kind](), tmp_path))

    pieces = tokenizer.token_bytes(tokenizer.vocab_size + 5)

    empty = {token_id for token_id, piece in enumerate(pieces) if not piece}
    assert tokenizer.special_ids <= empty
    assert set(range(tokenizer.vocab_size, tokenizer.vocab_size + 5)) <= empty
    assert len(empty) < tokenizer.vocab_size // 10


def test_tokens_that_hang_on_their_neighbours_have_none(tmp_path: Path) -> None:
    """
    WordPiece writes spaces between tokens by what they are: the error says so.
    """
    tokenizer = Tokenizer(save(word_piece(), tmp_path))

    with pytest.raises(GrammarsUnavailable, match="WordPiece"):
        tokenizer.token_bytes(tokenizer.vocab_size)
