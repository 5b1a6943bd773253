"""Where an answer stands in its grammar, and how grammars are compiled and kept."""

import json
import sys
from concurrent.futures import wait

import numpy as np
import pytest

from engine.errors import GrammarsUnavailable, InvalidGrammar
from engine.grammar import Grammar, GrammarState, Mask, bits_of, num_words
from engine.grammar_compiler import CompiledGrammar, GrammarCompiler
from engine.sampling_params import SamplingParams

# by id: the digits, then some letters, an end without text, and one more token with text
PIECES = [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"a", b"b", b"", b"ab", *[b""] * 26, b"z"]
EOS, A, B, AB, Z = 12, 10, 11, 13, 40


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: list(PIECES), {EOS})


def allowed(state: GrammarState) -> set[int]:
    return tokens_in(state.mask())


def tokens_in(mask: Mask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def compiled(compiler: GrammarCompiler, kind: str, text: str) -> CompiledGrammar:
    return compiler.submit(Grammar(kind, text)).result(30)  # type: ignore[arg-type]


def test_bits_are_tokens() -> None:
    """
    Token 0 is the lowest bit of the first word; a vocabulary takes as many words as it needs.
    """
    assert [1, 1, 2] == [num_words(size) for size in (1, 32, 33)]
    assert [1, 0] == bits_of([0], 33).tolist()
    assert [-(2**31), 1] == bits_of([31, 32], 33).tolist()
    assert {5, 31, 32} == tokens_in(bits_of([32, 5, 31], 50))


def test_ends_are_allowed_where_the_text_is_complete(compiler: GrammarCompiler) -> None:
    """
    And nowhere else; text that can go on may.
    """
    state = compiled(compiler, "regex", "a[0-9]*b?").start(SamplingParams())
    assert {A, AB} == allowed(state)

    assert state.accept(A)

    assert {*range(10), B, EOS} == allowed(state)
    assert not state.exhausted
    assert state.accept(B)
    assert ({EOS}, True) == (allowed(state), state.exhausted)
    assert state.accept(EOS)


def test_ignored_eos_is_never_allowed(compiler: GrammarCompiler) -> None:
    """
    The answer then ends where nothing can follow, or by its length.
    """
    state = compiled(compiler, "regex", "ab?").start(SamplingParams(ignore_eos=True))

    assert state.accept(A)
    assert {B} == allowed(state)
    assert state.accept(B)
    assert (set(), True, False) == (allowed(state), state.exhausted, state.stuck)


def test_named_ends_end_a_complete_text_too(compiler: GrammarCompiler) -> None:
    """
    A stop token is allowed where the text is complete, and where it is text that may follow.
    """
    params = SamplingParams(stop_token_ids=(Z, B))
    state = compiled(compiler, "regex", "ab[0-9]").start(params)

    assert {A, AB} == allowed(state)
    assert state.accept(A)
    assert {B} == allowed(state)
    assert state.accept(B)
    assert state.accept(3)
    assert {EOS, Z, B} == allowed(state)
    assert state.accept(Z)


def test_ends_wait_for_min_tokens_unless_nothing_else_can_follow(compiler: GrammarCompiler) -> None:
    """
    The grammar wins over min_tokens.
    """
    grammar = compiled(compiler, "regex", "[0-9]{1,3}")
    state = grammar.start(SamplingParams(min_tokens=2, stop_token_ids=(7,)))

    assert set(range(10)) - {7} == allowed(state)
    assert state.accept(1)
    assert set(range(10)) - {7} == allowed(state)
    assert state.accept(1)
    assert {*range(10), EOS} == allowed(state)

    state = grammar.start(SamplingParams(min_tokens=50))
    assert all(state.accept(1) for _ in range(3))
    assert ({EOS}, True) == (allowed(state), state.exhausted)


def test_a_token_that_may_not_follow_is_refused(compiler: GrammarCompiler) -> None:
    """
    Whatever it is: text of another kind, an end too early, a hole, an id that there is not.
    """
    for token in (B, 14, 99):
        state = compiled(compiler, "regex", "a+").start(SamplingParams())
        assert not state.accept(token)
        assert state.refused


def test_answers_of_one_grammar_do_not_disturb_each_other(compiler: GrammarCompiler) -> None:
    """
    Each has its own place in it.
    """
    grammar = compiled(compiler, "choice", json.dumps(["ab1", "ab2", "b"]))
    first, second = grammar.start(SamplingParams()), grammar.start(SamplingParams())

    assert first.accept(AB)

    assert {1, 2} == allowed(first)
    assert {A, AB, B} == allowed(second)


def test_a_text_without_tokens_is_stuck(compiler: GrammarCompiler) -> None:
    """
    The vocabulary cannot write what the grammar asks for.
    """
    state = compiled(compiler, "regex", "a[0-9x]x").start(SamplingParams())
    assert state.accept(A)
    assert state.accept(4)

    assert (set(), True) == (allowed(state), state.stuck)


@pytest.mark.parametrize("texts", [["a"], ['"1\\', "b\n\t\x7f"], ["é 🙂 東京", "\u2028"], ["a|b", "(a)", "[0]"]])
def test_choices_are_taken_as_they_stand(texts: list[str]) -> None:
    """
    No character has a meaning of its own.
    """
    pieces = [bytes([byte]) for byte in range(1, 256)]
    grammar = GrammarCompiler(lambda: pieces, set()).submit(Grammar("choice", json.dumps(texts))).result(30)

    for text in texts:
        state = grammar.start(SamplingParams())
        assert all(state.accept(byte - 1) for byte in text.encode())
        assert state.exhausted


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    """
    Also while the first is being compiled; another one is another.
    """
    first, second, other = (compiler.submit(Grammar("regex", text)) for text in ("ab{3}", "ab{3}", "ab{4}"))

    assert first is second
    assert first is not other


def test_those_used_last_are_kept() -> None:
    """
    Beyond the bytes that may be kept the oldest goes, and is compiled again when it is asked for.
    """
    compiler = GrammarCompiler(lambda: list(PIECES), {EOS}, cache_bytes=1)
    names = ["a", "b", "z"]
    futures = [compiler.submit(Grammar("regex", name)) for name in names]
    wait(futures)

    assert futures[2] is compiler.submit(Grammar("regex", "z"))
    compiler.submit(Grammar("regex", "0"))

    assert futures[0] is not compiler.submit(Grammar("regex", "a"))


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("regex", "a(?=b)", "options.regex: .*Lookahead"),
        ("regex", "", "no text that this model can write"),
        ("regex", "x", "no text that this model can write"),
        ("json_schema", '{"type": "foo"}', "options.json_schema: Unsupported type"),
        ("json_schema", '{"$ref": "#/$defs/a"}', "options.json_schema: Cannot find"),
        ("json_schema", "no json", "options.json_schema: "),
    ],
)
def test_what_the_library_refuses_is_a_typed_error(compiler: GrammarCompiler, kind: str, text: str, why: str) -> None:
    """
    In the library's words, without the places in its sources.
    """
    with pytest.raises(InvalidGrammar, match=why) as caught:
        compiled(compiler, kind, text)

    assert ".cc" not in str(caught.value)
    assert "invalid_grammar" == caught.value.code


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Only those who ask for a grammar meet it.
    """
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    compiler = GrammarCompiler(lambda: list(PIECES), {EOS})

    with pytest.raises(GrammarsUnavailable, match=r"'\.\[structured\]'") as caught:
        compiled(compiler, "regex", "a")

    assert "not_supported" == caught.value.code
