"""The engine in a process of its own, as the worker's event loop sees it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from operator import methodcaller

import pytest

from engine.config import EngineConfig
from engine.errors import DeviceLost, StartupError
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from pagemill.settings import LogSettings
from tests.support.services import CHECKOUT
from worker.engine_build import EnginePlan, FakeConfig
from worker.engine_port import EngineGone, Turn
from worker.engine_process import EngineEnded, EngineFailed, EngineProcess, StepHung
from worker.engine_wire import Assignment
from worker.fake_engine import ByteTokenizer

FAST = FakeConfig(
    model_name="fake",
    max_num_seqs=4,
    max_num_batched_tokens=512,
    max_model_len=8192,
    kv_tokens=10_000,
    tokens_per_s=None,
    poison=True,
)
SLOW = replace(FAST, tokens_per_s=100.0)


def request(name: str, text: str = "hello", max_tokens: int = 5) -> Request:
    return Request(name, ByteTokenizer().encode(text), SamplingParams(max_tokens=max_tokens))


class Recorder:
    """Collects what an engine gives, and waits for it."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.turns: list[Turn] = []
        self.crashes: list[BaseException] = []
        engine.start(on_turns=self.turns.extend, on_crash=self.crashes.append)

    @property
    def finished(self) -> list[str]:
        return [output.request_id for turn in self.turns for output in turn.finished]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.002)


def play(
    story: Callable[[Recorder], Awaitable[None]], plan: EnginePlan = FAST, *, step_timeout_s: float = 60.0
) -> Recorder:
    """Run a story beside an engine's process."""

    async def run() -> Recorder:
        engine = await EngineProcess.launch(Assignment(plan, step_timeout_s, LogSettings(log_format="json"), {}))
        recorder = Recorder(engine)
        try:
            await story(recorder)
        finally:
            await engine.stop()
        return recorder

    return asyncio.run(run())


def test_requests_go_in_and_outputs_come_out() -> None:
    """
    Each request is named once as added and once as finished, with its answer and what it took.
    """

    async def story(recorder: Recorder) -> None:
        assert (10_000, 4) == (recorder.engine.facts.kv_tokens, recorder.engine.facts.max_num_seqs)
        recorder.engine.add([request("a"), request("b", max_tokens=7)])
        await recorder.until(lambda: len(recorder.finished) == 2)

    recorder = play(story, SLOW)

    outputs = {output.request_id: output for turn in recorder.turns for output in turn.finished}
    assert ["a", "b"] == [name for turn in recorder.turns for name in turn.added]
    assert {"a": 5, "b": 7} == {name: len(output.completions[0].token_ids) for name, output in outputs.items()}
    assert {FinishReason.LENGTH} == {output.completions[0].finish_reason for output in outputs.values()}
    assert all(output.gpu_ms > 0 for output in outputs.values())
    assert [] == recorder.crashes


def test_a_refused_request_does_not_stop_the_others() -> None:
    """
    A request that the engine refuses comes back with its error; its neighbours run.
    """

    async def story(recorder: Recorder) -> None:
        recorder.engine.add([request("long", "x" * 50), request("good")])
        await recorder.until(lambda: recorder.finished)

    recorder = play(story, replace(FAST, max_model_len=20))

    assert [("long", "prompt_too_long")] == [(name, e.code) for turn in recorder.turns for name, e in turn.rejected]
    assert ["good"] == recorder.finished


def test_calls_are_answered_with_results_and_errors() -> None:
    """
    A call keeps its place behind what was added, brings what it returned or raised, and ends nothing.
    """

    async def story(recorder: Recorder) -> None:
        engine = recorder.engine
        engine.add([request("a", max_tokens=1000), request("b", max_tokens=1000)])
        assert {"a"} == (await engine.call(methodcaller("progress", {"a": (0,), "gone": (0,)}))).keys()
        with pytest.raises(AttributeError):
            await engine.call(methodcaller("nothing"))
        assert {"a"} == (await engine.abort(["a", "gone"])).keys()
        await recorder.until(lambda: engine.stats.num_running == 1)
        assert {} == await engine.abort(["b"], unstarted_only=True)
        assert {"b"} == (await engine.abort(["b"])).keys()

    recorder = play(story, SLOW)

    assert [] == recorder.finished
    assert [] == recorder.crashes


def test_capacity_is_that_after_the_last_step() -> None:
    """
    What runs is counted while nothing ends, and an engine that has ended its work is as empty as before.
    """
    free: list[int] = []

    async def story(recorder: Recorder) -> None:
        engine = recorder.engine
        free.append(engine.capacity.free_seqs)
        engine.add([request(name, max_tokens=60) for name in "abc"])
        await recorder.until(lambda: engine.capacity.free_seqs == 1 and engine.stats.generated_tokens > 0)
        await recorder.until(lambda: len(recorder.finished) == 3)
        free.append(engine.capacity.free_seqs)

    play(story, SLOW)

    assert [4, 4] == free


