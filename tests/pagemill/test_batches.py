"""Batches: jobs that are counted, sealed, cancelled and waited for together."""

import threading
from typing import Any

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.errors import BatchClosed, BatchNotFound, Conflict, InvalidJob, WaitTimeout
from pagemill.keys import MODELS, QueueKeys
from pagemill.messages import BatchStatus, Finished
from pagemill.schema import Usage
from tests.support.batches import batch_events, batch_of, counts
from tests.support.servers import MakeConsumer, a_job, result_of, wait_for


def test_a_batch_counts_how_its_jobs_end(client: Client, consumer: MakeConsumer) -> None:
    """
    Each end is counted under its name, and the batch ends with the last of them.
    """
    batch_id, jobs = batch_of(client, 4, metadata={"night": "7"})
    with pytest.raises(BatchClosed):
        client.submit(a_job("late", batch=batch_id))
    worker = consumer()
    done, failed, *_ = worker.pull(max_jobs=2)
    worker.finish(done)
    worker.finish(failed, status="failed")
    client.cancel(jobs[2].id)
    halfway = client.batch_status(batch_id)
    worker.finish(*worker.pull())

    ended = client.batch_status(batch_id)

    assert ("sealed", (4, 1, 1, 1, 0), 1) == (halfway.state, counts(halfway), halfway.num_open)
    assert ("ended", (4, 2, 1, 1, 0), 0) == (ended.state, counts(ended), ended.num_open)
    assert (batch_id, {"night": "7"}, "default") == (ended.batch_id, ended.metadata, ended.tenant)
    assert 0 < ended.created_ms <= ended.sealed_ms <= ended.ended_ms


def test_a_job_past_its_deadline_is_counted_as_expired(client: Client, consumer: MakeConsumer) -> None:
    """
    The sweeper ends it, and the batch hears of that as of any end.
    """
    batch_id = client.create_batch().batch_id
    client.submit_many([a_job(f"{number}", batch=batch_id, timeout_s=0.01) for number in range(3)])
    client.seal_batch(batch_id)
    worker = consumer()

    wait_for(lambda: worker.run(worker.consumer.sweep()) and client.batch_status(batch_id).ended)

    assert (3, 0, 0, 0, 3) == counts(client.batch_status(batch_id))


@pytest.mark.parametrize("seal_first", [True, False])
def test_a_batch_ends_once_whether_sealed_before_or_after_its_last_job(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str, seal_first: bool
) -> None:
    """
    Sealing and the last end may come in either order, and again: there is one end.
    """
    batch_id, _ = batch_of(client, 3, sealed=seal_first)
    worker = consumer()
    jobs = worker.pull()
    worker.finish(*jobs)
    worker.finish(*jobs)
    before = client.batch_status(batch_id).state

    ended = [client.seal_batch(batch_id) for _ in range(2)]

    assert ("ended" if seal_first else "open") == before
    assert ["ended", "ended"] == [status.state for status in ended]
    assert [(3, 3)] == batch_events(redis, queue, "ended")


def test_a_batch_without_jobs_ends_when_it_is_sealed(client: Client) -> None:
    """
    Nothing is waited for where nothing was submitted.
    """
    batch_id = client.create_batch().batch_id

    assert ("ended", 0) == ((ended := client.seal_batch(batch_id)).state, ended.total)


def test_creating_a_batch_again_finds_the_first(client: Client) -> None:
    """
    The id is the idempotency key; other fields under it are a conflict.
    """
    batch_id, _ = batch_of(client, 2, tenant="a")

    again = client.create_batch(batch_id, tenant="a")

    assert (2, "sealed") == (again.total, again.state)
    assert "open" == client.create_batch("another").state
    with pytest.raises(Conflict):
        client.create_batch(batch_id, tenant="b")
    client.cancel_batch(batch_id)


def test_a_repeated_submit_counts_once(client: Client) -> None:
    """
    A job that is sent again is one job of its batch, also when the batch takes no more.
    """
    batch_id, jobs = batch_of(client, 5, sealed=False)
    client.submit_many(jobs)
    client.seal_batch(batch_id)

    again = client.submit_many(jobs)

    assert ({True}, 5) == ({one.duplicate for one in again}, client.batch_status(batch_id).total)
    client.cancel_batch(batch_id)


def test_a_job_for_no_batch_is_refused(client: Client) -> None:
    """
    A misspelt batch is an error of the submit, and nothing is queued.
    """
    with pytest.raises(BatchNotFound):
        client.submit(a_job(batch="nightly"))
    for verb in (client.batch_status, client.seal_batch, client.cancel_batch, client.wait_batch):
        with pytest.raises(BatchNotFound):
            verb("nightly")
    assert 0 == client.stats().queued["standard"]


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_id": "a b"},
        {"webhook": "ftp://example.org/"},
        {"webhook": "https://user:secret@example.org/"},
        {"webhook": "http://example.org/\r\nHost: other"},
        {"webhook": "http://"},
        {"webhook": "http://example.org:99999/"},
        {"webhook": "http://b\u00fccher.example/"},
        {"result_ttl_s": 0},
        {"metadata": {"a": "x" * 20_000}},
    ],
)
def test_a_batch_that_cannot_be_is_refused(client: Client, fields: dict[str, Any]) -> None:
    """
    Names, webhooks, times and sizes are checked before anything is sent.
    """
    with pytest.raises(InvalidJob) as caught:
        client.create_batch(**fields)

    assert "invalid_batch" == caught.value.code


