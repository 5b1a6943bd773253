"""SUBMIT: a job goes in once, whatever is repeated."""

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from pagemill import calls
from pagemill.client import Client
from pagemill.client_core import CHUNK, prepare
from pagemill.connection import connect
from pagemill.errors import Busy, Conflict, InvalidJob, QueueUnavailable, UnknownModel
from pagemill.keys import QueueKeys
from pagemill.messages import Accepted
from pagemill.schema import MAX_ANSWER_TOKENS, Job
from pagemill.scripts import run, run_many
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job


def test_a_repeated_submit_is_one_job(client: Client) -> None:
    """
    The same job sent twice is queued once, and the second answer says so.
    """
    job = a_job()

    answers = [client.submit(job), client.submit(job)]

    assert [Accepted(job.id, "queued", duplicate=False), Accepted(job.id, "queued", duplicate=True)] == answers
    assert 1 == client.stats().queued["standard"]


def test_an_id_with_another_content_is_a_conflict(client: Client) -> None:
    """
    An id that comes back with another job is refused, and the first job stays.
    """
    first = client.submit(a_job("one")).job_id

    with pytest.raises(Conflict) as caught:
        client.submit(a_job("two", id=first))

    assert first == caught.value.job_id
    assert 1 == client.stats().queued["standard"]


def test_an_idempotency_key_gives_the_first_job(client: Client, consumer: MakeConsumer) -> None:
    """
    Another id under the same key is the first job, in the state that it has by then.
    """
    first = client.submit(a_job(idempotency_key="report-7"))
    worker = consumer()
    worker.finish(*worker.pull())

    again = client.submit(a_job(idempotency_key="report-7"))

    assert Accepted(first.job_id, "done", duplicate=True) == again


def test_idempotency_keys_belong_to_tenants(client: Client) -> None:
    """
    The same key of two tenants names two jobs.
    """
    client.submit(a_job(idempotency_key="k", tenant="a"))

    assert not client.submit(a_job(idempotency_key="k", tenant="b")).duplicate


def test_a_key_with_another_content_is_a_conflict(client: Client) -> None:
    """
    The same key with another prompt is refused.
    """
    client.submit(a_job("one", idempotency_key="k"))

    with pytest.raises(Conflict):
        client.submit(a_job("two", idempotency_key="k"))


