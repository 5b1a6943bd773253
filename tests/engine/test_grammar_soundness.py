"""
Whatever schema or regex a submit lets through, every text that its grammar lets through is right by it.

The texts are random walks through the grammar's masks, over a vocabulary of single bytes and of pieces
that span several parts of JSON; another library validates.
"""

import datetime
import ipaddress
import itertools
import json
import random
import re
import uuid
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from engine.errors import InvalidGrammar
from engine.grammar import Grammar, GrammarState
from engine.grammar_compiler import GrammarCompiler
from engine.sampling_params import SamplingParams
from pagemill.json_formats import PATTERNS
from pagemill.json_schemas import check_json_schema, with_json_patterns
from pagemill.regexes import check_regex
from tests.support.random_schemas import random_regex, random_schema

PIECES = [bytes([byte]) for byte in range(256)]
PIECES += [
    b'{"',
    b'": ',
    b'", "',
    b'"}',
    b"}}",
    b"]}",
    b'"]',
    b", ",
    b"null",
    b"true",
    b"false",
    b"10",
    b"\\n",
    b"\n\n",
]
PIECES += [b'\\"', b'":', b"a.b", b"-1", b".5", b"00", b"ab", "é".encode(), "東京".encode()]
# the end has no text
EOS = len(PIECES)
PIECES += [b""]
CLOSERS = [PIECES.index(piece) for piece in (b'"', b"}", b"]", b'"}', b'"]', b", ", b'", "', b"]}")]
WALKS = 4
LONGEST = 120


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: list(PIECES), {EOS})


def walk(state: GrammarState, rng: random.Random) -> str | None:
    """A text of the grammar; None where it has become too long, or cannot go on for want of tokens."""
    text = b""
    for _ in range(LONGEST):
        bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
        if bits[EOS] and (state.exhausted or rng.random() < 0.3):
            # of bytes alone the library takes some that are no UTF-8, as overlong forms, which models do not write
            return text.decode() if is_utf8(text) else None
        if state.stuck:
            break
        bits[EOS] = 0
        closing = [token for token in CLOSERS if bits[token]]
        some = rng.choice(closing) if closing and rng.random() < 0.5 else int(rng.choice(np.flatnonzero(bits)))
        assert state.accept(some)
        text += PIECES[some]
    return None


def is_utf8(text: bytes) -> bool:
    return text == text.decode(errors="replace").encode()


def check(compiler: GrammarCompiler, seed: int) -> None:
    rng = random.Random(seed)
    schema = random_schema(rng, 3)
    try:
        check_json_schema(schema)
    except ValueError:
        return
    try:
        followed = with_json_patterns(schema)
        grammar = compiler.submit(Grammar("json_schema", json.dumps(followed))).result(60)
    except InvalidGrammar as error:
        raise AssertionError(f"a submit lets through what the library refuses: {schema}") from error
    for _ in range(WALKS):
        text = walk(grammar.start(SamplingParams()), rng)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_texts_of_a_regex_match_it(compiler: GrammarCompiler, seed: int) -> None:
    """
    As a whole, by another implementation.
    """
    rng = random.Random(seed)
    pattern = random_regex(rng, 2)
    check_regex(pattern)
    grammar = compiler.submit(Grammar("regex", pattern)).result(60)
    for _ in range(WALKS):
        text = walk(grammar.start(SamplingParams()), rng)
        assert text is None or re.fullmatch(pattern, text, re.DOTALL), (pattern, text)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:bc+)?",
        r"\d(?:\.\d{1,6})?",
        "(?:b+c+|d)?",
        "a?(b[cd]*)?",
        "(?:b{0,3}c){0,}(?:c{0,3}|[cd])",
        "(?:[bc]*){1,2}(?:[bc]{0,3}|[cd])",
        "(?:(?:[cd]{2,3}){0,3})+[cd]b?",
    ],
)
def test_a_pattern_inside_json_takes_what_it_takes_elsewhere(compiler: GrammarCompiler, pattern: str) -> None:
    """
    No text more and none less: the library has a way of its own for these, which took `c` for `(?:bc+)?`.
    """
    schema = {"type": "string", "pattern": pattern}
    check_json_schema(schema)
    grammar = compiler.submit(Grammar("json_schema", json.dumps(with_json_patterns(schema)))).result(60)
    texts = ["".join(chars) for length in range(5) for chars in itertools.product("abcd1.", repeat=length)]

    expected = [text for text in texts if re.fullmatch(pattern, text)]

    assert expected == [text for text in texts if takes(grammar.start(SamplingParams()), json.dumps(text))]


def takes(state: GrammarState, text: str) -> bool:
    # by single bytes, whose tokens have their numbers
    return all(state.accept(byte) for byte in text.encode()) and state.exhausted


@pytest.mark.parametrize("name", [*PATTERNS, "uuid", "ipv6"])
def test_formats_are_what_programs_read(compiler: GrammarCompiler, name: str) -> None:
    """
    Days that there are, hours of a clock, addresses without leading zeros: as pydantic reads them.
    """
    kinds: dict[str, Any] = {
        "date": datetime.date,
        "time": datetime.time,
        "date-time": datetime.datetime,
        "duration": datetime.timedelta,
        "ipv4": ipaddress.IPv4Address,
        "uuid": uuid.UUID,
        "ipv6": ipaddress.IPv6Address,
    }
    schema = with_json_patterns({"type": "string", "format": name})
    grammar = compiler.submit(Grammar("json_schema", json.dumps(schema))).result(60)
    rng = random.Random(0)
    texts = [text for _ in range(200) if (text := walk(grammar.start(SamplingParams()), rng)) is not None]

    assert len(texts) > 100
    for text in texts:
        TypeAdapter(kinds[name]).validate_json(text)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_texts_of_a_schemas_grammar_validate(compiler: GrammarCompiler, seed: int) -> None:
    """
    The library enforces every keyword that is let through, and refuses none.
    """
    check(compiler, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_texts_of_many_schemas_validate(compiler: GrammarCompiler, seed: int) -> None:
    """
    The same for many more, new ones in every run.
    """
    check(compiler, seed)
