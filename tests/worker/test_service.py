"""The service against a real server, with the fake engine."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from engine.request import Completion, FinishReason, StepOutputs
from pagemill.client import Client
from pagemill.errors import Busy
from pagemill.keys import MODELS
from pagemill.object_store import FileStore
from pagemill.schema import MAX_PAYLOAD_BYTES, Job
from producers.local_redis import local_redis
from tests.support.servers import wait_for
from tests.support.services import RunningService
from tests.support.unchecked import submit_unchecked
from worker.fake_engine import FakeEngine
from worker.leases import RENEWALS_PER_LEASE


def slow_engine(tokens_per_s: float = 200.0, **options: int) -> FakeEngine:
    return FakeEngine(tokens_per_s=tokens_per_s, **options)


def test_jobs_are_answered(server_url: str, queue: str, client: Client) -> None:
    """
    Every job gets its answer, whatever the order, and nothing is left in the queue.
    """
    with RunningService(server_url, queue):
        jobs = [Job.build(prompt=f"job {number}", options={"max_tokens": 8}) for number in range(150)]
        client.submit_many(jobs)
        results = {job.id: client.result(job.id, wait_s=20) for job in jobs}

    assert {"done"} == {result.status for result in results.values()}
    assert {8} == {result.usage.completion_tokens for result in results.values()}
    assert 150 == len({result.text for result in results.values()})
    assert 0 == client.stats().running


BAD_OPTIONS = {
    "max_tokens_0": ({"max_tokens": 0}, "invalid_job"),
    "negative_temperature": ({"temperature": -0.5}, "invalid_job"),
    "unknown_option": ({"temprature": 1.0}, "invalid_job"),
    "grammar_of_a_later_version": ({"json_schema": {"type": "object"}}, "invalid_job"),
    "token_id_outside": ({"stop": [""]}, "invalid_job"),
}


def bad_payloads() -> dict[str, tuple[bytes, str]]:
    bad = {
        name: (json.dumps({"version": 1, "prompt": "x", "options": options}).encode(), code)
        for name, (options, code) in BAD_OPTIONS.items()
    }
    return bad | {
        "empty_prompt": (b'{"version":1,"prompt":""}', "empty_prompt"),
        "over_long_prompt": (json.dumps({"version": 1, "prompt": "x" * 9000}).encode(), "prompt_too_long"),
        "unknown_field": (b'{"version":1,"prompt":"x","promt":"y"}', "invalid_job"),
        "no_json": (b"{not json", "invalid_job"),
        "invalid_utf8": (b'{"version":1,"prompt":"\xff\xfe"}', "invalid_encoding"),
        "ten_megabytes": (b'{"version":1,"prompt":"' + b"x" * 10_000_000 + b'"}', "payload_too_large"),
        "unknown_model": (b'{"version":1,"prompt":"x","model":"gpt-0"}', "unknown_model"),
        "token_ids": (b'{"version":1,"prompt":[1,2,99999999999]}', "invalid_job"),
        "no_grammars_here": (b'{"prompt":"x","options":{"regex":"a"}}', "not_supported"),
        "no_regex": (b'{"prompt":"x","options":{"regex":"a("}}', "invalid_grammar"),
        "no_store": (b'{"version":1,"prompt":"x","result_store":"object"}', "not_supported"),
    }


def test_bad_jobs_fail_with_their_code_and_stop_nobody(server_url: str, queue: str, client: Client) -> None:
    """
    Each bad job ends as failed with its typed code, and the good jobs beside them are answered.
    """
    bad = bad_payloads()
    assert any(len(payload) > MAX_PAYLOAD_BYTES for payload, _ in bad.values())
    good = []
    for name, (payload, _) in bad.items():
        submit_unchecked(server_url, queue, f"{queue}-{name}", payload)
        good.append(client.submit(prompt=f"beside {name}", options={"max_tokens": 4}).job_id)

    with RunningService(server_url, queue):
        codes = {name: client.result(f"{queue}-{name}", wait_s=20).failure for name in bad}
        answers = [client.result(job_id, wait_s=20) for job_id in good]

    assert {name: code for name, (_, code) in bad.items()} == {
        name: failure.code for name, failure in codes.items() if failure
    }
    assert all(len(failure.message) > 10 for failure in codes.values() if failure)
    assert {"done"} == {answer.status for answer in answers}


def test_a_deadline_ends_a_running_job_with_its_partial_text(server_url: str, queue: str, client: Client) -> None:
    """
    A job whose time is over while it runs ends as expired and keeps the text that it had.
    """
    with RunningService(server_url, queue, engine=slow_engine(), lease_s=1.5):
        late = client.submit(prompt="late", timeout_s=2.0, options={"max_tokens": 4000}).job_id
        good = client.submit(prompt="good", options={"max_tokens": 5}).job_id
        assert "done" == client.result(good, wait_s=20).status
        result = client.result(late, wait_s=20)

    assert ("expired", "deadline_passed") == (result.status, result.failure and result.failure.code)
    assert 0 < len(result.text) < 4000


def test_a_deadline_that_passed_in_the_queue_costs_nothing(
    server_url: str, queue: str, client: Client, redis: Redis
) -> None:
    """
    A job that nobody took in time ends as expired without reaching the engine.
    """
    late = client.submit(prompt="late", timeout_s=0.05, options={"max_tokens": 5}).job_id
    deadline_ms = client.status(late).deadline_ms
    wait_for(lambda: redis.time()[0] * 1000 + redis.time()[1] // 1000 > deadline_ms)
    with RunningService(server_url, queue) as running:
        result = client.result(late, wait_s=20)

    assert ("expired", 0) == (result.status, running.engine.stats().prompt_tokens)
    assert result.failure is not None
    assert "deadline_passed" == result.failure.code


def test_a_cancelled_job_keeps_its_partial_text(server_url: str, queue: str, client: Client) -> None:
    """
    Cancelling a running job ends it within a renewal, as cancelled, with the text so far; its blocks are free then.
    """
    lease_s, engine = 6.0, slow_engine()
    with RunningService(server_url, queue, engine=engine, lease_s=lease_s):
        job_id = client.submit(prompt="stop me", options={"max_tokens": 4000}).job_id
        wait_for(lambda: engine.stats().generated_tokens > 5, 20)
        cancelled_at = time.monotonic()
        client.cancel(job_id)
        wait_for(lambda: not engine.has_work, 20)
        took_s = time.monotonic() - cancelled_at
        result = client.result(job_id, wait_s=20)

    assert took_s < lease_s / RENEWALS_PER_LEASE + 1
    assert engine.kv_tokens == engine.capacity().free_tokens
    assert "cancelled" == result.status
    assert 0 < len(result.text) < 4000


def test_a_cancelled_job_that_waits_in_a_workers_hands_gives_its_room_back(
    server_url: str, queue: str, client: Client
) -> None:
    """
    Within a renewal as well: it was never computed, and the one before it goes on.
    """
    lease_s, engine = 6.0, slow_engine(max_num_seqs=1)
    with RunningService(server_url, queue, engine=engine, lease_s=lease_s):
        before = client.submit(prompt="goes on", options={"max_tokens": 4000}).job_id
        wait_for(lambda: engine.stats().num_running == 1, 20)
        free_tokens = engine.capacity().free_tokens
        waiting = client.submit(prompt="waits behind it", options={"max_tokens": 4000}).job_id
        wait_for(lambda: engine.stats().num_waiting == 1, 20)
        assert engine.capacity().free_tokens < free_tokens
        cancelled_at = time.monotonic()
        client.cancel(waiting)
        wait_for(lambda: engine.stats().num_waiting == 0, 20)
        took_s = time.monotonic() - cancelled_at
        freed_tokens = engine.capacity().free_tokens
        result = client.result(waiting, wait_s=20)
        state = client.status(before).state
        client.cancel(before)
        client.result(before, wait_s=20)

    assert took_s < lease_s / RENEWALS_PER_LEASE + 1
    assert (free_tokens, "running") == (freed_tokens, state)
    assert ("cancelled", "", 0) == (result.status, result.text, result.usage.completion_tokens)


def test_a_large_result_goes_to_the_object_store(server_url: str, queue: str, tmp_path: Path) -> None:
    """
    A result above the limit, or one that asks for it, lies in the store; the client reads both.
    """
    store = FileStore(tmp_path)
    with (
        RunningService(server_url, queue, store=store, inline_result_bytes=2_000),
        Client(server_url, queue=queue, object_store=store) as reader,
    ):
        large = reader.submit(prompt="large", options={"max_tokens": 3_000}).job_id
        small = reader.submit(prompt="small", options={"max_tokens": 3}).job_id
        asked = reader.submit(prompt="asked", options={"max_tokens": 3}, result_store="object").job_id
        kept = reader.submit(prompt="kept", options={"max_tokens": 3_000}, result_store="redis").job_id
        lengths = [len(reader.result(job_id, wait_s=20).text) for job_id in (large, small, asked, kept)]

    assert [3_000, 3, 3, 3_000] == lengths
    assert {large, asked} == {path.stem[:36] for path in (tmp_path / "results" / queue).iterdir()}


def test_streamed_text_adds_up(server_url: str, queue: str, client: Client) -> None:
    """
    What a reader of the token stream sees, end to end, is the text of the result.
    """
    with RunningService(server_url, queue, engine=slow_engine(500.0)):
        job_id = client.submit(prompt="aloud", stream=True, options={"max_tokens": 60}).job_id
        text = "".join(delta.text for delta in client.stream(job_id, wait_s=20))
        result = client.result(job_id, wait_s=20)

    assert result.text == text
    assert 60 == len(text)


class FailingEngine(FakeEngine):
    """Dies in the step after it has been given a poisonous prompt."""

    poisoned = False

    def add(self, request: object) -> None:
        super().add(request)  # type: ignore[arg-type]
        self.poisoned |= b"poison" in bytes(request.prompt.astype("u1"))  # type: ignore[attr-defined]

    def step(self) -> StepOutputs:
        if self.poisoned:
            raise RuntimeError("the device is gone")
        return super().step()


def test_a_failing_step_ends_the_worker_and_loses_nothing(server_url: str, queue: str, client: Client) -> None:
    """
    When the engine dies, the process gives all jobs back and stops; another worker answers them.
    """
    jobs = [client.submit(prompt=f"job {number}", options={"max_tokens": 4}).job_id for number in range(20)]
    jobs.append(client.submit(prompt="poison", options={"max_tokens": 4}).job_id)
    failing = RunningService(server_url, queue, engine=FailingEngine())
    with failing:
        failing.join()
    assert isinstance(failing.error, RuntimeError)

    with RunningService(server_url, queue):
        results = [client.result(job_id, wait_s=20) for job_id in jobs]

    assert {"done"} == {result.status for result in results}


def test_a_job_that_always_ends_its_worker_is_given_up(server_url: str, queue: str, client: Client) -> None:
    """
    A poisonous job is failed after its attempts, and kept as a dead letter with its payload.
    """
    job_id = client.submit(prompt="poison", options={"max_tokens": 4}).job_id
    while client.status(job_id).state not in ("done", "failed"):
        with RunningService(server_url, queue, engine=FailingEngine(), max_attempts=2) as running:
            wait_for(lambda: client.status(job_id).ended or not running._thread.is_alive())
    result = client.result(job_id)
    [letter] = client.dead_letters()

    assert ("failed", "engine_error") == (result.status, result.failure and result.failure.code)
    assert (job_id, "retries", "poison") == (letter.job_id, letter.why, Job.parse(letter.payload or b"").prompt)


class BrokenOnce(FakeEngine):
    """Its first answers are none, as after a wrong bit in the device's memory."""

    num_broken = 0

    def step(self) -> StepOutputs:
        outputs = super().step()
        broken = tuple(
            replace(one, completions=tuple(map(as_error, one.completions)))
            for one in outputs.finished
            if self.num_broken == 0
        )
        self.num_broken += len(broken)
        return replace(outputs, finished=broken) if broken else outputs


