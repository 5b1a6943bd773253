"""The engine's thread and the two queues of it."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.errors import InvalidGrammar
from engine.request import Request, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams
from tests.support.engine_thread import EngineThread
from worker.engine_port import EngineGone, Turn
from worker.fake_engine import ByteTokenizer, FakeEngine


def request(name: str, text: str = "hello", max_tokens: int = 5) -> Request:
    return Request(name, ByteTokenizer().encode(text), SamplingParams(max_tokens=max_tokens))


class Recorder:
    """Collects what the thread gives, and waits for it."""

    def __init__(self, engine: FakeEngine, **options: Any) -> None:
        self.turns: list[Turn] = []
        self.crash: BaseException | None = None
        self.threads: set[int] = set()
        self.thread = EngineThread(engine, **options)

    def start(self) -> None:
        self.thread.start(on_turns=self._on_turns, on_crash=self._on_crash)

    def _on_turns(self, turns: list[Turn]) -> None:
        self.threads.add(threading.get_ident())
        self.turns += turns

    def _on_crash(self, error: BaseException) -> None:
        self.crash = error

    @property
    def finished(self) -> list[str]:
        return [output.request_id for turn in self.turns for output in turn.finished]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)


def play(engine: FakeEngine, story: Callable[[Recorder], Awaitable[None]], **options: Any) -> Recorder:
    """Run a story beside a running engine thread."""

    async def run() -> Recorder:
        recorder = Recorder(engine, **options)
        recorder.start()
        await story(recorder)
        await recorder.thread.stop()
        return recorder

    return asyncio.run(run())


def test_requests_go_in_and_outputs_come_out_on_the_loop() -> None:
    """
    Each request is named once as added and once as finished, on the event loop's thread.
    """

    async def story(recorder: Recorder) -> None:
        recorder.thread.add([request("a"), request("b")])
        await recorder.until(lambda: len(recorder.finished) == 2)

    recorder = play(FakeEngine(), story)

    assert ["a", "b"] == [name for turn in recorder.turns for name in turn.added]
    assert ["a", "b"] == recorder.finished
    assert {threading.get_ident()} == recorder.threads


def test_a_refused_request_does_not_stop_the_others() -> None:
    """
    A request that the engine refuses comes back with its error; its neighbours run.
    """

    async def story(recorder: Recorder) -> None:
        recorder.thread.add([request("long", "x" * 50), request("good")])
        await recorder.until(lambda: recorder.finished)

    recorder = play(FakeEngine(max_model_len=20), story)

    assert [("long", "prompt_too_long")] == [(name, e.code) for turn in recorder.turns for name, e in turn.rejected]
    assert ["good"] == recorder.finished


class Doubtful(FakeEngine):
    """An engine that finds out about some requests in a step."""

    def step(self) -> StepOutputs:
        if self.abort("doubtful") is None:
            return super().step()
        return StepOutputs(rejected=(("doubtful", InvalidGrammar("no text follows it")),))


def test_a_request_that_is_refused_by_a_step_is_told_as_one() -> None:
    """
    It was added before, and takes no share of the engine's time any more.
    """

    async def story(recorder: Recorder) -> None:
        recorder.thread.add([request("doubtful"), request("good")])
        await recorder.until(lambda: recorder.finished)

    recorder = play(Doubtful(), story)

    rejected = [(name, error.code) for turn in recorder.turns for name, error in turn.rejected]
    assert [("doubtful", "invalid_grammar")] == rejected
    assert ["good"] == recorder.finished
    assert ["doubtful", "good"] == [name for turn in recorder.turns for name in turn.added]


def test_a_call_runs_between_steps_and_brings_its_result() -> None:
    """
    `call` gives what the function returned or raised, and keeps its place in the queue.
    """

    async def story(recorder: Recorder) -> None:
        recorder.thread.add([request("a", max_tokens=1000)])
        assert 1 == await recorder.thread.call(lambda engine: len(engine.progress({"a": (0,), "b": (0,)})))
        with pytest.raises(KeyError):
            await recorder.thread.call(lambda _: {}["nothing"])
        output = await recorder.thread.call(lambda engine: engine.abort("a"))
        assert output is not None

    recorder = play(FakeEngine(tokens_per_s=100), story)

    assert [] == recorder.finished
    assert recorder.crash is None


def test_an_exception_in_a_step_ends_the_thread() -> None:
    """
    The crash is reported once, and whoever calls afterwards hears that nobody is there.
    """

    class Dying(FakeEngine):
        def step(self) -> StepOutputs:
            raise RuntimeError("gone")

    async def story(recorder: Recorder) -> None:
        recorder.thread.add([request("a")])
        await recorder.until(lambda: recorder.crash)
        with pytest.raises(EngineGone):
            await recorder.thread.call(lambda engine: engine.abort("a"))

    recorder = play(Dying(), story)

    assert isinstance(recorder.crash, RuntimeError)
    assert not recorder.thread.alive


def test_a_step_that_hangs_grows_old() -> None:
    """
    The age of a step is told while it runs, and is 0 before and after.
    """
    entered, let_go, now = threading.Event(), threading.Event(), [100.0]

    class Hanging(FakeEngine):
        def step(self) -> StepOutputs:
            entered.set()
            assert let_go.wait(10)
            return super().step()

    async def story(recorder: Recorder) -> None:
        assert 0.0 == recorder.thread.step_age_s
        recorder.thread.add([request("a")])
        await recorder.until(entered.is_set)
        now[0] += 250.0
        assert 250.0 == recorder.thread.step_age_s
        let_go.set()
        await recorder.until(lambda: recorder.finished and recorder.thread.step_age_s == 0.0)

    play(Hanging(), story, clock=lambda: now[0])


def test_an_idle_thread_takes_no_steps() -> None:
    """
    Without work the thread sleeps: it neither steps nor reports.
    """
    steps: list[int] = []

    class Counting(FakeEngine):
        def step(self) -> StepOutputs:
            steps.append(1)
            return super().step()

    async def story(recorder: Recorder) -> None:
        for _ in range(20):
            await recorder.thread.call(lambda engine: engine.has_work)
        recorder.thread.add([request("a")])
        await recorder.until(lambda: recorder.finished)
        await recorder.thread.call(lambda engine: engine.has_work)

    play(Counting(), story)

    assert 1 == len(steps)


def test_each_request_is_told_what_it_took() -> None:
    """
    The time of the steps is shared by the requests in the engine, those that were aborted among them.
    """
    slept: list[float] = []
    engine = FakeEngine(tokens_per_s=2000, sleep=lambda s: (slept.append(s), time.sleep(s))[0])

    async def story(recorder: Recorder) -> None:
        recorder.thread.add([request("a", max_tokens=40), request("b", max_tokens=80), request("c", max_tokens=8000)])
        await recorder.until(lambda: len(recorder.finished) == 2)
        aborted.update(await recorder.thread.abort(["c", "gone"]))

    aborted: dict[str, RequestOutput] = {}
    recorder = play(engine, story)

    outputs = {output.request_id: output for turn in recorder.turns for output in turn.finished} | aborted
    assert {"a", "b", "c"} == outputs.keys()
    # c may be aborted right after the last step of b
    assert outputs["a"].gpu_ms < outputs["b"].gpu_ms <= outputs["c"].gpu_ms
    assert 1000 * sum(slept) - 1 <= sum(output.gpu_ms for output in outputs.values())


def test_room_that_an_abort_makes_is_told() -> None:
    """
    Nothing comes out when a request is taken from the engine, but others may be pulled in its place.
    """

    async def story(recorder: Recorder) -> None:
        recorder.thread.add([request("a", max_tokens=1000), request("b", max_tokens=1000)])
        await recorder.until(lambda: recorder.thread.stats.num_running == 2)
        num_turns, free_seqs = len(recorder.turns), recorder.thread.capacity.free_seqs
        await recorder.thread.abort(["a"])
        # a turn of before may still be on its way
        await recorder.until(lambda: len(recorder.turns) > num_turns and free_seqs < recorder.thread.capacity.free_seqs)
        assert free_seqs + 1 == recorder.thread.capacity.free_seqs
        await recorder.thread.abort(["b"])

    assert [] == play(FakeEngine(tokens_per_s=100.0), story).finished


def test_only_what_has_not_started_can_be_taken_out() -> None:
    """
    A drain takes back the requests of which nothing has been computed, and leaves the others in.
    """

    async def story(recorder: Recorder) -> None:
        recorder.thread.add([request("runs", max_tokens=8000), request("waits")])
        await recorder.until(lambda: recorder.thread.stats.num_running == 1)
        taken.update(await recorder.thread.abort(["runs", "waits"], unstarted_only=True))
        taken_later.update(await recorder.thread.abort(["runs"]))

    taken: dict[str, RequestOutput] = {}
    taken_later: dict[str, RequestOutput] = {}
    play(FakeEngine(max_num_seqs=1, tokens_per_s=1000), story)

    assert ({"waits"}, {"runs"}) == (taken.keys(), taken_later.keys())
