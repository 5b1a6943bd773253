"""The table of held jobs: what enters, what leaves, what is saved."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from engine.request import Progress, Request
from engine.sampling_params import SamplingParams
from pagemill.errors import QueueUnavailable
from pagemill.messages import Checkpoint, Delivery, Renewal
from pagemill.schema import Job
from tests.support.deliveries import delivery, intake
from tests.support.engine_thread import EngineThread
from worker.checkpoints import Saved, decode
from worker.fake_engine import ByteTokenizer, FakeEngine
from worker.leases import Held, Leases


class ScriptedConsumer:
    """Notes each renewal and gives the next answer, or raises it; by default all is well."""

    def __init__(self, *answers: Renewal | Exception) -> None:
        self.checkpoints: list[Mapping[str, Checkpoint]] = []
        self.answers = list(answers)

    async def renew(self, _held: Sequence[Delivery], checkpoints: Mapping[str, Checkpoint]) -> Renewal:
        self.checkpoints.append(checkpoints)
        answer = self.answers.pop(0) if self.answers else Renewal()
        if isinstance(answer, Exception):
            raise answer
        return answer


def hold_running(leases: Leases, engine: FakeEngine, **options: int) -> Held:
    """Hold one job of which the engine has generated some tokens."""
    (held,) = leases.hold([delivery()])
    held.job = Job.build(prompt="hi", options={"max_tokens": 50, **options})
    held.request = Request("job", ByteTokenizer().encode("hi"), SamplingParams(max_tokens=50, **options))
    held.saved = Saved([0] * held.request.params.n)
    held.in_engine = True
    engine.add(held.request)
    engine.step()
    return held


def renewals(consumer: ScriptedConsumer, *, times: int, now: float, steps: int = 1, **options: int) -> list[Renewal]:
    """Renew several times, with steps of the engine between."""

    async def run() -> list[Renewal]:
        engine = FakeEngine(tokens_per_s=1.0, sleep=lambda _: None)
        clock = [0.0]
        thread = EngineThread(engine)
        leases = Leases(consumer, thread, intake(), lease_s=3.0, clock=lambda: clock[0])  # type: ignore[arg-type]
        hold_running(leases, engine, **options)
        # an engine that stands still between the renewals: its thread only answers
        thread.call = lambda command: _answer(command(engine))  # type: ignore[method-assign,assignment]
        clock[0] = now
        answers = []
        for _ in range(times):
            with contextlib.suppress(QueueUnavailable):
                answers.append(await leases.renew())
            for _ in range(steps):
                engine.step()
        return answers

    return asyncio.run(run())


async def _answer(value: object) -> object:
    return value


def test_young_jobs_are_renewed_without_a_checkpoint() -> None:
    """
    A job that has just begun costs no checkpoint: it may end before the next renewal.
    """
    consumer = ScriptedConsumer()
    renewals(consumer, times=1, now=0.3)

    assert [{}] == consumer.checkpoints


def tokens_of(*saved: Checkpoint, n: int = 1) -> list[int]:
    """How many tokens of each answer these checkpoints have together."""
    answers = decode(b"".join(one.records for one in saved), n=n, with_logprobs=False)
    return [len(answer.token_ids) for answer in answers]


def test_an_old_job_is_saved_soon_enough() -> None:
    """
    The age at which a job is first saved and the time between renewals are less than half a lease together.
    """
    consumer = ScriptedConsumer()
    leases = Leases(consumer, None, intake(), lease_s=3.0)  # type: ignore[arg-type]
    renewals(consumer, times=1, now=1.49 - leases.renew_every_s)

    assert ["job"] == list(consumer.checkpoints[0])


def test_checkpoints_carry_what_is_new() -> None:
    """
    Each renewal saves the tokens since the one before, at the offset where they belong.
    """
    consumer = ScriptedConsumer()
    renewals(consumer, times=3, now=1.5, steps=2)
    saved = [checkpoints["job"] for checkpoints in consumer.checkpoints]

    assert [0, saved[0].end, saved[1].end] == [one.offset for one in saved]
    assert [[1], [2], [2]] == [tokens_of(one) for one in saved]
    assert 1 == len({one.meta for one in saved})


def test_leases_do_not_wait_for_a_long_step() -> None:
    """
    Where the engine does not answer in time the leases are renewed without a checkpoint.
    """

    async def silence() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        engine = FakeEngine(tokens_per_s=1.0, sleep=lambda _: None)
        thread = EngineThread(engine)
        leases = Leases(consumer, thread, intake(), lease_s=0.3, clock=lambda: 1000.0)  # type: ignore[arg-type]
        hold_running(leases, engine).since = 0.0
        thread.call = lambda _: silence()  # type: ignore[method-assign,assignment]
        await asyncio.wait_for(leases.renew(), 20)

    consumer = ScriptedConsumer()
    asyncio.run(run())

    assert [{}] == consumer.checkpoints


def test_every_answer_is_saved() -> None:
    """
    A job with several answers has all of them in its checkpoint.
    """
    consumer = ScriptedConsumer()
    renewals(consumer, times=2, now=1.5, steps=2, n=3)

    assert [3, 3, 3] == tokens_of(*(checkpoints["job"] for checkpoints in consumer.checkpoints), n=3)


def test_a_stale_checkpoint_is_sent_whole_again() -> None:
    """
    When the queue has not what we thought, the next checkpoint starts from 0.
    """
    consumer = ScriptedConsumer(Renewal(), Renewal(stale=frozenset({"job"})))
    renewals(consumer, times=3, now=1.5)
    saved = [checkpoints["job"] for checkpoints in consumer.checkpoints]

    assert [0, saved[0].end, 0] == [one.offset for one in saved]
    assert [3] == tokens_of(saved[2])


def test_a_checkpoint_without_a_reply_is_sent_again_with_more() -> None:
    """
    When the server went away during a renewal, the next one repeats what it may have missed.
    """
    consumer = ScriptedConsumer(Renewal(), QueueUnavailable("away"))
    renewals(consumer, times=4, now=1.5)
    first, lost, again, last = (checkpoints["job"] for checkpoints in consumer.checkpoints)

    assert (first.end, first.end, again.end) == (lost.offset, again.offset, last.offset)
    assert again.records.startswith(lost.records)
    assert [4] == tokens_of(first, again, last)


def test_a_full_checkpoint_is_still_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What fitted and has no reply is repeated until it has one, and nothing is added to it.
    """
    monkeypatch.setattr("worker.checkpoints.MAX_CHECKPOINT_BYTES", 40)
    consumer = ScriptedConsumer(Renewal(), QueueUnavailable("away"))
    renewals(consumer, times=4, now=1.5, n=2)
    first, lost, again, last = (checkpoints.get("job") for checkpoints in consumer.checkpoints)

    assert first is not None
    assert lost is not None
    assert (24, 36) == (first.end, lost.end)
    assert (lost, None) == (again, last)


def test_a_job_that_comes_back_to_us_is_saved_anew() -> None:
    """
    Another worker may have written its checkpoint meanwhile: ours replaces it from 0.
    """
    leases = Leases(ScriptedConsumer(), None, intake(), lease_s=3.0)  # type: ignore[arg-type]
    (held,) = leases.hold([delivery()])
    held.saved = Saved.of([Progress((1, 2))], num_bytes=16)
    leases.hold([replace(delivery(), entry_id="2-2")])

    assert Saved([0]) == held.saved


def test_a_job_that_comes_back_to_us_goes_on_under_its_new_entry() -> None:
    """
    A job that we lost while we slept and pulled again is not new: its entry is replaced.
    """
    engine = EngineThread(FakeEngine())
    leases = Leases(ScriptedConsumer(), engine, intake(), lease_s=3.0)  # type: ignore[arg-type]
    first = delivery()
    second = replace(first, entry_id="2-2")

    assert [first] == [held.delivery for held in leases.hold([first])]
    assert [] == leases.hold([second])
    held = leases.get("job")
    assert held is not None
    assert second is held.delivery
    assert 1 == len(leases)