def as_error(answer: Completion) -> Completion:
    return replace(answer, finish_reason=FinishReason.ERROR, error="the logits were not finite")


def test_an_answer_that_is_none_is_tried_again(server_url: str, queue: str, client: Client) -> None:
    """
    What was wrong with the device once does not fail the job; the second attempt is its answer.
    """
    with RunningService(server_url, queue, engine=BrokenOnce(), lease_s=1.0):
        job_id = client.submit(prompt="x", options={"max_tokens": 4}).job_id
        result = client.result(job_id, wait_s=20)

    assert ("done", 2) == (result.status, result.attempt)


def test_a_full_server_stops_nobody() -> None:
    """
    While the server has no memory a worker waits, and then every job has its result.
    """
    with (
        local_redis() as url,
        Client(url, queue="full") as client,
        Redis.from_url(url) as server,
        RunningService(url, "full", engine=slow_engine(400.0), lease_s=1.5) as running,
    ):
        jobs = [client.submit(prompt=f"job {number}", options={"max_tokens": 40}).job_id for number in range(20)]
        wait_for(lambda: running.engine.stats().generated_tokens > 20)
        server.config_set("maxmemory", "1mb")
        with pytest.raises(Busy):
            client.submit(prompt="too much")
        wait_for(lambda: running.service.num_done > 0 or not running.engine.has_work)
        # several beats, renewals and sweeps meet the full server
        calls_before = server.info("stats")["total_commands_processed"]
        wait_for(lambda: server.info("stats")["total_commands_processed"] > calls_before + 40)
        assert running._thread.is_alive()
        server.config_set("maxmemory", "0")
        results = [client.result(job_id, wait_s=20) for job_id in jobs]

    assert running.error is None
    assert [("done", 40)] * 20 == [(result.status, result.usage.completion_tokens) for result in results]


