"""Writing results: batches, servers that are away, entries that have changed hands."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.request import Completion, FinishReason, RequestOutput, TokenLogprob
from pagemill.errors import ObjectStoreError, QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.messages import Finished, Outcome
from pagemill.object_store import FileStore
from pagemill.schema import Job
from tests.support.deliveries import delivery
from worker.fake_engine import ByteTokenizer
from worker.leases import Held
from worker.results import ResultMaker
from worker.sinks import MAX_BATCH, Ended, Sink


class ScriptedConsumer:
    """Notes each batch, and answers with what it was given; by default all are done."""

    def __init__(self, *answers: Exception | list[Outcome], meanwhile: Callable[[], None] = lambda: None) -> None:
        self.keys = QueueKeys("q")
        self.batches: list[list[Finished]] = []
        self._answers = list(answers)
        self._meanwhile = meanwhile

    async def finish(self, batch: Sequence[Finished]) -> list[Outcome]:
        self.batches.append(list(batch))
        self._meanwhile()
        answer = self._answers.pop(0) if self._answers else ["done"] * len(batch)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]


class FlakyStore(FileStore):
    """Refuses the first write."""

    refused = 0

    def put(self, name: str, data: bytes) -> str:
        self.refused += 1
        if self.refused == 1:
            raise ObjectStoreError("slow down")
        return super().put(name, data)


def held(job_id: str = "job", **fields: str) -> Held:
    return Held(delivery(job_id=job_id), 0.0, job=Job.build(prompt="x", **fields))


def output(text: str = "hi", logprobs: tuple[TokenLogprob, ...] | None = None) -> RequestOutput:
    completion = Completion(0, tuple(text.encode()), text, FinishReason.STOP, logprobs)
    return RequestOutput("job", (completion,), 3, 0)


def write(consumer: ScriptedConsumer, ended: Sequence[Ended], store: FileStore | None = None) -> list[Outcome]:
    """Put what has ended into a sink and return the outcomes when all is written."""
    outcomes: list[Outcome] = []

    async def run() -> None:
        sink = Sink(
            consumer,  # type: ignore[arg-type]
            store,
            ResultMaker(tokenizer=ByteTokenizer(), model="fake", worker_id="w"),
            inline_bytes=1000,
            on_settled=lambda _held, outcome, _result: outcomes.append(outcome),
        )
        task = asyncio.create_task(sink.run())
        for one in ended:
            sink.put(one)
        async with asyncio.timeout(20):
            while len(sink):
                await asyncio.sleep(0.002)
            await sink.close()
        task.cancel()

    asyncio.run(run())
    return outcomes


def test_results_are_written_in_batches() -> None:
    """
    What ends together is written together, up to the size of a batch.
    """
    consumer = ScriptedConsumer()
    outcomes = write(consumer, [Ended(held(f"job-{number}"), "done", output()) for number in range(100)])

    assert ["done"] * 100 == outcomes
    assert [MAX_BATCH, 100 - MAX_BATCH] == [len(batch) for batch in consumer.batches]


def test_a_batch_is_repeated_while_the_server_is_away() -> None:
    """
    A write that met no server is made again, whole, until one answers.
    """
    consumer = ScriptedConsumer(QueueUnavailable("away"), QueueUnavailable("away"), ["duplicate"])
    outcomes = write(consumer, [Ended(held(), "done", output())])

    assert ["duplicate"] == outcomes
    assert 3 == len(consumer.batches)


def test_a_result_follows_its_job_to_a_new_entry() -> None:
    """
    When the job was lost and pulled again while its result was written, the new entry gets it.
    """
    one = held()
    second = replace(one.delivery, entry_id="2-2")

    def pull_again() -> None:
        one.delivery = second

    consumer = ScriptedConsumer(["fenced"], ["done"], meanwhile=pull_again)
    outcomes = write(consumer, [Ended(one, "done", output())])

    assert ["done"] == outcomes
    assert ["1-1", "2-2"] == [batch[0].delivery.entry_id for batch in consumer.batches]


def test_a_result_of_another_workers_job_is_dropped() -> None:
    """
    A fenced result is not sent again.
    """
    consumer = ScriptedConsumer(["fenced"])

    assert ["fenced"] == write(consumer, [Ended(held(), "done", output())])
    assert 1 == len(consumer.batches)


def test_an_upload_is_repeated_and_holds_up_nobody(tmp_path: Path) -> None:
    """
    While the store refuses a large result, small ones are written; it follows when the store takes it.
    """
    consumer = ScriptedConsumer()
    large, small = Ended(held("large"), "done", output("x" * 5000)), Ended(held("small"), "done", output())
    write(consumer, [large, small], FlakyStore(tmp_path))
    written = [finished for batch in consumer.batches for finished in batch]

    assert ["small", "large"] == [finished.delivery.job_id for finished in written]
    assert [None, (tmp_path / "results/q/large-1-1.json").as_uri()] == [finished.ref for finished in written]


def test_an_answer_that_ended_in_an_error_is_a_failure() -> None:
    """
    Where the engine says that an answer failed, the job has failed, with the engine's words.
    """
    consumer = ScriptedConsumer()
    broken = Completion(0, (), "", FinishReason.ERROR, error="the logits were not finite")
    write(consumer, [Ended(held(), "done", RequestOutput("job", (broken,), 3, 0))])
    result = consumer.batches[0][0].result

    assert "failed" == result.status
    assert result.failure is not None
    assert ("engine_error", "the logits were not finite") == (result.failure.code, result.failure.message)


def test_logprobs_carry_the_tokens_text() -> None:
    """
    Log-probabilities name tokens by id and by text.
    """
    consumer = ScriptedConsumer()
    write(consumer, [Ended(held(), "done", output("h", (TokenLogprob(104, -0.5, ((105, -1.0),)),)))])
    logprobs = consumer.batches[0][0].result.completions[0].logprobs

    assert logprobs is not None
    assert ("h", ((105, "i", -1.0),)) == (logprobs[0].token, logprobs[0].top)


def test_a_payload_in_the_store_goes_when_its_job_has_ended(tmp_path: Path) -> None:
    """
    What a producer put into the store for the worker is deleted once the result is written, and not before.
    """
    store = FileStore(tmp_path)
    outcomes: list[Outcome] = ["done", "duplicate", "gone", "fenced"]
    jobs = [held(outcome) for outcome in outcomes]
    for one in jobs:
        one.delivery = replace(one.delivery, payload=None, payload_ref=store.put(one.delivery.job_id, b"{}"))

    write(ScriptedConsumer(outcomes), [Ended(one, "done", output()) for one in jobs], store)

    assert ["fenced"] == [path.name for path in tmp_path.iterdir()]


def test_a_fenced_worker_touches_no_published_result(tmp_path: Path) -> None:
    """
    Its object has a name of its own, and goes when the queue refuses the result.
    """
    store = FileStore(tmp_path)
    ours, theirs = held("job", result_store="object"), held("job", result_store="object")
    theirs.delivery = replace(theirs.delivery, entry_id="2-2")

    write(ScriptedConsumer(), [Ended(theirs, "done", output("published"))], store)
    write(ScriptedConsumer(["fenced"]), [Ended(ours, "done", output("late"))], store)
    (left,) = (tmp_path / "results" / "q").iterdir()

    assert "job-2-2.json" == left.name
    assert "published" in left.read_text()


def test_a_result_object_stays_where_it_may_be_the_published_one(tmp_path: Path) -> None:
    """
    A "duplicate" can be the echo of our own write, whose reply was lost: the reference must hold.
    """
    consumer = ScriptedConsumer(["duplicate"])
    write(consumer, [Ended(held("job", result_store="object"), "done", output())], FileStore(tmp_path))

    assert FileStore(tmp_path).exists(str(consumer.batches[0][0].ref))


def test_a_result_that_no_server_should_hold_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Without a store a result above the limit becomes a failure that says what to do; its neighbours are written.
    """
    monkeypatch.setattr("worker.sinks.MAX_INLINE_BYTES", 4000)
    consumer = ScriptedConsumer()

    write(consumer, [Ended(held("large"), "done", output("x" * 5000)), Ended(held("small"), "done", output())])

    [[large, small]] = consumer.batches
    assert ("failed", "done") == (large.result.status, small.result.status)
    assert large.result.failure is not None
    assert "payload_too_large" == large.result.failure.code
    assert "--object-store" in large.result.failure.message


def test_large_results_are_written_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A batch ends where its bytes would be too many for one call.
    """
    monkeypatch.setattr("worker.sinks.MAX_BATCH_BYTES", 20_000)
    consumer = ScriptedConsumer()

    write(consumer, [Ended(held(str(number)), "done", output("x" * 3000)) for number in range(5)])

    assert [2, 2, 1] == [len(batch) for batch in consumer.batches]
