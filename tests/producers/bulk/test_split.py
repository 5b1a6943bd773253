"""Cutting texts by tokens."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.bulk.split import Counter, Estimate, Tokens, gather, split
from tests.support.tiny_tokenizers import SENTENCES, byte_level, metaspace
from worker.fake_engine import ByteTokenizer

COUNTERS: dict[str, Counter] = {
    "estimate": Estimate(),
    "bytes": Tokens(ByteTokenizer().to_json()),
    "byte-level": Tokens(byte_level().to_str()),
    "metaspace": Tokens(metaspace().to_str()),
}


@pytest.mark.parametrize("name", COUNTERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_parts_joined_are_the_text_and_each_fits(name: str, data: st.DataObject) -> None:
    """
    Whatever the text is, nothing is lost or doubled, and no part has more tokens than the limit.
    """
    words = st.one_of(st.sampled_from([*SENTENCES, "\n\n", "\n", " ", ". ", "x" * 90]), st.text(max_size=12))
    text = "".join(data.draw(st.lists(words, max_size=40)))
    limit = data.draw(st.integers(1, 60))
    counter = COUNTERS[name]

    parts = split(text, limit, counter)

    assert text == "".join(parts)
    assert [] == [part for part in parts if len(part) > 1 and len(counter.ends(part)) > limit]
    assert all(parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One two.\n\nThree four.\nFive.", ["One two.\n\n", "Three four.\n", "Five."]),
        ("A first one. A second one. A third.", ["A first one. ", "A second one. ", "A third."]),
        ("abcdefghijklmnopqrstuvwxyz", ["abcdefghijklmn", "opqrstuvwxyz"]),
    ],
)
def test_cuts_are_at_the_best_border(text: str, parts: list[str]) -> None:
    """
    A paragraph before a line, a line before a sentence, a sentence before a word, and any place before none.
    """
    assert parts == split(text, 14, COUNTERS["bytes"])


def test_a_text_that_fits_is_one_part() -> None:
    """
    Nothing is cut that need not be; nothing of nothing.
    """
    assert ["short"] == split("short", 5, COUNTERS["bytes"])
    assert [] == split("", 5, COUNTERS["bytes"])


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_are_joined_in_order(seed: int) -> None:
    """
    As many answers as fit stand together, none is left out, and the order is kept.
    """
    draw = random.Random(seed)
    texts = [f"answer {number} " + "x" * draw.randrange(60) for number in range(30)]
    counter = COUNTERS["bytes"]

    groups = gather(texts, 150, counter)

    assert "\n\n".join(texts) == "\n\n".join(groups)
    assert [] == [group for group in groups if len(counter.ends(group)) > 150]
    assert len(groups) < 20


def test_an_estimate_is_three_bytes_a_token() -> None:
    """
    The same as the queue counts, also inside characters of several bytes.
    """
    for text in ("", "a", "abc", "abcd", "日本", "é" * 100):
        ends = Estimate().ends(text)
        assert -(-len(text.encode()) // 3) == len(ends)
        assert len(text) == (ends[-1] if ends else 0)
