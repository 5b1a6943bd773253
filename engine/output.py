"""What comes out of a sequence: when it ends, its text, its log-probabilities."""

from collections.abc import Iterable

import numpy as np

from engine.detokenizer import IncrementalDetokenizer, StopChecker
from engine.entries import Arrived
from engine.request import Completion, FinishReason, Sequence, TextDelta, TokenLogprob
from engine.tokenizer import Tokenizer

_STUCK = (
    "the grammar asks for text that no token of the model can begin: the answer ends here; "
    "allow more, or check min_tokens and stop_token_ids"
)
_OUTSIDE = "the answer holds a token that its grammar does not allow: the model's process and its grammars disagree"
_NOT_FINITE = "the model gave logits that are not finite: the answer ends here; check the dtype and the weights"


class _RunningText:
    """The text of one answer while it grows, for those who must see it before the end."""

    def __init__(self, tokenizer: Tokenizer, sequence: Sequence) -> None:
        params = sequence.params
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopChecker(params.stop, include_stop=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._num_taken = 0

    def push(self, token_id: int, *, may_stop: bool) -> bool:
        """Add a token; True when the text has come to a stop string."""
        text = self._detokenizer.push(token_id)
        self._pieces.append(self._stops.push(text) if may_stop else self._stops.skip(text))
        return self._stops.matched is not None

    def finish(self) -> None:
        """Add what was held back; a stop string may still be completed by it."""
        if self._stops.matched is None:
            self._pieces.append(self._stops.push(self._detokenizer.finish()) + self._stops.finish())

    def take(self) -> str:
        """The text since the last take."""
        new, self._num_taken = self._pieces[self._num_taken :], len(self._pieces)
        return "".join(new)

    @property
    def text(self) -> str:
        return "".join(self._pieces)


class OutputProcessor:
    """
    Decides by the tokens' values what the scheduler could not: ends, and text.

    Args:
        tokenizer: None where the model folder has none: texts are then empty.
        eos_token_ids: The model's own ends.
        max_model_len: Longest prompt plus answer.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Iterable[int], max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len

        # all the mutable state there is
        self._texts: dict[Sequence, _RunningText] = {}
        self._logprobs: dict[Sequence, list[TokenLogprob]] = {}
        # those with a grammar, which each token moves on
        self._bound: set[Sequence] = set()
        # by token id: whether it ends some answers; an id that a request once named stays marked
        self._may_end = np.zeros(1, dtype=np.bool_)
        self._mark_ends(self._eos_token_ids)

    def begin(self, sequence: Sequence) -> FinishReason | None:
        """
        Start a sequence, or take one up at what it brings; that may have ended already.
        """
        params = sequence.params
        if self._tokenizer is not None and (params.stop or sequence.request.stream):
            self._texts[sequence] = _RunningText(self._tokenizer, sequence)
        if params.logprobs is not None:
            self._logprobs[sequence] = list(sequence.resumed.logprobs)
        if sequence.grammar is not None:
            self._bound.add(sequence)
        self._mark_ends(params.stop_token_ids)
        for position, token_id in enumerate(sequence.output):
            reason = self._advance(sequence, token_id, position + 1)
            if reason is not None:
                sequence.truncate(position + 1)
                if sequence in self._logprobs:
                    del self._logprobs[sequence][position + 1 :]
                return reason
        # by limits of the other engine, where the tokens do not say
        return sequence.resumed.finish_reason

    def notable(self, arrived: Arrived) -> list[int]:
        """
        Find the rows that must be looked at one by one: `push` would say None to the others, and keep nothing.
        """
        token_ids = arrived.token_ids
        # an id past the table reads its last entry, which is no end
        notable = arrived.last | self._may_end.take(token_ids, mode="clip")
        if arrived.failed:
            notable |= token_ids < 0
        if self._texts or self._logprobs or self._bound:
            watched = self._texts.keys() | self._logprobs.keys() | self._bound
            notable |= np.fromiter((sequence in watched for sequence in arrived.sequences), np.bool_, len(notable))
        rows: list[int] = notable.nonzero()[0].tolist()
        return rows

    def push(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> FinishReason | None:
        """
        Take in the token that was just appended; the reason when the sequence ends with it.
        """
        if logprob is not None:
            self._logprobs[sequence].append(logprob)
        return self._advance(sequence, token_id, sequence.num_output)

    def logprobs(self, sequence: Sequence, start: int) -> tuple[TokenLogprob, ...]:
        """Those of a sequence that goes on, from one place of its answer; none where it did not ask."""
        return tuple(self._logprobs.get(sequence, [])[start:])

    def deltas(self, sequence: Sequence, *, ended: bool) -> list[TextDelta]:
        """New text for a streaming request, if there is any."""
        running = self._texts.get(sequence)
        if running is None:
            return []
        if ended:
            running.finish()
        text = running.take()
        request_id = sequence.request.request_id
        return [TextDelta(request_id, sequence.index, text, sequence.num_output)] if text else []

    def completion(self, sequence: Sequence) -> Completion:
        """
        The answer of a sequence that has ended, whatever ended it; it is forgotten here.
        """
        assert sequence.finish_reason is not None, f"{sequence} has not ended"
        logprobs = self._logprobs.pop(sequence, None)
        self._bound.discard(sequence)
        return Completion(
            index=sequence.index,
            token_ids=tuple(sequence.output),
            text=self._final_text(sequence),
            finish_reason=sequence.finish_reason,
            logprobs=None if logprobs is None else tuple(logprobs),
            error=_error_of(sequence) if sequence.finish_reason is FinishReason.ERROR else None,
        )

    def _mark_ends(self, token_ids: Iterable[int]) -> None:
        ends = list(token_ids)
        if ends:
            missing = max(ends) + 2 - len(self._may_end)
            self._may_end = np.pad(self._may_end, (0, max(0, missing)))
            self._may_end[ends] = True

    def _advance(self, sequence: Sequence, token_id: int, num_output: int) -> FinishReason | None:
        params = sequence.params
        may_stop = num_output >= params.min_tokens
        grammar = sequence.grammar
        if grammar is not None and not grammar.accept(token_id):
            return FinishReason.ERROR
        if may_stop and self._is_end(sequence, token_id):
            return FinishReason.STOP
        running = self._texts.get(sequence)
        if running is not None and running.push(token_id, may_stop=may_stop):
            return FinishReason.STOP
        if grammar is not None and grammar.exhausted:
            return FinishReason.STOP
        if num_output >= params.max_tokens or sequence.num_prompt_tokens + num_output >= self._max_model_len:
            return FinishReason.LENGTH
        return None

    def _is_end(self, sequence: Sequence, token_id: int) -> bool:
        params = sequence.params
        return token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos)

    def _final_text(self, sequence: Sequence) -> str:
        running = self._texts.pop(sequence, None)
        if running is not None:
            running.finish()
            return running.text
        if self._tokenizer is None:
            return ""
        output = sequence.output
        # the token that ends an answer is not part of its text
        if output and sequence.finish_reason is FinishReason.STOP and self._is_end(sequence, output[-1]):
            output = output[:-1]
        return self._tokenizer.decode(output, skip_special_tokens=sequence.params.skip_special_tokens)


def _error_of(sequence: Sequence) -> str:
    grammar = sequence.grammar
    if grammar is None or not (grammar.stuck or grammar.refused):
        return _NOT_FINITE
    return _OUTSIDE if grammar.refused else _STUCK
