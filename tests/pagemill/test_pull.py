"""PULL: claims what fits, in a fair order, and nothing else."""

from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from tests.support.servers import MakeConsumer, a_job, wait_for


def in_hands(redis: Redis, stream: str) -> int:
    """Entries of a stream that are claimed."""
    return int(redis.xpending(stream, "workers")["pending"])


def test_a_delivery_has_all_of_the_job(client: Client, consumer: MakeConsumer) -> None:
    """
    Everything that a worker needs comes with the claim, in one round trip.
    """
    job = a_job(lane="bulk", tenant="acme", timeout_s=60, result_ttl_s=90, stream=True, metadata={"row": "7"})
    client.submit(job)

    [got] = consumer().pull()

    assert (job.id, "bulk", "acme", job.payload()) == (got.job_id, got.lane, got.tenant, got.payload)
    assert (1, job.estimated_tokens(), 90, True) == (got.attempt, got.tokens, got.result_ttl_s, got.stream_tokens)
    assert got.deadline_ms == got.accepted_ms + 60_000
    assert got.started_ms >= got.accepted_ms
    assert (None, b"", "") == (got.payload_ref, got.checkpoint, got.checkpoint_meta)


def test_never_more_jobs_than_asked(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    The limit on jobs holds in what is claimed, not only in what is returned.
    """
    client.submit_many([a_job(f"{number}") for number in range(10)])

    jobs = consumer().pull(max_jobs=3)

    assert (3, 3) == (len(jobs), in_hands(redis, jobs[0].stream))


def test_never_more_tokens_than_asked(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    Jobs are claimed while their estimates fit, and not one beyond.
    """
    client.submit_many([a_job("abc", max_tokens=9) for _ in range(10)])

    jobs = consumer().pull(max_tokens=35)

    assert (3, 3) == (len(jobs), in_hands(redis, jobs[0].stream))


def test_more_than_one_script_looks_at(client: Client, consumer: MakeConsumer) -> None:
    """
    A large appetite is served by several calls, in order and within both limits.
    """
    jobs = [a_job("abc", max_tokens=9) for _ in range(150)]
    client.submit_many(jobs)
    worker = consumer()

    first = worker.pull(max_jobs=140, max_tokens=1000)
    rest = worker.pull(max_jobs=200, max_tokens=10_000)

    assert (100, 50) == (len(first), len(rest))
    assert [job.id for job in jobs] == [job.job_id for job in first + rest]


def test_lanes_come_in_order(client: Client, consumer: MakeConsumer) -> None:
    """
    Interactive jobs come before standard ones, and these before bulk.
    """
    for lane in ("bulk", "standard", "interactive"):
        client.submit(a_job(lane=lane))

    assert ["interactive", "standard", "bulk"] == [job.lane for job in consumer().pull()]


def test_what_came_back_comes_first(client: Client, consumer: MakeConsumer) -> None:
    """
    A job that was handed back is served before those that never ran.
    """
    ids = [one.job_id for one in client.submit_many([a_job("a"), a_job("b"), a_job("c")])]
    worker = consumer()
    worker.run(worker.consumer.release(worker.pull(max_jobs=1)))

    assert ids == [job.job_id for job in worker.pull()]


def test_tenants_share_by_tokens(client: Client, consumer: MakeConsumer) -> None:
    """
    A tenant with many jobs does not hold up one with few: both get the same number of tokens.
    """
    client.submit_many([a_job("abc", max_tokens=9, tenant="many") for _ in range(50)])
    client.submit_many([a_job("abc", max_tokens=19, tenant="few") for _ in range(5)])

    served = [job.tenant for job in consumer().pull(max_jobs=15)]

    assert (10, 5) == (served.count("many"), served.count("few"))


def test_a_weight_doubles_a_share(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    The operator's weight of a tenant is its share of the tokens.
    """
    redis.hset(f"{QueueKeys(queue).base}:tenants", "heavy:weight", 3)
    client.submit_many([a_job("abc", tenant="light") for _ in range(40)])
    client.submit_many([a_job("abc", tenant="heavy") for _ in range(40)])

    served = [job.tenant for job in consumer().pull(max_jobs=40)]

    assert (30, 10) == (served.count("heavy"), served.count("light"))


def test_idle_time_is_not_saved_up(client: Client, consumer: MakeConsumer) -> None:
    """
    A tenant that comes late shares from now on; it has no claim to what it did not use.
    """
    client.submit_many([a_job("abc", tenant="early") for _ in range(40)])
    worker = consumer()
    worker.pull(max_jobs=20)
    client.submit_many([a_job("abc", tenant="late") for _ in range(20)])

    served = [job.tenant for job in worker.pull(max_jobs=20)]

    assert abs(served.count("early") - served.count("late")) <= 2


def test_tenants_pay_for_what_they_used(client: Client, consumer: MakeConsumer) -> None:
    """
    A tenant whose jobs turn out shorter than estimated gets the difference back.
    """
    client.submit_many([a_job("abc", max_tokens=99, tenant="guessed-high") for _ in range(60)])
    client.submit_many([a_job("abc", max_tokens=4, tenant="exact") for _ in range(60)])
    worker = consumer()
    worker.finish(*worker.pull(max_jobs=40))

    # 38 of the 40 were exact: it is 180 tokens ahead, though the estimates say that it is behind
    served = [job.tenant for job in worker.pull(max_jobs=30)]

    assert served.count("guessed-high") >= 5


def test_an_estimate_above_the_cap_earns_nothing(client: Client, consumer: MakeConsumer) -> None:
    """
    What is given back is what was charged: asking for a million tokens buys no later share.
    """
    client.submit_many([a_job("abc", max_tokens=1_000_000, tenant="greedy") for _ in range(30)])
    client.submit_many([a_job("abc", max_tokens=9, tenant="modest") for _ in range(30)])
    worker = consumer()
    served = []
    for _ in range(10):
        held = worker.pull(max_jobs=2, job_cap_tokens=10)
        worker.finish(*held)
        served += [job.tenant for job in held]

    assert abs(served.count("greedy") - served.count("modest")) <= 2


def test_a_job_that_came_back_is_charged_once(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    After a hand-back and a second delivery under another cap, the tenant has paid just what was used.
    """
    client.submit(a_job("abc", max_tokens=99, tenant="t"))
    worker = consumer()
    worker.run(worker.consumer.release(worker.pull(job_cap_tokens=40)))

    worker.finish(*worker.pull(job_cap_tokens=60))

    assert b"5" == redis.hget(f"{QueueKeys(queue).base}:vt:standard", "t")


def test_a_large_job_is_waited_for(client: Client, consumer: MakeConsumer) -> None:
    """
    The first in line keeps its place where a later one would fit: freed budget adds up for it.
    """
    client.submit(a_job("big", max_tokens=1000, tenant="a"))
    client.submit(a_job("small", tenant="b"))
    worker = consumer()

    assert [] == worker.pull(max_tokens=500)
    assert ["a", "b"] == [job.tenant for job in worker.pull(max_tokens=2000)]


def test_a_large_job_is_waited_for_one_lease(client: Client, consumer: MakeConsumer) -> None:
    """
    After a lease, others pass a job that this worker could not make room for.
    """
    client.submit(a_job("big", max_tokens=1000, tenant="a"))
    client.submit(a_job("small", tenant="b"))
    worker = consumer(lease_ms=100)

    passed = wait_for(lambda: worker.pull(max_tokens=500))

    assert ["b"] == [job.tenant for job in passed]


def test_two_large_jobs_do_not_wait_by_turns(client: Client, consumer: MakeConsumer) -> None:
    """
    One lease in two is kept free for large jobs, however many of them come first.
    """
    client.submit_many([a_job("big", max_tokens=1000, tenant=name) for name in ("a", "b")])
    client.submit(a_job("small", tenant="c"))
    worker = consumer(lease_ms=100)

    passed = wait_for(lambda: worker.pull(max_tokens=500))

    assert ["c"] == [job.tenant for job in passed]


def test_each_large_job_has_its_own_lease(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    When the job that was waited for is taken, the time of the next one begins.
    """
    client.submit(a_job("big", max_tokens=1000))
    worker = consumer()
    worker.pull(max_tokens=500)
    hold = f"{QueueKeys(queue).base}:hold:{worker.worker_id}"
    held = redis.exists(hold)

    worker.pull(max_tokens=2000)

    assert (1, 0) == (held, redis.exists(hold))


def test_an_estimate_counts_at_most_the_cap(client: Client, consumer: MakeConsumer) -> None:
    """
    A rough estimate above the whole cache does not keep a job from an idle worker.
    """
    client.submit(a_job(max_tokens=1_000_000))

    assert [] == consumer().pull(max_tokens=2000)
    assert 1 == len(consumer().pull(max_tokens=2000, job_cap_tokens=2000))


def test_a_cancelled_job_is_skipped(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A job cancelled while it waited is not delivered, and its entry goes.
    """
    client.submit_many([a_job("one"), a_job("two")])
    first, second = _ids(redis, queue)
    client.cancel(first)

    got = consumer().pull()

    assert [second] == [job.job_id for job in got]
    assert 1 == redis.xlen(got[0].stream)


def _ids(redis: Redis, queue: str) -> list[str]:
    entries = redis.xrange(f"{QueueKeys(queue).base}:s:standard:default")
    return [fields[b"j"].decode() for _, fields in entries]


def test_cancelled_jobs_beyond_one_look_are_passed(client: Client, consumer: MakeConsumer) -> None:
    """
    A long run of cancelled jobs does not hide the live one behind it.
    """
    jobs = [a_job(f"{number}") for number in range(100)]
    client.submit_many(jobs)
    for job in jobs[:-1]:
        client.cancel(job.id)

    assert [jobs[-1].id] == [job.job_id for job in consumer().pull(max_jobs=1)]


def test_a_cancelled_job_costs_its_tenant_nothing(client: Client, consumer: MakeConsumer) -> None:
    """
    Who takes most of its jobs back is served as much of the rest as others.
    """
    jobs = [a_job("abc", tenant="fickle") for _ in range(60)]
    client.submit_many(jobs)
    client.submit_many([a_job("abc", tenant="firm") for _ in range(40)])
    for job in jobs[:40]:
        client.cancel(job.id)
    worker = consumer()
    first = worker.pull(max_jobs=8)

    served = [job.tenant for job in first + worker.pull(max_jobs=22)]

    assert served.count("fickle") >= 10


def test_an_expired_job_ends_at_delivery(client: Client, consumer: MakeConsumer) -> None:
    """
    A job whose deadline passed while it waited is not delivered; its result says so.
    """
    job_id = client.submit(a_job(timeout_s=0.001, metadata={"row": "7"})).job_id
    worker = consumer()
    wait_for(lambda: not worker.pull() and client.status(job_id).ended)

    result = client.result(job_id)

    assert ("expired", "deadline_passed") == (result.status, result.failure and result.failure.code)
    assert {"row": "7"} == result.metadata


def test_a_lost_group_is_made_again(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Jobs that wait are still delivered when the group was lost.
    """
    job_id = client.submit(a_job()).job_id
    redis.xgroup_destroy(f"{QueueKeys(queue).base}:s:standard:default", "workers")

    assert [job_id] == [job.job_id for job in consumer().pull()]


def test_an_older_pointer_is_dropped(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A second entry of the same job, as a failover can bring back, is not delivered.
    """
    job_id = client.submit(a_job()).job_id
    redis.xadd(f"{QueueKeys(queue).base}:s:standard:default", {"j": job_id, "tok": "10"})

    assert [job_id] == [job.job_id for job in consumer().pull()]
    assert [] == consumer().pull()


def test_the_counters_follow(client: Client, consumer: MakeConsumer) -> None:
    """
    What is queued and running is counted by lane, in jobs and tokens.
    """
    client.submit_many([a_job("abc", max_tokens=9), a_job("abcd", max_tokens=9)])
    consumer().pull(max_jobs=1)

    stats = client.stats()

    assert (1, 11, 1) == (stats.queued["standard"], stats.queued_tokens["standard"], stats.running)


def test_waiting_ends_with_a_submit(client: Client, consumer: MakeConsumer) -> None:
    """
    The doorbell wakes a worker when a job comes, long before its time-out.
    """
    worker = consumer()
    client.submit(a_job())

    worker.run(worker.consumer.wait_for_work(60))

    assert 1 == len(worker.pull())


def test_waiting_ends_without_work(consumer: MakeConsumer) -> None:
    """
    Without a job the wait ends at its time-out.
    """
    worker = consumer()

    worker.run(worker.consumer.wait_for_work(0.02))

    assert [] == worker.pull()


def test_what_is_left_behind_wakes_a_peer(client: Client, consumer: MakeConsumer) -> None:
    """
    A worker that takes a part of many jobs rings for the next worker.
    """
    client.submit_many([a_job(f"{number}") for number in range(3)])
    first, second = consumer(), consumer()
    first.run(first.consumer.wait_for_work(60))
    first.pull(max_jobs=1)

    second.run(second.consumer.wait_for_work(60))

    assert 2 == len(second.pull())
