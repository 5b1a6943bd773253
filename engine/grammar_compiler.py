"""
Makes grammars ready for use, on threads of its own: steps go on meanwhile.

The library (xgrammar) is loaded with the first grammar: it brings transformers, which takes a second.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import GrammarsUnavailable, InvalidGrammar
from engine.grammar import Grammar, GrammarState
from engine.sampling_params import SamplingParams

# a grammar of average size has 50 KB; one that is in use stays in memory anyway
CACHE_BYTES = 256 << 20
MAX_CACHED = 512
# a slow one does not hold up the next
NUM_THREADS = 2

_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+: ")


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """
    A grammar for one vocabulary; answers may share it.

    Args:
        library: The library's own form of it.
        num_bytes: Of that.
        is_text: [vocab_size], the tokens that have text.
        eos_token_ids: The model's own ends.
    """

    library: Any
    num_bytes: int
    is_text: NDArray[np.bool_]
    eos_token_ids: frozenset[int]

    def start(self, params: SamplingParams) -> GrammarState:
        """A new answer in this grammar."""
        from xgrammar import GrammarMatcher

        own = frozenset() if params.ignore_eos else self.eos_token_ids
        return GrammarState(
            GrammarMatcher(self.library),
            is_text=self.is_text,
            ends=own | set(params.stop_token_ids),
            min_tokens=params.min_tokens,
        )


class GrammarCompiler:
    """
    Compiles grammars for one model's vocabulary and keeps the ones last used.

    Args:
        token_bytes: Gives the bytes that each token adds to a text; none for one that is no text. Asked once.
        eos_token_ids: The model's own ends: they are no text, whatever their bytes are.
    """

    def __init__(
        self,
        token_bytes: Callable[[], list[bytes]],
        eos_token_ids: Collection[int],
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._token_bytes = token_bytes
        self._eos_token_ids = frozenset(eos_token_ids)
        self._cache_bytes = cache_bytes
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()

        # all the mutable state there is; futures, so that equal grammars are compiled once
        self._futures: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()

    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """
        Compile a grammar, or find it; one thread calls this.

        The future raises InvalidGrammar where the library refuses it, GrammarsUnavailable where this process
        has no library, or a tokenizer that it cannot follow.
        """
        future = self._futures.get(grammar)
        if future is None:
            future = self._futures[grammar] = self._pool.submit(self._compile, grammar)
            self._evict()
        self._futures.move_to_end(grammar)
        return future

    def _evict(self) -> None:
        """Forget what was used longest ago, beyond what may be kept; the newest stays."""
        sizes = [future.result().num_bytes for future in self._futures.values() if _has_succeeded(future)]
        excess = sum(sizes) - self._cache_bytes
        for grammar, future in list(self._futures.items())[:-1]:
            if excess <= 0 and len(self._futures) <= MAX_CACHED:
                return
            if future.done():
                excess -= future.result().num_bytes if _has_succeeded(future) else 0
                del self._futures[grammar]

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._lock:
            library = self._library
        try:
            compiled = library.compile(grammar)
        except RuntimeError as error:
            # the library's words, without the time and its source line
            why = _SOURCE_LINE.sub("", str(error).strip().partition("\n")[0])
            raise InvalidGrammar(f"options.{grammar.kind}: {why}") from None
        ready = CompiledGrammar(compiled, compiled.memory_size_bytes, library.is_text, self._eos_token_ids)
        state = ready.start(SamplingParams())
        state.mask()
        if state.exhausted or state.stuck:
            raise InvalidGrammar(f"options.{grammar.kind}: no text that this model can write follows it")
        return ready

    @cached_property
    def _library(self) -> "_Library":
        pieces = self._token_bytes()
        for token_id in self._eos_token_ids & set(range(len(pieces))):
            pieces[token_id] = b""
        return _Library(pieces)


class _Library:
    """xgrammar with a vocabulary."""

    def __init__(self, pieces: list[bytes]) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise GrammarsUnavailable(
                f"this worker cannot follow json_schema, regex and choice, as xgrammar is not there ({error}): "
                "in the checkout, `pip install --editable '.[structured]'` brings it"
            ) from error

        def compiler(vocabulary: list[bytes]) -> Any:
            # ends are the engine's own; our cache counts what is in use
            info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(vocabulary), stop_token_ids=[])
            return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

        self.is_text = np.array([len(piece) > 0 for piece in pieces], dtype=np.bool_)
        self._any = compiler(pieces)
        # JSON on one line has no control characters; the library would let them into strings of bounded length
        self._json = compiler([b"" if any(byte < 0x20 for byte in piece) else piece for piece in pieces])

    def compile(self, grammar: Grammar) -> Any:
        if grammar.kind == "json_schema":
            # small models write white space for ever where they may
            return self._json.compile_json_schema(grammar.text, any_whitespace=False)
        if grammar.kind == "regex":
            return self._any.compile_regex(grammar.text)
        texts: list[str] = json.loads(grammar.text)
        return self._any.compile_grammar(f"root ::= {' | '.join(map(_quoted, texts))}")


def _has_succeeded(future: Future[CompiledGrammar]) -> bool:
    return future.done() and future.exception() is None


def _quoted(text: str) -> str:
    """A literal of the library's grammars."""
    plain = (char if char >= " " and char not in '"\\\x7f' else f"\\u{ord(char):04x}" for char in text)
    return f'"{"".join(plain)}"'
