"""The records of a checkpoint: what goes in comes out, piece by piece, within a bound."""

import numpy as np
import pytest

from engine.request import FinishReason, Progress, TokenLogprob
from worker.checkpoints import MAX_CHECKPOINT_BYTES, BadCheckpoint, Saved, decode, encode


def logprob(token_id: int) -> TokenLogprob:
    # float32, as the sampler gives them
    value, next_value = -np.array([token_id / 7, token_id / 7 + 1], np.float32)
    return TokenLogprob(token_id, float(value), ((token_id, float(value)), (token_id + 1, float(next_value))))


def test_a_record_is_little_endian() -> None:
    """
    Index, end, number of best and of tokens, then the tokens: the layout that other workers read.
    """
    record = encode(258, Progress((5, 65536), (), FinishReason.LENGTH))

    assert bytes.fromhex("0201 02 ff 02000000 05000000 00000100") == record


def test_pieces_of_several_answers_come_out_by_answer() -> None:
    """
    Answers grow at their own pace, and one that has ended is told from one that goes on.
    """
    saved = Saved([0, 0, 0])
    saved.add([Progress((1, 2)), Progress((7,)), Progress()])
    saved.add([Progress((3,)), Progress((8,), (), FinishReason.STOP), Progress()])
    saved.add([Progress(), Progress((), (), FinishReason.STOP), Progress()])

    answers = decode(saved.unsaved, n=3, with_logprobs=False)

    assert (Progress((1, 2, 3)), Progress((7, 8), (), FinishReason.STOP), Progress()) == answers
    assert ([3, 2, 0], {1}) == (saved.num_tokens, saved.ended)
    assert Saved.of(answers, 0) == Saved([3, 2, 0], {1})


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_log_probabilities_come_out_with_the_same_bits(num_top: int) -> None:
    """
    What the sampler gave in float32 is read as the same numbers, with as many of the best as were asked for.
    """
    logprobs = [TokenLogprob(one.token_id, one.logprob, one.top[:num_top]) for one in map(logprob, range(5))]
    pieces = [Progress((0, 1, 2), tuple(logprobs[:3])), Progress((3, 4), tuple(logprobs[3:]), FinishReason.STOP)]

    (answer,) = decode(b"".join(encode(0, piece) for piece in pieces), n=1, with_logprobs=True)

    assert Progress((0, 1, 2, 3, 4), tuple(logprobs), FinishReason.STOP) == answer


def test_nothing_new_is_no_record() -> None:
    """
    A renewal between two tokens, or of an answer whose end is saved, adds nothing.
    """
    saved = Saved([4, 4], ended={1}, num_bytes=100)
    saved.add([Progress(), Progress((), (), FinishReason.LENGTH)])

    assert b"" == saved.unsaved


def test_an_end_without_new_tokens_is_saved() -> None:
    """
    Which answers have ended is known also where their last token was saved before.
    """
    saved = Saved([4])
    saved.add([Progress((), (), FinishReason.LENGTH)])

    assert (Progress((), (), FinishReason.LENGTH),) == decode(saved.unsaved, n=1, with_logprobs=False)


def test_what_the_queue_has_not_confirmed_is_sent_again() -> None:
    """
    After a renewal without a reply the same bytes go out with more at their end; a confirmation takes them off.
    """
    saved = Saved([0])
    saved.add([Progress((1,))])
    first = saved.unsaved
    saved.add([Progress((2,))])

    assert saved.unsaved.startswith(first)
    saved.confirm(len(first))
    assert (len(first), encode(0, Progress((2,)))) == (saved.num_bytes, saved.unsaved)
    # of an older renewal, whose reply came late
    saved.confirm(0)
    assert len(first) == saved.num_bytes


def test_a_checkpoint_is_bounded() -> None:
    """
    A record that would pass the bound is left out, and with it all that follows: what is saved stays whole.
    """
    saved = Saved([0, 0], num_bytes=MAX_CHECKPOINT_BYTES - 30)
    saved.add([Progress((1, 2)), Progress((1, 2))])

    assert saved.full
    assert ([2, 0], 16) == (saved.num_tokens, len(saved.unsaved))


@pytest.mark.parametrize(
    "broken",
    [
        encode(0, Progress((1, 2)))[:-1],
        encode(0, Progress((1, 2)))[:5],
        encode(2, Progress((1,))),
        encode(0, Progress((1,))).replace(b"\0\0\0\xff", b"\0\0\x09\xff"),
        encode(0, Progress((1,))),
    ],
    ids=["cut in the tokens", "cut in the head", "another answer", "another end", "no log-probabilities"],
)
def test_bytes_that_are_no_checkpoint_are_refused(broken: bytes) -> None:
    """
    Whatever stands there, no answer is made of it.
    """
    with pytest.raises(BadCheckpoint):
        decode(encode(1, Progress((1,), (logprob(1),))) + broken, n=2, with_logprobs=True)