def test_a_step_that_hangs_is_not_healthy(server_url: str, queue: str, client: Client) -> None:
    """
    The worker says so while the step runs too long, and is well again when it has ended.
    """
    let_go = threading.Event()

    class Hanging(FakeEngine):
        def step(self) -> StepOutputs:
            assert let_go.wait(20)
            return super().step()

    with RunningService(server_url, queue, engine=Hanging(), step_timeout_s=0.2) as running:
        wait_for(lambda: running.service.healthy)
        job_id = client.submit(prompt="x", options={"max_tokens": 3}).job_id
        wait_for(lambda: not running.service.healthy)
        let_go.set()
        assert "done" == client.result(job_id, wait_s=20).status
        wait_for(lambda: running.service.healthy)


def test_aliases_are_routed_to_the_queue(server_url: str, queue: str, redis: Redis) -> None:
    """
    Each name that a worker answers to leads to its queue.
    """
    with RunningService(server_url, queue, aliases=("short", "long-name")):
        wait_for(lambda: redis.hget(MODELS, "long-name"))
    routes = {name.decode(): where.decode() for name, where in redis.hgetall(MODELS).items()}

    assert dict.fromkeys(("fake", "short", "long-name"), queue) == routes


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_prompt_is_cut_where_the_job_says(server_url: str, queue: str, client: Client, side: str) -> None:
    """
    With truncate set, a prompt that is too long is cut so that the answer fits.
    """
    with RunningService(server_url, queue, engine=FakeEngine(max_model_len=100)):
        job_id = client.submit(prompt="x" * 500, options={"max_tokens": 30, "truncate": side}).job_id
        usage = client.result(job_id, wait_s=20).usage

    assert (70, 30) == (usage.prompt_tokens, usage.completion_tokens)
