"""The way of a job through the process, where two things happen at once."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.request import Completion, FinishReason, Request, RequestOutput, TokenIds
from pagemill.messages import DeathCause, Delivery
from pagemill.schema import Job, Options
from tests.support.deliveries import delivery
from worker.engine_port import Turn
from worker.fake_engine import ByteTokenizer, FakeEngine
from worker.intake import Deferred, Intake, Prepared
from worker.jobs import LAPSES_PER_ATTEMPT, Jobs
from worker.leases import Held, Leases
from worker.puller import Transit
from worker.retries import Fault
from worker.sinks import Ended

MAX_ATTEMPTS = 3


class GatedTokenizer(ByteTokenizer):
    """Reads a prompt when the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def encode(self, text: str) -> TokenIds:
        assert self.gate.wait(10)
        return super().encode(text)


class SlowToAnswer:
    """An engine's thread that answers a call only when `meanwhile` has come to its end."""

    def __init__(self) -> None:
        self.added: list[Request] = []
        self.engine = FakeEngine()
        self.meanwhile: Callable[[], Any] = asyncio.Event().wait

    def add(self, requests: Iterable[Request]) -> None:
        self.added += requests

    async def call(self, command: Callable[[FakeEngine], Any]) -> Any:
        answer = command(self.engine)
        await self.meanwhile()
        return answer

    async def abort(self, request_ids: Iterable[str], *, unstarted_only: bool = False) -> Any:
        wanted = [name for name in request_ids if not unstarted_only or not self.engine.num_started(name)]
        return await self.call(lambda engine: {name: output for name in wanted if (output := engine.abort(name))})


