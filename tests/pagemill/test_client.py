"""The blocking client: waiting for results, following tokens, iterating, forgetting."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.errors import Busy, Conflict, InvalidJob, JobFailed, JobNotFound, ObjectStoreError, WaitTimeout
from pagemill.keys import QueueKeys
from pagemill.messages import Finished, TokenDelta
from pagemill.object_store import FileStore
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, leaked_keys, result_of, wait_for


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_both_clients_have_the_same_verbs() -> None:
    """
    What one client can do, the other can.
    """

    def verbs(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert verbs(Client) == verbs(AsyncClient)


def test_a_waiter_is_woken(client: Client, consumer: MakeConsumer) -> None:
    """
    A result that comes while one waits is returned.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    held = worker.pull()
    finisher = in_background(lambda: worker.finish(*held, text="blue"))

    assert "blue" == client.text(job_id, wait_s=30)
    finisher.join()


def test_waiting_has_a_limit(client: Client) -> None:
    """
    A job that has not ended is WaitTimeout, at once with 0.
    """
    job_id = client.submit(a_job()).job_id

    for wait_s in (0, 0.02):
        with pytest.raises(WaitTimeout):
            client.result(job_id, wait_s=wait_s)


def test_an_unknown_job_is_not_found(client: Client) -> None:
    """
    Every verb that takes an id says so when the queue does not know it.
    """
    for verb in (
        client.result,
        client.status,
        client.cancel,
        client.forget,
        lambda job_id: list(client.stream(job_id)),
    ):
        with pytest.raises(JobNotFound):
            verb("nobody")


def test_a_job_without_answer_is_failed(client: Client) -> None:
    """
    Asking for the text of a job that was cancelled raises, with the result.
    """
    job_id = client.submit(a_job()).job_id
    client.cancel(job_id)

    with pytest.raises(JobFailed) as caught:
        client.text(job_id)

    assert "cancelled" == caught.value.result.status


def test_the_status_follows_the_job(client: Client, consumer: MakeConsumer) -> None:
    """
    A job is queued, running, done; times and worker come with it.
    """
    job_id = client.submit(a_job(tenant="acme")).job_id
    queued = client.status(job_id)
    worker = consumer()
    held = worker.pull()
    running = client.status(job_id)
    worker.finish(*held)
    done = client.status(job_id)

    assert ["queued", "running", "done"] == [status.state for status in (queued, running, done)]
    assert ("acme", 0, worker.worker_id, 1) == (queued.tenant, queued.attempt, running.worker, running.attempt)
    assert 0 < queued.accepted_ms <= running.started_ms <= done.ended_ms
    assert done.ended


def test_finished_gives_each_result_once(client: Client, consumer: MakeConsumer) -> None:
    """
    Those that ended before and those that end meanwhile are given, each once.
    """
    jobs = [a_job(f"{number}") for number in range(40)]
    client.submit_many(jobs)
    worker = consumer()
    worker.finish(*worker.pull(max_jobs=15))
    held = worker.pull()

    def rest() -> None:
        for job in held:
            worker.finish(job)

    finisher = in_background(rest)
    results = [result.job_id for result in client.finished([job.id for job in jobs], wait_s=30)]
    finisher.join()

    assert sorted(job.id for job in jobs) == sorted(results)


def test_finished_follows_the_whole_queue(client: Client, consumer: MakeConsumer) -> None:
    """
    Without ids, whatever ends from now on is given.
    """
    first = client.submit(a_job("before")).job_id
    client.cancel(first)
    client.submit(a_job())
    results = client.finished(wait_s=30)
    found: list[str] = []
    follower = in_background(lambda: found.append(next(results).job_id))
    worker = consumer()
    held = worker.pull()

    # ends one job after the other until the follower, who may not listen yet, has heard of one
    def end_one() -> bool:
        worker.finish(*held)
        extra = client.submit(a_job()).job_id
        client.cancel(extra)
        return bool(found)

    wait_for(end_one)
    follower.join()
    assert first not in found


def test_finished_stops_waiting(client: Client) -> None:
    """
    Jobs that do not end in time are WaitTimeout.
    """
    job_id = client.submit(a_job()).job_id

    with pytest.raises(WaitTimeout):
        list(client.finished([job_id], wait_s=0.02))


def test_finished_of_an_unknown_job(client: Client) -> None:
    """
    An id that the queue does not know is said, not waited for.
    """
    with pytest.raises(JobNotFound):
        list(client.finished(["nobody"], wait_s=5))


def publish(worker: BlockingConsumer, delivery: object, *deltas: TokenDelta) -> bool:
    published: bool = worker.run(worker.consumer.publish_tokens(delivery, deltas))  # type: ignore[arg-type]
    return published


