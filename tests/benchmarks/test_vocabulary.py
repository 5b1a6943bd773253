"""Shapes get a tokenizer that has their size."""

import random
from pathlib import Path

import pytest

from benchmarks import vocabulary
from engine.tokenizer import Tokenizer


@pytest.mark.parametrize("size", [300, 1024, 40_000])
def test_every_id_is_a_token(size: int, tmp_path: Path) -> None:
    """
    The engine takes it for a vocabulary of that size, and any ids make text.
    """
    vocabulary.write(tmp_path, size)
    tokenizer = Tokenizer(tmp_path)

    text = tokenizer.decode(random.Random(1).sample(range(256, size), 40))

    assert size == tokenizer.vocab_size
    assert 80 <= len(text) <= 160
    assert text.isalpha()


def test_text_is_read_as_well(tmp_path: Path) -> None:
    """
    Every byte has a token, and letters are joined.
    """
    vocabulary.write(tmp_path, 5000)
    tokenizer = Tokenizer(tmp_path)

    ids = tokenizer.encode("quick brown é")

    assert "quick brown é" == tokenizer.decode(ids)
    assert len(ids) < len("quick brown é")


def test_a_size_that_letters_do_not_give_is_refused(tmp_path: Path) -> None:
    """
    A vocabulary of another size than asked for would change what the sampler sees.
    """
    with pytest.raises(ValueError, match="cannot be made"):
        vocabulary.write(tmp_path, 100)
