"""The table of held jobs: what enters, what leaves, what is saved."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.request import Request
from engine.sampling_params import SamplingParams
from pagemill.messages import Checkpoint, Delivery, Renewal
from pagemill.schema import Job
from tests.support.deliveries import delivery, intake
from worker.engine_thread import EngineThread
from worker.fake_engine import ByteTokenizer, FakeEngine
from worker.leases import Held, Leases


class ScriptedConsumer:
    """Notes each renewal and gives the next answer; by default all is well."""

    def __init__(self, *answers: Renewal) -> None:
        self.checkpoints: list[Mapping[str, Checkpoint]] = []
        self.answers = list(answers)

    async def renew(self, _held: Sequence[Delivery], checkpoints: Mapping[str, Checkpoint]) -> Renewal:
        self.checkpoints.append(checkpoints)
        return self.answers.pop(0) if self.answers else Renewal()


def hold_running(leases: Leases, engine: FakeEngine, **options: int) -> Held:
    """Hold one job of which the engine has generated some tokens."""
    (held,) = leases.hold([delivery()])
    held.job = Job.build(prompt="hi", options={"max_tokens": 50, **options})
    held.request = Request("job", ByteTokenizer().encode("hi"), SamplingParams(max_tokens=50))
    held.in_engine = True
    engine.add(held.request)
    engine.step()
    return held


def renewals(consumer: ScriptedConsumer, *, times: int, now: float, steps: int = 1, **options: int) -> list[Renewal]:
    """Renew several times, with steps of the engine between."""

    async def run() -> list[Renewal]:
        engine = FakeEngine(tokens_per_s=1.0, sleep=lambda _: None)
        clock = [0.0]
        thread = EngineThread(engine, on_turns=lambda _: None, on_crash=lambda _: None)
        leases = Leases(consumer, thread, intake(), lease_s=3.0, clock=lambda: clock[0])  # type: ignore[arg-type]
        hold_running(leases, engine, **options)
        # an engine that stands still between the renewals: its thread only answers
        thread.call = lambda command: _answer(command(engine))  # type: ignore[method-assign,assignment]
        clock[0] = now
        answers = []
        for _ in range(times):
            answers.append(await leases.renew())
            for _ in range(steps):
                engine.step()
        return answers

    return asyncio.run(run())


async def _answer(value: object) -> object:
    return value


def test_young_jobs_are_renewed_without_a_checkpoint() -> None:
    """
    A job that may be finished before the next renewal costs no checkpoint.
    """
    consumer = ScriptedConsumer()
    renewals(consumer, times=1, now=0.5)

    assert [{}] == consumer.checkpoints


def test_checkpoints_carry_what_is_new() -> None:
    """
    Each renewal saves the tokens since the one before, at the offset where they belong.
    """
    consumer = ScriptedConsumer()
    renewals(consumer, times=3, now=1.5, steps=2)
    saved = [checkpoints["job"] for checkpoints in consumer.checkpoints]

    assert [0, 4, 12] == [one.offset for one in saved]
    assert [4, 8, 8] == [len(one.token_ids) for one in saved]
    assert 1 == len({one.meta for one in saved})


def test_a_stale_checkpoint_is_sent_whole_again() -> None:
    """
    When the queue has not what we thought, the next checkpoint starts from 0.
    """
    consumer = ScriptedConsumer(Renewal(), Renewal(stale=frozenset({"job"})))
    renewals(consumer, times=3, now=1.5)
    saved = [checkpoints["job"] for checkpoints in consumer.checkpoints]

    assert [0, 4, 0] == [one.offset for one in saved]
    assert 12 == len(saved[2].token_ids)


def test_jobs_that_tokens_alone_cannot_continue_are_not_saved() -> None:
    """
    Jobs with several answers or log-probabilities have no checkpoint.
    """
    consumer = ScriptedConsumer()
    renewals(consumer, times=1, now=1.5, n=2)

    assert [{}] == consumer.checkpoints


def test_a_job_that_comes_back_to_us_goes_on_under_its_new_entry() -> None:
    """
    A job that we lost while we slept and pulled again is not new: its entry is replaced.
    """
    engine = EngineThread(FakeEngine(), on_turns=lambda _: None, on_crash=lambda _: None)
    leases = Leases(ScriptedConsumer(), engine, intake(), lease_s=3.0)  # type: ignore[arg-type]
    first = delivery()
    second = replace(first, entry_id="2-2")

    assert [first] == [held.delivery for held in leases.hold([first])]
    assert [] == leases.hold([second])
    held = leases.get("job")
    assert held is not None
    assert second is held.delivery
    assert 1 == len(leases)
