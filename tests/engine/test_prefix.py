"""Names of blocks."""

import numpy as np
import pytest

from engine.prefix import Extras, HashFunction, PrefixHasher, blake2b_128, block_hash, root_hash, xxh3_128
from engine.request import Request, Sequence, TokenIds
from engine.sampling_params import SamplingParams

TOKENS = np.arange(8, dtype=np.int32)


def sequence_of(tokens: list[int], salt: str | None = None) -> Sequence:
    return Sequence(Request("r", np.array(tokens, dtype=np.int32), SamplingParams(), cache_salt=salt), 0)


@pytest.mark.parametrize("hash_function", [xxh3_128, blake2b_128])
def test_a_name_is_sixteen_bytes_and_repeatable(hash_function: HashFunction) -> None:
    """Equal parents, tokens and extras give one name of 16 bytes."""
    first = block_hash(b"p", TOKENS.tobytes(), hash_function=hash_function)

    assert 16 == len(first)
    assert first == block_hash(b"p", TOKENS.copy().tobytes(), hash_function=hash_function)


def test_everything_that_matters_changes_the_name() -> None:
    """Another parent, token, order of tokens, tag or value gives another name."""
    variants: list[tuple[bytes, TokenIds, Extras]] = [
        (b"p", TOKENS, ()),
        (b"q", TOKENS, ()),
        (b"p", TOKENS[::-1], ()),
        (b"p", TOKENS + 1, ()),
        (b"p", TOKENS, (("lora", "a", 1),)),
        (b"p", TOKENS, (("lora", "a", 2),)),
        (b"p", TOKENS, (("lora", "a", "1"),)),
        (b"p", TOKENS, (("lora", "a1"),)),
        (b"p", TOKENS, (("salt", "a", 1),)),
        (b"p", TOKENS, (("image", "a", 1),)),
        (b"p", TOKENS, (("lora", "a"), ("image", 1))),
        (b"p", TOKENS, (("lora",), ("a", 1))),
    ]

    names = {
        block_hash(parent, tokens.tobytes(), extras, hash_function=xxh3_128) for parent, tokens, extras in variants
    }

    assert len(variants) == len(names)


def test_salts_part_requests() -> None:
    """No salt, the empty salt and every other one have roots of their own."""
    salts = [None, "", "a", "b", "\udc80"]

    roots = {root_hash(sequence_of([1], salt).request, hash_function=blake2b_128) for salt in salts}

    assert len(salts) == len(roots)


def test_hashes_grow_with_the_answer_and_do_not_depend_on_the_split() -> None:
    """A block over the border of prompt and answer is named as if it were all prompt."""
    hasher = PrefixHasher(block_size=4)
    whole, grown = sequence_of(list(range(12))), sequence_of(list(range(6)))
    hasher.extend(grown, 1)
    grown.extend(range(6, 12))

    assert hasher.extend(whole, 3) == hasher.extend(grown, 3)
    assert 3 == len(set(whole.block_hashes))


def test_unknown_tokens_have_no_name() -> None:
    """A block with a token that is not known yet cannot be named."""
    sequence = sequence_of([1, 2, 3])
    sequence.num_tokens += 1

    with pytest.raises(IndexError, match="not known yet"):
        PrefixHasher(block_size=4).extend(sequence, 1)
