"""Names of blocks."""

import random
import tracemalloc

import numpy as np
import pytest

from engine.prefix import MIN_RUN, HashFunction, PrefixHasher, blake2b_128, block_names, root_hash, xxh3_128
from engine.request import Request, Sequence
from engine.sampling_params import SamplingParams

TOKENS = np.arange(8, dtype=np.int32)


def sequence_of(tokens: list[int], salt: str | None = None) -> Sequence:
    return Sequence(Request("r", np.array(tokens, dtype=np.int32), SamplingParams(), cache_salt=salt), 0)


def plain_names(sequence: Sequence, num_blocks: int, *, block_size: int, hash_function: HashFunction) -> list[bytes]:
    """The names as they are defined, one block after the other."""
    names, parent = [], root_hash(sequence.request, hash_function=hash_function)
    for start in range(0, num_blocks * block_size, block_size):
        tokens = sequence.token_ids(start, start + block_size).tobytes()
        parent = hash_function(parent + tokens)
        names.append(parent)
    return names


def two_bits(data: bytes) -> bytes:
    """A hash that collides all the time."""
    return bytes([sum(data) % 4])


@pytest.mark.parametrize("hash_function", [xxh3_128, blake2b_128])
def test_a_name_is_sixteen_bytes_and_repeatable(hash_function: HashFunction) -> None:
    """Equal parents and tokens give one name of 16 bytes."""
    [first] = block_names(b"p", TOKENS, block_size=8, hash_function=hash_function)

    assert 16 == len(first)
    assert [first] == block_names(b"p", TOKENS.copy(), block_size=8, hash_function=hash_function)


def test_everything_that_matters_changes_the_name() -> None:
    """Another parent, token or order of tokens gives another name, and to all blocks behind it."""
    variants = [(b"p", TOKENS), (b"q", TOKENS), (b"p", TOKENS[::-1]), (b"p", TOKENS + 1)]

    names = {
        name
        for parent, tokens in variants
        for name in block_names(parent, tokens, block_size=4, hash_function=xxh3_128)
    }

    assert 2 * len(variants) == len(names)


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


@pytest.mark.parametrize("remembered", [5_000, 1 << 19])
@pytest.mark.parametrize("hash_function", [xxh3_128, blake2b_128, two_bits])
def test_names_do_not_depend_on_what_was_named_before(
    hash_function: HashFunction, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share beginnings of any length, and their answers, have the names that they would have alone."""
    monkeypatch.setattr("engine.prefix.MAX_RUN_TOKENS", remembered)
    rng = random.Random(0)
    hasher = PrefixHasher(block_size=2, hash_function=hash_function)
    known = [sequence_of([rng.randrange(3) for _ in range(rng.randint(0, 400))])]
    for _ in range(600):
        other = rng.choice(known)
        tokens = other.token_ids(0, rng.randint(0, other.num_known)).tolist()
        tokens += [rng.randrange(3) for _ in range(rng.choice((1, 9, 150)))]
        sequence = sequence_of(tokens[:1000], rng.choice((None, "a", "b")))
        while True:
            count = rng.randint(0, sequence.num_known // 2)
            names = hasher.extend(sequence, count)
            assert plain_names(sequence, len(names), block_size=2, hash_function=hash_function) == names
            assert len(names) >= count
            if rng.random() < 0.5:
                break
            sequence.extend([rng.randrange(3) for _ in range(rng.choice((1, 9, 150)))])
        known.append(sequence)


def test_a_prefix_that_was_named_before_is_not_hashed_again() -> None:
    """Of each further prompt only its own blocks are hashed, also where prompts part at several places."""
    hashed = list[bytes]()

    def counted(data: bytes) -> bytes:
        hashed.append(data)
        return xxh3_128(data)

    hasher = PrefixHasher(block_size=4, hash_function=counted)
    own = 5
    shared, middle = list(range(4 * MIN_RUN)), list(range(1000, 1000 + 4 * MIN_RUN))
    prompts = [shared + middle[: 4 * MIN_RUN * (index % 2)] + [9000 + index] * 4 * own for index in range(8)]
    for index, prompt in enumerate(prompts):
        hashed.clear()
        hasher.extend(sequence_of(prompt), len(prompt) // 4)
        # the name of the empty prefix is one more
        assert index < 2 or 1 + own == len(hashed)


def test_what_is_used_is_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that is asked for again and again outlives others; a prompt larger than all that is kept is not kept."""
    hashed = list[bytes]()

    def counted(data: bytes) -> bytes:
        hashed.append(data)
        return xxh3_128(data)

    monkeypatch.setattr("engine.prefix.MAX_RUN_TOKENS", 3 * MIN_RUN)
    hasher = PrefixHasher(block_size=1, hash_function=counted)

    def num_hashes(first: int, length: int = MIN_RUN) -> int:
        hashed.clear()
        hasher.extend(sequence_of(list(range(first, first + length))), length)
        # but for the name of the empty prefix
        return len(hashed) - 1

    shared = 10_000
    assert MIN_RUN == num_hashes(shared)
    for other in range(0, 5000, 1000):
        assert MIN_RUN == num_hashes(other)
        assert 0 == num_hashes(shared)
    assert 5 * MIN_RUN == num_hashes(20_000, 5 * MIN_RUN)
    assert 0 == num_hashes(shared)


def test_little_is_remembered() -> None:
    """Prompts that share nothing leave a few megabytes behind, however many there are."""
    rng = np.random.default_rng(0)
    hasher = PrefixHasher(block_size=16)
    prompts = [sequence_of(rng.integers(0, 1 << 20, 4096).tolist()) for _ in range(300)]
    tracemalloc.start()
    while prompts:
        hasher.extend(prompts.pop(), 256)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert held < 6e6