class Ends:
    """Notes what has ended."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []

    def put(self, ended: Ended) -> None:
        ended.held.settled = True
        self.ended.append(ended)


class Scene:
    """Jobs whose intake and whose engine a test holds up."""

    def __init__(self, pool: ThreadPoolExecutor, intake_kind: type[Intake]) -> None:
        self.tokenizer, self.thread, self.ends = GatedTokenizer(), SlowToAnswer(), Ends()
        intake = intake_kind(self.tokenizer, frozenset(), 100, "print")
        self.pool = pool
        self.buried: list[DeathCause] = []
        self.faults: list[Fault] = []
        self.patience = 1
        self.leases = Leases(None, self.thread, intake, lease_s=3.0)  # type: ignore[arg-type]
        self.jobs = Jobs(
            leases=self.leases,
            intake=intake,
            pool=pool,
            engine=self.thread,  # type: ignore[arg-type]
            sink=self.ends,  # type: ignore[arg-type]
            streams=self.ends,  # type: ignore[arg-type]
            max_attempts=MAX_ATTEMPTS,
            on_change=lambda: None,
            put_off=self.put_off,
            bury=lambda _held, why, _message: self.buried.append(why),
        )

    def put_off(self, held: Held, fault: Fault, _why: str) -> bool:
        self.faults.append(fault)
        return len(self.faults) <= self.patience and self.jobs.take(held)

    def receive(self, **fields: Any) -> Held:
        job = Job(prompt="hi", options=Options(max_tokens=5, n=fields.pop("n", 1)))
        self.jobs.receive([delivery(job.payload(), **fields)])
        (held,) = self.leases
        return held

    async def finish_intake(self) -> None:
        """Let the intake end, and its callback run."""
        self.tokenizer.gate.set()
        await asyncio.get_running_loop().run_in_executor(self.pool, lambda: None)
        # the callback of the pool's future was queued before ours
        await asyncio.sleep(0)


def play(story: Callable[[Scene], Any], *, intake: type[Intake] = Intake) -> Scene:
    async def run() -> Scene:
        with ThreadPoolExecutor(1) as pool:
            scene = Scene(pool, intake)
            try:
                await story(scene)
            finally:
                scene.tokenizer.gate.set()
        return scene

    return asyncio.run(run())


def test_a_job_that_the_intake_ends_during_a_drain_goes_back() -> None:
    """
    What is read while the engine gives up its unstarted jobs is handed back with them, and not run.
    """
    taken = []

    async def story(scene: Scene) -> None:
        scene.receive()
        scene.thread.meanwhile = scene.finish_intake
        taken.extend(await scene.jobs.take_unstarted())

    scene = play(story)

    assert ["job"] == [held.delivery.job_id for held in taken]
    assert [] == scene.thread.added


@pytest.mark.parametrize(("status", "code"), [("cancelled", None), ("expired", "deadline_passed")])
def test_a_job_that_is_stopped_while_it_is_read_does_not_run(status: Any, code: str | None) -> None:
    """
    A cancel or a deadline holds also for what the intake ends while the engine is asked.
    """

    async def story(scene: Scene) -> None:
        scene.receive()
        scene.thread.meanwhile = scene.finish_intake
        await scene.jobs.stop(["job"], status)

    scene = play(story)
    (ended,) = scene.ends.ended

    assert (status, code) == (ended.status, ended.failure and ended.failure.code)
    assert [] == scene.thread.added


def test_answers_count_as_places_once_they_are_known() -> None:
    """
    A job takes one place while it is read, then as many as it asks for answers.
    """
    transits = []

    async def story(scene: Scene) -> None:
        scene.receive(n=3, tokens=40)
        transits.append(scene.jobs.transit)
        await scene.finish_intake()
        transits.append(scene.jobs.transit)

    play(story)

    assert [[Transit(), Transit(1, 40), Transit()], [Transit(), Transit(3, 40), Transit()]] == transits


@pytest.mark.parametrize(
    ("attempt", "lapses", "buried"),
    [
        (MAX_ATTEMPTS, 0, []),
        (MAX_ATTEMPTS + 1, 0, ["retries"]),
        (1, MAX_ATTEMPTS * LAPSES_PER_ATTEMPT, []),
        (1, MAX_ATTEMPTS * LAPSES_PER_ATTEMPT + 1, ["lapses"]),
    ],
)
def test_attempts_and_lapses_have_limits_of_their_own(attempt: int, lapses: int, buried: list[DeathCause]) -> None:
    """
    A job may be lost with its workers more often than it may be tried, but not for ever: it is buried then.
    """

    async def story(scene: Scene) -> None:
        scene.receive(attempt=attempt, lapses=lapses)

    scene = play(story)

    assert (buried, []) == (scene.buried, scene.ends.ended)


@pytest.mark.parametrize(
    ("fault", "code", "buried"),
    [
        ("store", "lost_payload", []),
        ("payload", "lost_payload", []),
        ("version", "unsupported_version", []),
        ("memory", None, ["retries"]),
    ],
)
def test_a_job_that_cannot_be_read_is_put_off_and_then_given_up(
    fault: Fault, code: str | None, buried: list[DeathCause]
) -> None:
    """
    First it leaves this worker's hands; when it was tried often enough it ends here, and says why.
    """

    class Unreadable(Intake):
        def prepare(self, deliveries: Sequence[Delivery]) -> list[Prepared]:
            return [Deferred(one, fault, "the reason") for one in deliveries]

    async def story(scene: Scene) -> None:
        for _ in range(2):
            scene.receive(num_faults=6)
            await scene.finish_intake()
            held.append(len(scene.leases))
            transit.append(scene.jobs.transit[1])

    held: list[int] = []
    transit: list[Transit] = []
    scene = play(story, intake=Unreadable)

    assert ([fault] * 2, [0, 1], [Transit()] * 2) == (scene.faults, held, transit)
    failures = [ended.failure for ended in scene.ends.ended]
    assert [(code, "the job is given up after 7 tries: the reason")] * (code is not None) == [
        (failure.code, failure.message) for failure in failures if failure
    ]
    assert buried == scene.buried


def test_an_answer_that_is_none_is_tried_again_once() -> None:
    """
    The first is put off, as it may be the device's fault; the second is the job's result.
    """
    broken = Completion(0, (), "", FinishReason.ERROR, error="the logits were not finite")

    async def story(scene: Scene) -> None:
        for _ in range(2):
            scene.receive()
            await scene.finish_intake()
            turn = Turn(finished=[RequestOutput("job", (broken,), 2, 0)])
            scene.jobs.on_turns([turn])

    scene = play(story)

    assert ["answer", "answer"] == scene.faults
    assert ["done"] == [ended.status for ended in scene.ends.ended]