def test_a_stream_gives_text_as_it_comes(client: Client, consumer: MakeConsumer) -> None:
    """
    Published deltas are followed to the end, and the end ends the iteration.
    """
    job_id = client.submit(a_job(stream=True)).job_id
    worker = consumer()
    [job] = worker.pull()
    publish(worker, job, TokenDelta(0, 0, "Rayleigh ", 2), TokenDelta(0, 9, "scatters", 4))
    deltas = client.stream(job_id, wait_s=30)

    first = next(deltas)
    worker.finish(job, text="Rayleigh scatters")

    assert [TokenDelta(0, 0, "Rayleigh ", 2), TokenDelta(0, 9, "scatters", 4)] == [first, *deltas]


def test_a_stream_repeats_nothing_after_a_takeover(client: Client, consumer: MakeConsumer) -> None:
    """
    The next worker starts at its checkpoint; what it publishes again is not given again.
    """
    job_id = client.submit(a_job(stream=True)).job_id
    first, second = consumer(), consumer()
    [job] = first.pull()
    publish(first, job, TokenDelta(0, 0, "The sky is ", 3))
    first.run(first.consumer.release([job]))
    [again] = second.pull()
    late = publish(first, job, TokenDelta(0, 11, "green", 4))
    publish(second, again, TokenDelta(0, 4, "sky is bl", 4), TokenDelta(0, 13, "ue.", 5))
    second.finish(again, text="The sky is blue.")

    text = "".join(delta.text for delta in client.stream(job_id, wait_s=30))

    assert (False, "The sky is blue.") == (late, text)


