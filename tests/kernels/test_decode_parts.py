"""How sequences are cut, on a device and by its reference."""

import json
import random
from typing import Any

import pytest
import torch

from kernels.configs import TABLES
from kernels.decode_parts import (
    MAX_PARTS,
    PART_SHIFT,
    PART_UNIT,
    DecodeParts,
    cut_sequences,
    longest_part,
    make_parts,
    max_items,
    programs_of,
)

BATCHES = {
    "one": [5000],
    "short": [1, 64, 65, 0],
    "equal": [700] * 40,
    "uneven": [8000, 3000, 600, 200, 64, 63, 17, 1],
    "large": [2 * 4096, *[300] * 1000],
}


def cut(seq_lens: list[int], programs: int = 2, window: int | None = None) -> DecodeParts:
    parts = make_parts(len(seq_lens), programs, 4, 8, torch.device("cpu"))
    cut_sequences(parts, torch.tensor(seq_lens, dtype=torch.int32), window, programs)
    return parts


@pytest.mark.parametrize("seq_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("programs", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 500])
def test_parts_cover_each_sequence_once(seq_lens: list[int], programs: int, window: int | None) -> None:
    """
    Every sequence has the parts that its tokens fill, one at least, and the memory is large enough for all.
    """
    parts = cut(seq_lens, programs, window)

    counts = parts.firsts.diff().tolist()
    found = [row | part << PART_SHIFT for row, count in enumerate(counts) for part in range(count)]
    assert len(found) <= len(parts.items) == max_items(len(seq_lens), programs)
    assert found + [-1] * (len(parts.items) - len(found)) == parts.items.tolist()
    for length, share, count in zip(seq_lens, parts.shares.tolist(), counts, strict=True):
        seen = min(length, window or length)
        assert 0 == share % PART_UNIT
        assert max(1, -(-seen // share)) == count <= MAX_PARTS


def test_no_batch_has_more_parts_than_there_is_memory_for() -> None:
    """
    Of whatever lengths, in whatever order; one long sequence alone takes all of it.
    """
    draws = random.Random(0)
    for _ in range(200):
        most = draws.choice([65, 500, 4096, 131_072])
        lengths = [draws.choice([1, most, draws.randrange(most)]) for _ in range(draws.choice([1, 2, 33, 100, 700]))]
        programs = draws.choice([1, 2, 3, 8, 64])
        assert cut(lengths, programs).firsts[-1] <= max_items(len(lengths), programs)
    assert 32 == max_items(1, 1) == cut([20_000], 1).firsts[-1]


def test_a_part_is_short_beside_the_batch() -> None:
    """
    A large batch is cut into long parts, a small one into parts that are worth a program of their own.
    """
    assert [64, 125, 512, 1589] == [longest_part(batch * 512, 4) for batch in (1, 32, 256, 1024)]


def test_what_is_long_among_many_is_cut() -> None:
    """
    One long sequence before a thousand short ones comes in many parts, they in one each.
    """
    counts = cut(BATCHES["large"]).firsts.diff().tolist()

    assert counts[0] >= 8
    assert {1} == set(counts[1:])


def test_a_smaller_batch_has_the_same_memory() -> None:
    """
    Views, as graphs of all sizes share what they write.
    """
    parts = make_parts(100, 2, 4, 8, torch.device("cpu"))

    some = parts.rows(10, 2)

    assert max_items(10, 2) == len(some.items) == len(some.outputs)
    assert some.outputs.data_ptr() == parts.outputs.data_ptr()
    assert [10, 11, 20] == [len(some.shares), len(some.firsts), len(some.arrivals)]


def test_a_program_may_have_several_heads() -> None:
    """
    As the tables of configurations say, and one where they do not divide evenly; without a GPU always one.
    """
    assert [8, 3] == [programs_of(4 * heads, heads, 128, torch.bfloat16) for heads in (8, 3)]


def test_small_steps_have_as_many_heads_in_a_program() -> None:
    """
    Parts are counted once for batches of all sizes: a rule for small ones changes all but the heads.
    """
    rules = json.loads((TABLES / "decode_attention.json").read_text())
    keys = {tuple(sorted((rule["when"] | {"few": 0}).items())) for rule in rules if "few" in rule["when"]}

    assert keys
    for key in keys:
        heads = [_config(rules, dict(key) | {"few": few})["heads"] for few in (0, 1)]
        assert heads[0] == heads[1], f"{dict(key)}: {heads}"


def _config(rules: list[dict[str, Any]], facts: dict[str, int | str]) -> dict[str, int]:
    config: dict[str, int] = {}
    for rule in rules:
        if rule["when"].items() <= facts.items():
            config |= rule["use"]
    return config