def test_the_record_of_a_key_lives_as_long_as_the_result(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A key has no expiry while its job lives, and the result's afterwards.
    """
    client.submit(a_job(idempotency_key="k", result_ttl_s=77))
    [record] = redis.keys(f"{QueueKeys(queue).base}:idem:*")
    before = redis.ttl(record)
    worker = consumer()
    worker.finish(*worker.pull())

    assert (-1, True) == (before, 70 < redis.ttl(record) <= 77)


def test_too_many_waiting_tokens_are_busy(server_url: str, queue: str) -> None:
    """
    A job that would pass the limit is refused with a time to wait; nothing of it stays.
    """
    with Client(server_url, queue=queue, max_queued_tokens=40) as client:
        client.submit(a_job())
        client.submit(a_job())
        with pytest.raises(Busy) as caught:
            client.submit(a_job())

        assert caught.value.retry_after_s > 0
        assert (2, 2) == (client.stats().queued["standard"], client.stats().totals["accepted"])


def test_a_job_above_the_limit_is_taken_when_nothing_waits(server_url: str, queue: str) -> None:
    """
    The limit on waiting tokens refuses no job for good.
    """
    with Client(server_url, queue=queue, max_queued_tokens=5) as client:
        assert not client.submit(a_job(max_tokens=100)).duplicate


def test_an_unknown_model_is_refused(client: Client, consumer: MakeConsumer) -> None:
    """
    A model that no worker registered is refused by name; a registered one is routed.
    """
    with pytest.raises(UnknownModel, match="'nope'"):
        client.submit(a_job(model="nope"))

    worker = consumer()
    worker.run(worker.consumer.heartbeat({"model": "tiny"}))
    accepted = client.submit(a_job(model="tiny"))

    assert [accepted.job_id] == [job.job_id for job in worker.pull()]


def test_a_model_of_another_queue_is_routed_there(server_url: str, queue: str) -> None:
    """
    A client of any queue reaches the model's queue, and finds the job there afterwards.
    """
    there = BlockingConsumer(server_url, queue)
    there.run(there.consumer.heartbeat({"model": f"model-of-{queue}"}))
    with Client(server_url, queue=f"{queue}-front") as front, Client(server_url, queue=f"{queue}-front") as other:
        job_id = front.submit(a_job(model=f"model-of-{queue}")).job_id
        there.finish(*there.pull())

        assert (queue, "answer") == (front.status(job_id).queue, other.text(job_id, wait_s=5))
    there.close()


def test_many_jobs_go_in_chunks_and_in_order(client: Client, consumer: MakeConsumer) -> None:
    """
    An iterable longer than a chunk is accepted in order and delivered in order.
    """
    jobs = [a_job(f"prompt {number}") for number in range(CHUNK + 70)]

    accepted = client.submit_many(iter(jobs))

    delivered = [job.job_id for job in consumer().pull(max_jobs=len(jobs))]
    assert [job.id for job in jobs] == [one.job_id for one in accepted] == delivered


def test_repeating_many_adds_nothing(client: Client) -> None:
    """
    A whole batch sent again is all duplicates.
    """
    jobs = [a_job(f"prompt {number}") for number in range(10)]
    client.submit_many(jobs)

    again = client.submit_many(jobs)

    assert {True} == {one.duplicate for one in again}
    assert 10 == client.stats().queued["standard"]


def test_duplicates_within_one_batch_are_one_job(client: Client) -> None:
    """
    Two equal jobs in one call are one job.
    """
    job = a_job()

    answers = client.submit_many([job, job])

    assert [False, True] == [one.duplicate for one in answers]


def test_a_conflict_within_a_batch_leaves_the_others(client: Client) -> None:
    """
    A refused job does not hold up those that were sent with it.
    """
    taken = client.submit(a_job("one")).job_id

    with pytest.raises(Conflict):
        client.submit_many([a_job("three"), a_job("two", id=taken), a_job("four")])

    assert 3 == client.stats().queued["standard"]


def test_a_faulty_job_is_refused_before_it_is_sent(client: Client) -> None:
    """
    A job that was made without `build` is checked all the same.
    """
    with pytest.raises(InvalidJob) as caught:
        client.submit(Job(prompt=""))

    assert "empty_prompt" == caught.value.code


def test_a_seed_is_chosen_once(client: Client, consumer: MakeConsumer) -> None:
    """
    A job without a seed gets one when it is accepted, and keeps it when it comes back.
    """
    client.submit(a_job())
    worker = consumer()
    [first] = worker.pull()
    worker.run(worker.consumer.release([first]))
    [second] = worker.pull()

    assert first.seed == second.seed
    assert 0 <= first.seed < 2**63


def test_a_given_seed_is_kept_whole(client: Client, consumer: MakeConsumer) -> None:
    """
    A seed of 63 bits passes the scripts unrounded.
    """
    client.submit(prompt="x", options={"seed": 2**63 - 1})

    assert 2**63 - 1 == consumer().pull()[0].seed


@pytest.fixture
def unlimited(server_url: str, queue: str) -> Iterator[Client]:
    """A client that no number of waiting tokens stops."""
    with Client(server_url, queue=queue, max_queued_tokens=0) as client:
        yield client


def test_the_largest_jobs_can_be_counted(unlimited: Client, consumer: MakeConsumer) -> None:
    """
    Jobs of the greatest size that the schema allows go in, through and out.
    """
    options = {"max_tokens": MAX_ANSWER_TOKENS, "n": 128}
    unlimited.submit_many([Job.build(prompt="x", options=options) for _ in range(3)])
    worker = consumer()

    outcomes = worker.finish(*worker.pull(max_tokens=2**40))

    assert ["done"] * 3 == outcomes
    assert (0, 0) == (unlimited.stats().queued_tokens["standard"], unlimited.stats().running)


@pytest.mark.parametrize("number", ["1" + "0" * 20, "1e300", "-1e300", "nan", "inf", "many", ""])
def test_a_hostile_number_stops_nobody(
    number: str, unlimited: Client, consumer: MakeConsumer, server_url: str, queue: str
) -> None:
    """
    Whatever numbers a producer sends past the client, its own job and all others are served.
    """
    numbers: dict[str, Any] = dict.fromkeys(("tokens", "timeout_ms", "result_ttl_s", "seed"), number)
    hostile = prepare(a_job(id="hostile"))._replace(**numbers)
    raw = connect(server_url)
    run(raw, calls.submit(QueueKeys(queue), [hostile], 1000))
    raw.close()
    unlimited.submit(a_job(id="good"))
    worker = consumer()

    held = worker.pull(max_tokens=2**41)

    assert ["good", "hostile"] == sorted(job.job_id for job in held)
    worker.run(worker.consumer.release(held))
    assert ["done", "done"] == worker.finish(*worker.pull(max_tokens=2**41))
    assert {0} == set(unlimited.stats().queued_tokens.values())


def test_a_submit_in_doubt_names_its_job(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where the reply is lost the error has the id that the client made: with it, a repeat is no second job.
    """

    def cut(*arguments: Any) -> None:
        run_many(*arguments)
        raise QueueUnavailable("cut")

    with monkeypatch.context() as patch:
        patch.setattr("pagemill.client_base.run_many", cut)
        with pytest.raises(QueueUnavailable, match="may be in the queue") as caught:
            client.submit(prompt="x")

    assert client.submit(prompt="x", id=caught.value.job_id).duplicate
    assert 1 == client.stats().queued["standard"]
