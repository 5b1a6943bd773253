"""
How a running job is saved and taken up again: records, appended, each a piece of one answer.

A record is little-endian: the answer's index (uint16), why it has ended (uint8, 0 while it goes
on), how many best tokens stand beside each (uint8, 255 where there are no log-probabilities), and
how many tokens there are (uint32); the token ids (int32); with log-probabilities, those of the
tokens (float32), the ids of the best (int32), and theirs (float32).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.request import FinishReason, Progress, TokenLogprob

# stands before the fingerprint: a worker that writes another format starts from the prompt
FORMAT = 2

# of one job in Redis: 262,000 tokens, or 6,200 with the 20 best beside each
MAX_CHECKPOINT_BYTES = 1 << 20

_HEAD = struct.Struct("<HBBI")
_NO_LOGPROBS = 255
# a reason's place here stands for it; an answer that failed is saved as one that goes on
_ENDS = (None, FinishReason.STOP, FinishReason.LENGTH)


class BadCheckpoint(ValueError):
    """Raised when saved bytes are not the records of such a job."""


@dataclass(slots=True)
class Saved:
    """
    What the queue has of one running job, and what it is sent next.

    Args:
        num_tokens: By answer, those in `unsaved` too.
        ended: The answers whose end is saved, or in `unsaved`.
        num_bytes: What the queue has.
        unsaved: What goes behind it; sent again, with more at its end, until the queue has it.
        full: A record did not fit any more: whoever takes the job up continues from those before.
    """

    num_tokens: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    num_bytes: int = 0
    unsaved: bytes = b""
    full: bool = False

    @classmethod
    def of(cls, answers: Sequence[Progress], num_bytes: int) -> "Saved":
        """What the queue has of a job that another worker began."""
        ended = {index for index, answer in enumerate(answers) if answer.finish_reason is not None}
        return cls([len(answer.token_ids) for answer in answers], ended, num_bytes)

    def add(self, answers: Sequence[Progress]) -> None:
        """Take what the answers have beyond `num_tokens`, as far as there is room."""
        for index, progress in enumerate(answers):
            ends = progress.finish_reason is not None and index not in self.ended
            if not progress.token_ids and not ends:
                continue
            record = encode(index, progress)
            if self.num_bytes + len(self.unsaved) + len(record) > MAX_CHECKPOINT_BYTES:
                self.full = True
                return
            self.unsaved += record
            self.num_tokens[index] += len(progress.token_ids)
            if ends:
                self.ended.add(index)

    def confirm(self, num_bytes: int) -> None:
        """The queue has so many bytes now."""
        if num_bytes > self.num_bytes:
            self.unsaved = self.unsaved[num_bytes - self.num_bytes :]
            self.num_bytes = num_bytes


def encode(index: int, progress: Progress) -> bytes:
    """One record."""
    logprobs = progress.logprobs
    num_top = len(logprobs[0].top) if logprobs else _NO_LOGPROBS
    record = _HEAD.pack(index, _ENDS.index(progress.finish_reason), num_top, len(progress.token_ids))
    record += np.array(progress.token_ids, "<i4").tobytes()
    if logprobs:
        best = [pair for one in logprobs for pair in one.top]
        record += np.array([one.logprob for one in logprobs], "<f4").tobytes()
        record += np.array([token_id for token_id, _ in best], "<i4").tobytes()
        record += np.array([logprob for _, logprob in best], "<f4").tobytes()
    return record


def decode(saved: bytes, *, n: int, with_logprobs: bool) -> tuple[Progress, ...]:
    """
    What each answer of a job has by its checkpoint.

    Args:
        n: How many answers the job has.
        with_logprobs: Each token must have its log-probability.

    Raises:
        BadCheckpoint: these are not the records of such a job.
    """
    pieces: list[list[Progress]] = [[] for _ in range(n)]
    place = 0
    try:
        while place < len(saved):
            index, piece, place = _read(saved, place)
            pieces[index].append(piece)
    except (struct.error, ValueError, IndexError) as error:
        raise BadCheckpoint(f"the checkpoint cannot be read from byte {place} on: {error}") from None
    answers = tuple(map(_join, pieces))
    if with_logprobs and any(len(answer.logprobs) != len(answer.token_ids) for answer in answers):
        raise BadCheckpoint("the checkpoint has tokens without log-probabilities, and the job asks for these")
    return answers


def _read(saved: bytes, place: int) -> tuple[int, Progress, int]:
    """The record at a place, and where the next one begins."""
    index, end, num_top, count = _HEAD.unpack_from(saved, place)
    place += _HEAD.size

    def take(dtype: str, number: int) -> list[float]:
        nonlocal place
        values: list[float] = np.frombuffer(saved, dtype, number, place).tolist()
        place += 4 * number
        return values

    token_ids = tuple(map(int, take("<i4", count)))
    logprobs: tuple[TokenLogprob, ...] = ()
    if num_top != _NO_LOGPROBS:
        chosen, ids, values = take("<f4", count), map(int, take("<i4", count * num_top)), take("<f4", count * num_top)
        best = tuple(zip(ids, values, strict=True))
        logprobs = tuple(
            TokenLogprob(token_id, logprob, best[number * num_top : (number + 1) * num_top])
            for number, (token_id, logprob) in enumerate(zip(token_ids, chosen, strict=True))
        )
    return index, Progress(token_ids, logprobs, _ENDS[end]), place


def _join(pieces: Sequence[Progress]) -> Progress:
    return Progress(
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        finish_reason=pieces[-1].finish_reason if pieces else None,
    )