def test_usage_adds_up(client: Client, consumer: MakeConsumer) -> None:
    """
    What the jobs took stands with each job, with the batch, and with the queue.
    """
    batch_id, jobs = batch_of(client, 3)
    worker = consumer()
    ends = [
        Finished(
            one, result_of(one).model_copy(update={"usage": Usage(prompt_tokens=7, completion_tokens=5, gpu_ms=ms)})
        )
        for one, ms in zip(worker.pull(), (10, 20, 12), strict=True)
    ]

    worker.run(worker.consumer.finish(ends))

    batch, job, stats = client.batch_status(batch_id), client.status(jobs[1].id), client.stats()
    assert (21, 15, 42) == (batch.prompt_tokens, batch.completion_tokens, batch.gpu_ms)
    assert (batch_id, 7, 5, 20) == (job.batch, job.prompt_tokens, job.completion_tokens, job.gpu_ms)
    assert 42 == stats.totals["gpu_ms"]
    assert 20 == client.result(jobs[1].id, wait_s=0).usage.gpu_ms


def test_progress_is_told_at_most_once_a_percent(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A large batch has 99 events on its way and one at its end; a small one no more than jobs.
    """
    batch_of(client, 300)
    worker = consumer()
    for _ in range(5):
        worker.finish(*worker.pull(max_jobs=60))

    progress = batch_events(redis, queue, "progress")

    percents = [100 * ended // total for total, ended in progress]
    assert list(range(1, 100)) == percents
    assert [(300, 300)] == batch_events(redis, queue, "ended")


def test_a_batch_is_waited_for(client: Client, consumer: MakeConsumer, server_url: str, queue: str) -> None:
    """
    Who waits is woken by the end, and hears of the way there.
    """
    batch_id, _ = batch_of(client, 10)
    worker = consumer()
    jobs = worker.pull()
    with pytest.raises(WaitTimeout):
        client.wait_batch(batch_id, wait_s=0.05)
    seen: list[BatchStatus] = []

    def watch() -> None:
        with Client(server_url, queue=queue) as other:
            seen.extend(other.watch_batch(batch_id, wait_s=30))

    watcher = threading.Thread(target=watch)
    watcher.start()
    wait_for(lambda: seen)
    worker.finish(*jobs[:4])
    wait_for(lambda: seen[-1].done == 4)
    worker.finish(*jobs[4:])
    watcher.join(30)

    assert (True, 10) == (seen[-1].ended, seen[-1].done)
    assert client.batch_status(batch_id) == client.wait_batch(batch_id, wait_s=0)


def test_events_of_batches_do_not_disturb_those_of_jobs(client: Client, consumer: MakeConsumer) -> None:
    """
    Who waits for jobs reads past what is told of batches.
    """
    _, jobs = batch_of(client, 3)
    worker = consumer()
    results = client.finished([job.id for job in jobs], wait_s=30)
    first, *rest = worker.pull()
    worker.finish(first)

    assert first.job_id == next(results).job_id
    worker.finish(*rest)
    assert {job.job_id for job in rest} == {result.job_id for result in results}


def test_batches_are_listed_newest_first(client: Client, redis: Redis, queue: str) -> None:
    """
    The list holds open and ended batches, and none that has expired.
    """
    ids = [client.create_batch(f"b-{number}").batch_id for number in range(4)]
    redis.delete(QueueKeys(queue).batch(ids[1]))

    assert [ids[3], ids[2], ids[0]] == [status.batch_id for status in client.list_batches()]
    assert [ids[3]] == [status.batch_id for status in client.list_batches(limit=1)]
    assert [] == client.list_batches(limit=0)


def test_expired_batches_leave_the_list(client: Client, redis: Redis, queue: str) -> None:
    """
    However many batches come and go, the list stays about as long as the batches that there are.
    """
    keys = QueueKeys(queue)
    for number in range(200):
        client.create_batch(f"b-{number}")
        redis.delete(keys.batch(f"b-{number}"))

    assert redis.zcard(keys.batches) < 20


def test_everything_of_a_batch_expires(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    An open batch lasts 30 days after its last activity, one that has ended for its own time.
    """
    keys = QueueKeys(queue)
    batch_id, _ = batch_of(client, 2, result_ttl_s=77)
    month = 30 * 86400
    worker = consumer()
    jobs = worker.pull()
    for key in (keys.batch(batch_id), f"{keys.base}:bj:{batch_id}"):
        redis.expire(key, 1000)
    # an hour and more ago
    redis.hset(keys.batch(batch_id), "seen", 1)
    worker.finish(jobs[0])

    assert all(month - 10 < redis.ttl(key) <= month for key in (keys.batch(batch_id), f"{keys.base}:bj:{batch_id}"))
    worker.finish(jobs[1])
    assert 70 < redis.ttl(keys.batch(batch_id)) <= 77
    assert not redis.exists(f"{keys.base}:bj:{batch_id}")
    assert month < redis.ttl(keys.batches)


def test_an_end_after_its_batch_expired_leaves_nothing(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A job outlives its batch and ends as any other; the batch is not made anew.
    """
    batch_id, jobs = batch_of(client, 1)
    redis.delete(QueueKeys(queue).batch(batch_id))
    worker = consumer()

    worker.finish(*worker.pull())

    assert "done" == client.result(jobs[0].id, wait_s=0).status
    assert not redis.exists(QueueKeys(queue).batch(batch_id))


def test_a_batch_lives_where_its_model_is_served(client: Client, redis: Redis, queue: str, server_url: str) -> None:
    """
    Batch and jobs that ask for a model meet in that model's queue, and are found from any client.
    """
    redis.hset(MODELS, "large", queue)
    with Client(server_url, queue=f"{queue}-other") as other, Client(server_url, queue=f"{queue}-other") as third:
        batch_id = other.create_batch(model="large").batch_id
        other.submit(a_job(batch=batch_id, model="large"))

        assert (queue, 1) == ((found := third.batch_status(batch_id)).queue, found.total)
    client.cancel_batch(batch_id)