def test_a_step_that_lasts_grows_old() -> None:
    """
    The age of a step is told while it runs, and is 0 while the engine idles.
    """

    async def story(recorder: Recorder) -> None:
        engine = recorder.engine
        assert 0.0 == engine.step_age_s
        engine.add([request("a", max_tokens=1)])
        await recorder.until(lambda: engine.step_age_s > 0.1)
        await recorder.until(lambda: recorder.finished)
        assert 0.0 == engine.step_age_s

    play(story, replace(FAST, tokens_per_s=1.0))


@pytest.mark.parametrize(
    ("death", "kind", "said"),
    [
        ("raise", EngineFailed, "RuntimeError: poison: a fault in a step"),
        ("oom", EngineFailed, "DeviceFull: poison: the device is out of memory"),
        ("cuda", DeviceLost, "an illegal memory access"),
        ("hang", StepHung, "did not end"),
        ("exit", EngineEnded, "exit code 1"),
        ("segv", EngineEnded, f"signal {signal.SIGSEGV.value}"),
    ],
)
def test_a_death_is_told_once_with_what_is_known(death: str, kind: type[Exception], said: str) -> None:
    """
    However the engine dies: what it gave before comes first, and whoever asks afterwards hears that it is gone.
    """

    async def story(recorder: Recorder) -> None:
        recorder.engine.add([request("good")])
        await recorder.until(lambda: recorder.finished)
        recorder.engine.add([request("bad", f"poison:{death}")])
        asked = asyncio.create_task(recorder.engine.abort(["good"]))
        await recorder.until(lambda: recorder.crashes)
        assert not recorder.engine.alive
        await asyncio.gather(asked, return_exceptions=True)
        with pytest.raises(EngineGone):
            await recorder.engine.call(methodcaller("has_work"))

    # a step that is only slow is not to be taken for one that hangs
    recorder = play(story, step_timeout_s=1.0 if death == "hang" else 60.0)

    (error,) = recorder.crashes
    assert kind is type(error)
    assert said in str(error)
    assert ["good"] == recorder.finished


def test_the_worker_alone_ends_its_engine() -> None:
    """
    Signals that a terminal or a service manager sends to all processes of a service do nothing to it.
    """

    async def story(recorder: Recorder) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(recorder.engine.pid, number)
        recorder.engine.add([request("a")])
        await recorder.until(lambda: recorder.finished)

    assert [] == play(story).crashes


def test_a_question_that_the_end_overtakes_is_left_open_for_nobody() -> None:
    """
    Whoever still waits for an answer when the engine is ended hears that none will come.
    """

    async def story(recorder: Recorder) -> None:
        recorder.engine.add([request("long", "poison:hang")])
        # in its step, between two of which it would hear us
        await recorder.until(lambda: recorder.engine.step_age_s > 1.0)
        asked = asyncio.create_task(recorder.engine.abort(["long"]))
        await asyncio.sleep(0)
        await recorder.engine.kill()
        with pytest.raises(EngineGone):
            await asked

    assert [] == play(story).crashes


def test_what_keeps_an_engine_from_starting_is_told(tmp_path: object) -> None:
    """
    The sentence is the engine's own, and no process is left.
    """
    with pytest.raises(StartupError, match=r"there is no config\.json"):
        play(lambda _: asyncio.sleep(0), EngineConfig(model=tmp_path, device="cpu"))  # type: ignore[arg-type]


def test_an_exception_while_it_loads_is_told() -> None:
    """
    It is not the operator's to change, as far as we know: the start may be tried again.
    """
    with pytest.raises(EngineFailed, match="TypeError: "):
        play(lambda _: asyncio.sleep(0), replace(FAST, max_num_seqs=None))  # type: ignore[arg-type]


def test_a_first_step_that_hangs_is_a_hung_step() -> None:
    """
    The engine's own question is watched like those of jobs.
    """
    with pytest.raises(StepHung):
        play(lambda _: asyncio.sleep(0), replace(FAST, tokens_per_s=0.01), step_timeout_s=0.5)


def test_the_worker_and_a_fake_engine_do_without_torch() -> None:
    """
    It takes seconds and hundreds of megabytes: the process of a real engine alone loads it.
    """
    modules = "worker.process, worker.engine_child, worker.fake_engine, engine.tokenizer, engine.stats"
    code = f"import sys, {modules}; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)

    assert "False\n" == done.stdout
