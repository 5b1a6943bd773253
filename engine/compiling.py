"""Requests that wait for their grammars."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace

from engine.capacity import Capacity
from engine.errors import GrammarsUnavailable, InvalidGrammar, RequestError
from engine.grammar_compiler import CompiledGrammar, GrammarCompiler
from engine.request import Request

# an idle engine waits so long at a time, and then looks at what else has come
WAIT_S = 0.02


class Compiling:
    """
    Keeps requests while their grammars are compiled on other threads.

    Args:
        compiler: None where the engine can follow no grammar.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._requests: dict[str, tuple[Request, Future[CompiledGrammar]]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> CompiledGrammar | None:
        """
        Return the request's grammar where it is ready; else keep the request until it is.

        Raises:
            InvalidGrammar, GrammarsUnavailable: it is known already that it cannot be followed.
        """
        assert request.params.grammar is not None, f"{request.request_id} has no grammar"
        if self._compiler is None:
            raise GrammarsUnavailable("this engine has no tokenizer and can follow no grammar")
        future = self._compiler.submit(request.params.grammar)
        if future.done():
            outcome = _outcome(future)
            if isinstance(outcome, RequestError):
                raise outcome
            return outcome
        self._requests[request.request_id] = request, future
        return None

    def ready(self, *, wait_for_one: bool) -> Iterator[tuple[Request, CompiledGrammar | RequestError]]:
        """
        Give back the requests whose grammars are ready, or were refused.

        Args:
            wait_for_one: There is nothing else to do; waits for a moment at most.
        """
        if wait_for_one:
            wait((future for _, future in self._requests.values()), WAIT_S, FIRST_COMPLETED)
        for name, (request, future) in list(self._requests.items()):
            if future.done():
                del self._requests[name]
                yield request, _outcome(future)

    def take(self, request_id: str) -> Request | None:
        """Stop waiting for one; None where it is not here."""
        request, _ = self._requests.pop(request_id, (None, None))
        return request

    def counted_in(self, capacity: Capacity) -> Capacity:
        """The capacity that is left beside those that wait here."""
        if not self._requests:
            return capacity
        requests = [request for request, _ in self._requests.values()]
        return replace(
            capacity,
            waiting_seqs=capacity.waiting_seqs + sum(request.params.n for request in requests),
            free_tokens=max(0, capacity.free_tokens - sum(len(request.prompt) for request in requests)),
        )


def _outcome(future: Future[CompiledGrammar]) -> CompiledGrammar | RequestError:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, RequestError):
        return error
    # a fault of the library, met on one request's grammar: the others go on
    return InvalidGrammar(f"the grammar cannot be compiled: {type(error).__name__}: {error}")
