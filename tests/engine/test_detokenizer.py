"""Pieces of text join to the full decode, and stop strings end it where they should."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopChecker
from engine.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import KINDS, SENTENCES, byte_fallback, byte_level, save


@pytest.fixture(params=list(KINDS), ids=str)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    kind: Callable[[], tokenizers.Tokenizer] = KINDS[request.param]
    return Tokenizer(save(kind(), tmp_path))


def _byte_level_ids() -> list[int]:
    """The token of each byte in the byte-level vocabulary, which writes unprintable ones as letters from 256 up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    backend = byte_level()
    return [backend.token_to_id(letters[byte]) for byte in range(256)]


def _pieces(tokenizer: Tokenizer, tokens: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_stream_to_their_full_decode(tokenizer: Tokenizer, skip: bool) -> None:
    """
    Any ids, special, byte, unknown or broken, give in pieces exactly the text of decoding them at once.
    """
    rng = random.Random(7)
    for _ in range(300):
        pool = range(tokenizer.vocab_size + 3)
        if rng.random() < 0.7:
            pool = rng.choices(pool, k=rng.choice([2, 5, 30]))  # type: ignore[assignment]
        tokens = [rng.choice(pool) for _ in range(rng.randrange(0, 90))]

        assert tokenizer.decode(tokens, skip_special_tokens=skip) == "".join(_pieces(tokenizer, tokens, skip=skip))


def test_broken_bytes_stream_to_their_full_decode(tmp_path: Path) -> None:
    """
    Bytes of whole, cut and impossible characters, in any order, lose and gain nothing.
    """
    rng = random.Random(3)
    level, fallback = (Tokenizer(save(kind(), tmp_path / kind.__name__)) for kind in (byte_level, byte_fallback))
    tables = {level: _byte_level_ids(), fallback: sorted(fallback.byte_ids)}
    scraps = [
        "🙂".encode(),
        "你".encode(),
        "é".encode(),
        b"a",
        b" ",
        b"\xf0\x9f",
        b"\xe4\xbd",
        b"\xc3",
        b"\xa9",
        b"\xff",
    ]
    scraps += [b"\xe0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", REPLACEMENT.encode()]
    for tokenizer, ids in tables.items():
        for _ in range(400):
            content = b"".join(rng.choices(scraps, k=rng.randrange(1, 40)))
            tokens = [ids[byte] for byte in content]
            for place in range(0, len(tokens), rng.choice([3, 7, 100])):
                tokens.insert(place, rng.choice([*tokenizer.special_ids, *tokenizer.encode("dog").tolist()]))

            assert tokenizer.decode(tokens) == "".join(_pieces(tokenizer, tokens))


def test_text_comes_as_soon_as_it_is_settled(tokenizer: Tokenizer) -> None:
    """
    Plain words are given with the token that completes them, not at the end.
    """
    tokens = tokenizer.encode(SENTENCES[0]).tolist()
    pieces = _pieces(tokenizer, tokens)

    assert "" == pieces[-1]
    assert len([piece for piece in pieces if piece]) >= len(tokens) - 1


def test_half_a_character_waits_for_the_rest(tmp_path: Path) -> None:
    """
    The bytes of an emoji give nothing until the last, and U+FFFD if the answer ends before it.
    """
    tokenizer = Tokenizer(save(byte_level(), tmp_path))
    tokens = [_byte_level_ids()[byte] for byte in "🙂".encode()]

    assert ["", "", "", "🙂", ""] == _pieces(tokenizer, tokens)
    assert ["", "", "", REPLACEMENT] == _pieces(tokenizer, tokens[:3])


def test_special_tokens_do_not_part_a_character(tmp_path: Path) -> None:
    """
    A special token between two bytes of a character is left out of the text, as in a full decode.
    """
    tokenizer = Tokenizer(save(byte_fallback(), tmp_path))
    bytes_start = min(tokenizer.byte_ids)
    first, second, third = (bytes_start + byte for byte in "東".encode())

    assert "東" == "".join(_pieces(tokenizer, [first, 1, second, 2, third]))


def _run(stop: tuple[str, ...], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stop, include_stop=include)
    shown = [checker.push(piece) for piece in pieces]
    return [*shown, checker.finish()], checker.matched


def test_a_stop_string_may_span_tokens() -> None:
    """
    "E" and "ND" end the text before both; nothing of it is shown, and nothing after it.
    """
    assert (["so ", "", "", "", ""], "END") == _run(("END",), ["so ", "E", "ND", " more"])


def test_what_turns_out_harmless_is_shown_late() -> None:
    """
    Text held back as a possible stop is shown once it cannot be one, or at the end.
    """
    assert (["a", "", "ENx", "", "EN"], None) == _run(("END",), ["a", "EN", "x", "EN"])
    assert (["", "aa", "aa", ""], "aab") == _run(("aab",), ["aa", "aa", "aab"])


@pytest.mark.parametrize(
    ("stop", "text", "before", "matched"),
    [
        ((" ",), "one two", "one", " "),
        (("two", "one"), "zero one two", "zero ", "one"),
        (("END", "ND"), "the END", "the ", "END"),
        (("c", "bcd"), "abcd", "ab", "c"),
        (("aa",), "baaa", "b", "aa"),
        (("\n\n", "\n"), "x\n\ny", "x", "\n"),
        (("🙂",), "so 🙂!", "so ", "🙂"),
        (("same", "same"), "the same", "the ", "same"),
    ],
)
def test_the_first_match_to_end_wins_however_the_text_is_cut(
    stop: tuple[str, ...], text: str, before: str, matched: str
) -> None:
    """
    Whole, by character, or in any two pieces: the same cut, with and without the stop string.
    """
    cuts = [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]
    for pieces in cuts:
        shown, found = _run(stop, pieces)
        assert (before, matched) == ("".join(shown), found)
        kept, found = _run(stop, pieces, include=True)
        assert (before + matched, matched) == ("".join(kept), found)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_the_shown_text_never_contains_a_stop_string(stop: list[str], pieces: list[str]) -> None:
    """
    At every moment what is shown is a prefix of the cut text, and holds no stop string.
    """
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(one) for one in stop)]
    longest = max((len(one) for one in stop if ends and text[: ends[0]].endswith(one)), default=0)
    cut = text[: ends[0] - longest] if ends else text

    shown, matched = _run(tuple(stop), pieces)

    assert cut == "".join(shown)
    assert bool(ends) == (matched is not None)


def test_skipped_text_is_shown_and_not_searched() -> None:
    """
    Text of tokens within min_tokens may hold stop strings, whole or begun, and goes out at once.
    """
    checker = StopChecker(("END",))

    assert "an END, E" == checker.skip("an END, E")
    assert "ND " == checker.push("ND ")
    assert "" == checker.push("END")
    assert "END" == checker.matched


def test_without_stop_strings_all_text_passes() -> None:
    """
    No stop string, nothing held back.
    """
    assert (["a", "b", ""], None) == _run((), ["a", "b"])