def test_the_stream_itself_repeats_nothing(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Who reads a token stream without our client finds each character once, whatever is published again.
    """
    job_id = client.submit(a_job(stream=True)).job_id
    first, second = consumer(), consumer()
    [job] = first.pull()
    publish(first, job, TokenDelta(0, 0, "größe ", 3), TokenDelta(1, 0, "東京", 1))
    first.run(first.consumer.release([job]))
    [again] = second.pull()
    for _ in range(2):
        publish(
            second, again, TokenDelta(0, 0, "größ", 2), TokenDelta(0, 4, "e 🙂👍 ok", 6), TokenDelta(1, 0, "東京", 1)
        )
    second.finish(again)

    entries = [fields for _, fields in redis.xrange(f"{{pagemill:{queue}}}:t:{job_id}") if b"i" in fields]

    expected = [("0", "0", "größe "), ("1", "0", "東京"), ("0", "6", "🙂👍 ok")]
    assert expected == [(one[b"i"].decode(), one[b"o"].decode(), one[b"x"].decode()) for one in entries]


def test_a_stream_can_be_taken_up_again(client: Client, consumer: MakeConsumer) -> None:
    """
    A client that has some text gets the rest.
    """
    job_id = client.submit(a_job(stream=True)).job_id
    worker = consumer()
    [job] = worker.pull()
    publish(worker, job, TokenDelta(0, 0, "The sky is blue.", 5))
    worker.finish(job, text="The sky is blue.")

    assert ["blue."] == [delta.text for delta in client.stream(job_id, offsets={0: 11}, wait_s=30)]


def test_a_trimmed_stream_is_filled_from_the_result(client: Client, consumer: MakeConsumer) -> None:
    """
    Text that the stream does not have any more comes with the result.
    """
    job_id = client.submit(a_job(stream=True)).job_id
    worker = consumer()
    [job] = worker.pull()
    publish(worker, job, TokenDelta(0, 8, "is blue.", 5))
    worker.finish(job, text="The sky is blue.")

    assert "The sky is blue." == "".join(delta.text for delta in client.stream(job_id, wait_s=30))


def test_a_job_without_stream_gives_its_text_at_the_end(client: Client, consumer: MakeConsumer) -> None:
    """
    Following a job that does not stream gives the whole answer once.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    worker.finish(*worker.pull(), text="blue")

    assert ["blue"] == [delta.text for delta in client.stream(job_id, wait_s=30)]


def test_forgetting_leaves_nothing(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A forgotten job is not found, and none of its keys is left.
    """
    job_id = client.submit(a_job(stream=True, idempotency_key="k")).job_id
    worker = consumer()
    worker.finish(*worker.pull())

    assert client.forget(job_id)

    with pytest.raises(JobNotFound):
        client.status(job_id)
    kinds = ("j", "d", "r", "t", "ck", "idem")
    assert [] == [key for kind in kinds for key in redis.keys(f"{QueueKeys(queue).base}:{kind}:*")]


def test_a_live_job_is_not_forgotten(client: Client) -> None:
    """
    Only what has ended can be dropped.
    """
    job_id = client.submit(a_job()).job_id

    assert (False, "queued") == (client.forget(job_id), client.status(job_id).state)


def test_a_large_payload_goes_to_the_store(server_url: str, queue: str, consumer: MakeConsumer, tmp_path: Path) -> None:
    """
    Above 64 KiB the queue holds a reference; the worker finds the very payload there.
    """
    store = FileStore(tmp_path)
    job = a_job("long " * 20_000)
    with Client(server_url, queue=queue, object_store=store) as client:
        client.submit(job)

    [got] = consumer().pull()

    assert (None, job.payload()) == (got.payload, store.get(got.payload_ref or ""))


def objects_in(folder: Path) -> list[str]:
    return [path.as_uri() for path in folder.rglob("*.json")]


def test_a_refused_submit_leaves_the_accepted_payload(
    server_url: str, queue: str, consumer: MakeConsumer, tmp_path: Path
) -> None:
    """
    Conflicts, repeats, and jobs refused for now leave one object: the very one of the accepted job.
    """
    store = FileStore(tmp_path)
    job = a_job("long " * 20_000, id="same", idempotency_key="k")
    with Client(server_url, queue=queue, object_store=store, max_queued_tokens=1) as client:
        client.submit(job)
        with pytest.raises(Conflict):
            client.submit(a_job("other " * 20_000, id="same"))
        with pytest.raises(Busy):
            client.submit(a_job("third " * 20_000))
        again = [client.submit(job), client.submit(a_job("long " * 20_000, idempotency_key="k"))]

    [got] = consumer().pull()

    assert [True, True] == [one.duplicate for one in again]
    assert [got.payload_ref] == objects_in(tmp_path)
    assert job.payload() == store.get(got.payload_ref or "")


def test_payloads_of_jobs_that_no_worker_ended_are_orphans(
    server_url: str, queue: str, consumer: MakeConsumer, tmp_path: Path
) -> None:
    """
    A cancelled and an expired job leave their payloads to the sweeping worker, each once.
    """
    with Client(server_url, queue=queue, object_store=FileStore(tmp_path)) as client:
        client.cancel(client.submit(a_job("long " * 20_000)).job_id)
        client.submit(a_job("long " * 20_000, timeout_s=0.001))
    worker = consumer()
    wait_for(lambda: worker.run(worker.consumer.sweep()).expired)

    orphans = [worker.run(worker.consumer.take_orphans(1)), worker.run(worker.consumer.take_orphans(10))]

    assert [1, 1] == [len(urls) for urls in orphans]
    assert sorted(objects_in(tmp_path)) == sorted(orphans[0] + orphans[1])
    assert [] == worker.run(worker.consumer.take_orphans(10))


def test_a_large_payload_without_a_store_stays_in_the_queue(client: Client, consumer: MakeConsumer) -> None:
    """
    Without a store the payload is inline, up to 8 MiB; beyond that it is refused.
    """
    job = a_job("long " * 20_000)
    client.submit(job)

    assert job.payload() == consumer().pull()[0].payload
    with pytest.raises(InvalidJob) as caught:
        client.submit(prompt="x" * 10_000_000)
    assert "payload_too_large" == caught.value.code


def test_a_result_in_the_store_is_read_from_there(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer, tmp_path: Path
) -> None:
    """
    A client with the store gets the result, forgets it there too; one without is told where it is, and drops nothing.
    """
    store = FileStore(tmp_path)
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()
    url = store.put("results/1.json", result_of(job, text="large").payload())
    worker.run(worker.consumer.finish([Finished(job, result_of(job), ref=url)]))

    with pytest.raises(ObjectStoreError, match=r"results/1\.json"):
        client.result(job_id)
    with pytest.raises(ObjectStoreError, match=r"results/1\.json"):
        client.forget(job_id)
    with Client(server_url, queue=queue, object_store=store) as with_store:
        assert "large" == with_store.text(job_id)
        assert with_store.forget(job_id)
    assert not store.exists(url)


def test_live_jobs_are_no_leak(client: Client, redis: Redis, queue: str) -> None:
    """
    The leak check tells a job that waits from one that was left behind.
    """
    client.submit(a_job())
    clean = leaked_keys(redis, queue)
    redis.set(f"{QueueKeys(queue).base}:r:other", "left behind")
    found = leaked_keys(redis, queue)
    redis.delete(f"{QueueKeys(queue).base}:r:other")

    assert ([], ["r:other"]) == (clean, found)
