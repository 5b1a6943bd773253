"""What goes between a worker and its engine's process, and how often."""

import socket
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from engine.capacity import Freeable
from engine.errors import PromptTooLong
from engine.request import Completion, FinishReason, Progress, Request, RequestOutput, TextDelta, TokenLogprob
from engine.sampling_params import SamplingParams
from worker.engine_child import Port
from worker.engine_port import Turn
from worker.engine_wire import Add, Answer, Report, Unpacker, pack
from worker.fake_engine import FakeEngine
from worker.timings import NO_TIMINGS

CAPACITY = replace(FakeEngine().capacity(), freeable=(Freeable(1, 2, 3),))
STATS = FakeEngine().stats()
LOGPROBS = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),)
ANSWER = Completion(0, (5,), "grüß", FinishReason.STOP, LOGPROBS)
TURN = Turn(
    added=["a"],
    rejected=[],
    finished=[RequestOutput("b", (ANSWER,), 3, 0, (None, *LOGPROBS), gpu_ms=7)],
    deltas=[TextDelta("c", 0, "x", 1)],
)
MESSAGES = [
    Report(TURN, CAPACITY, STATS, NO_TIMINGS, True, 3, False),
    Answer(4, {"a": [Progress((1, 2), LOGPROBS, FinishReason.LENGTH)]}),
    Answer(5),
]


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_messages_come_out_as_they_went_in(size: int) -> None:
    """
    In whatever pieces their bytes arrive.
    """
    data = b"".join(map(pack, MESSAGES))
    unpacker = Unpacker()

    found = [one for at in range(0, len(data), size) for one in unpacker.feed(data[at : at + size])]

    assert MESSAGES == found


def test_requests_and_refusals_keep_what_they_say() -> None:
    """
    A prompt stays an array of int32, and an error of its kind with its message.
    """
    request = Request("a", np.arange(9, dtype=np.int32), SamplingParams(n=2, stop=("x",)), resumed=(Progress((1,)),))
    refusal = Turn(rejected=[("a", PromptTooLong("too long"))])

    added, report = Unpacker().feed(pack(Add([request])) + pack(replace(MESSAGES[0], turn=refusal)))

    (found,) = added.requests
    assert np.int32 == found.prompt.dtype
    assert request.prompt.tolist() == found.prompt.tolist()
    assert replace(request, prompt=found.prompt) == found
    ((name, error),) = report.turn.rejected
    assert ("a", PromptTooLong, "too long") == (name, type(error), str(error))


def test_steps_without_news_are_told_now_and_then() -> None:
    """
    A thousand quick steps make a few reports; news, a change to idleness and a message that was heard make one each.
    """
    theirs, ours = socket.socketpair()
    with theirs, ours:
        ours.setblocking(False)
        port, unpacker = Port(theirs), Unpacker()

        def told(*publications: partial[None]) -> list[Report]:
            for publish in publications:
                publish()
            try:
                return list(unpacker.feed(ours.recv(1 << 20)))
            except BlockingIOError:
                return []

        quiet = partial(port.publish, Turn(), CAPACITY, STATS, NO_TIMINGS, news=False, idle=False)
        assert 1 <= len(told(*[quiet] * 1000)) < 100
        assert [True] == [
            report.news
            for report in told(partial(port.publish, TURN, CAPACITY, STATS, NO_TIMINGS, news=True, idle=False))
        ]
        assert [True] == [report.idle for report in told(partial(quiet, idle=True))]
        ours.sendall(pack(Add([])))
        assert 1 == len(list(port.take(wait=True)))
        assert [1] == [report.num_heard for report in told(partial(quiet, idle=True))]


def test_timings_are_sent_when_they_are_new() -> None:
    """
    Reports in between say None, which costs nothing; a report that was left out takes none along.
    """
    theirs, ours = socket.socketpair()
    with theirs, ours:
        port, unpacker = Port(theirs), Unpacker()
        newer = replace(NO_TIMINGS, steps=replace(NO_TIMINGS.steps, total=1.0))
        newest = replace(NO_TIMINGS, steps=replace(NO_TIMINGS.steps, total=2.0))
        for timings, news in ((newer, True), (newer, True), (newest, False), (newest, True)):
            port.publish(Turn(), CAPACITY, STATS, timings, news=news, idle=False)

        found = [report.timings for report in unpacker.feed(ours.recv(1 << 20))]

    assert [newer, None, newest] == found
