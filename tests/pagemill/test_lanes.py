"""Rooms and bells of the lanes: urgent work passes, and who has room for it is woken."""

from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.messages import Delivery, Room
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, wait_for

NONE = Room(0, 0)


def pull(worker: BlockingConsumer, *rooms: Room) -> list[Delivery]:
    jobs: list[Delivery] = worker.run(worker.consumer.pull(rooms=rooms))
    return jobs


def lanes_of(jobs: list[Delivery]) -> list[str]:
    return [job.lane for job in jobs]


def fill(client: Client, *lanes: str, each: int = 3, **fields: object) -> None:
    client.submit_many([a_job("abc", max_tokens=9, lane=lane, **fields) for lane in lanes for _ in range(each)])


def ringing(redis: Redis, queue: str) -> set[str]:
    keys = QueueKeys(queue)
    return {lane for lane in ("interactive", "standard", "bulk") if redis.llen(keys.bell(lane))}


def test_each_lane_has_its_own_room(client: Client, consumer: MakeConsumer) -> None:
    """
    A worker that is full of bulk work takes urgent jobs alone.
    """
    fill(client, "bulk", "standard", "interactive")

    jobs = pull(consumer(), Room(5, 1000), Room(5, 1000), NONE)

    assert ["interactive"] * 3 + ["standard"] * 2 == lanes_of(jobs)


def test_what_a_lane_takes_the_lanes_behind_it_lose(client: Client, consumer: MakeConsumer) -> None:
    """
    Urgent jobs use the room of the others first, in places and in tokens, and then their own.
    """
    fill(client, "bulk", "standard", "interactive")
    by_jobs = pull(consumer(), Room(4, 1000), Room(4, 1000), Room(3, 1000))
    fill(client, "interactive")
    # ten tokens a job
    by_tokens = pull(consumer(), Room(9, 45), Room(9, 45), Room(9, 35))

    assert ["interactive"] * 3 + ["standard"] == lanes_of(by_jobs) == lanes_of(by_tokens)


def test_rooms_hold_over_several_calls(client: Client, consumer: MakeConsumer) -> None:
    """
    What the first script took is taken from the rooms of the next.
    """
    fill(client, "interactive", "bulk", each=100)

    jobs = pull(consumer(), Room(150, 10_000), Room(150, 10_000), Room(120, 10_000))

    assert (100, 20) == (lanes_of(jobs).count("interactive"), lanes_of(jobs).count("bulk"))


def test_a_lane_without_tokens_waits_for_nothing(client: Client, consumer: MakeConsumer) -> None:
    """
    The clock for a large job does not run while its lane has no room at all.
    """
    fill(client, "interactive", each=1)
    client.submit(a_job("big", max_tokens=500, lane="bulk"))
    worker = consumer(lease_ms=100)
    pull(worker, Room(5, 10), Room(5, 10), Room(5, 10))

    client.submit(a_job("small", max_tokens=9, lane="bulk", tenant="other"))
    assert [] == pull(worker, NONE, NONE, Room(5, 100))


def test_a_large_urgent_job_does_not_share_the_clock_of_bulk(client: Client, consumer: MakeConsumer) -> None:
    """
    That a large bulk job has been waited for long enough lets nobody pass an urgent one.
    """
    client.submit(a_job("big", max_tokens=500, lane="bulk", tenant="a"))
    fill(client, "bulk", tenant="b")
    worker = consumer(lease_ms=400)
    passed = wait_for(lambda: pull(worker, Room(1, 50), Room(1, 50), Room(1, 50)))
    client.submit(a_job("urgent", max_tokens=300, lane="interactive"))

    assert (["bulk"], []) == (lanes_of(passed), pull(worker, Room(5, 100), Room(5, 50), Room(5, 50)))


def test_hand_backs_come_first_in_their_own_lane_alone(client: Client, consumer: MakeConsumer) -> None:
    """
    A bulk job that came back is served before other bulk jobs, in the order in which it was taken, and after urgent
    ones.
    """
    ids = [client.submit(a_job(f"bulk {number}", lane="bulk")).job_id for number in range(3)]
    worker = consumer()
    worker.run(worker.consumer.release(worker.pull(max_jobs=2)))
    urgent = client.submit(a_job(lane="interactive")).job_id

    assert [urgent, *ids] == [job.job_id for job in worker.pull()]


def test_a_hand_back_of_bulk_wakes_nobody_without_room_for_it(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    Each way into a lane rings that lane's bell.
    """
    fill(client, "bulk")
    fill(client, "interactive")
    rung = [ringing(redis, queue)]
    worker = consumer()
    held = worker.pull()
    redis.delete(*(QueueKeys(queue).bell(lane) for lane in ("interactive", "bulk")))
    worker.run(worker.consumer.release([job for job in held if job.lane == "bulk"]))
    rung.append(ringing(redis, queue))

    assert [{"bulk", "interactive"}, {"bulk"}] == rung


def test_the_ear_is_at_the_lanes_that_are_asked_for(client: Client, consumer: MakeConsumer) -> None:
    """
    A worker hears which lane rings, and does not hear the bells of others.
    """
    fill(client, "bulk")
    worker = consumer()
    heard = [worker.run(worker.consumer.wait_for_work(0.05, ["interactive", "standard"]))]
    fill(client, "standard")
    heard.append(worker.run(worker.consumer.wait_for_work(60, ["interactive", "standard"])))
    heard.append(worker.run(worker.consumer.wait_for_work(60)))

    assert [None, "standard", "bulk"] == heard


def test_who_has_no_room_passes_the_ring_on(client: Client, consumer: MakeConsumer) -> None:
    """
    A worker that was woken and cannot take the job wakes another one, and says that it left something.
    """
    client.submit(a_job("big", max_tokens=500, lane="standard"))
    full, free = consumer(), consumer()
    for room in (NONE, Room(1, 100)):
        full.run(full.consumer.wait_for_work(60))
        assert [] == pull(full, room, room, room)
        assert {"standard"} == full.consumer.behind

    assert "standard" == free.run(free.consumer.wait_for_work(60))
    assert 1 == len(free.pull())
    assert frozenset() == free.consumer.behind


def test_an_empty_queue_is_quiet(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A pull that leaves nothing rings no bell, also where it took all that there was room for.
    """
    fill(client, "bulk", each=4)
    worker = consumer()
    worker.run(worker.consumer.wait_for_work(60))

    assert 4 == len(pull(worker, NONE, NONE, Room(4, 1000)))
    assert set() == ringing(redis, queue)
    assert frozenset() == worker.consumer.behind


def test_more_tenants_than_one_call_looks_at(client: Client, consumer: MakeConsumer) -> None:
    """
    Twenty tenants with a job each are all served by one pull.
    """
    client.submit_many([a_job("abc", tenant=f"t{number}") for number in range(20)])

    assert 20 == len({job.tenant for job in consumer().pull()})


def test_a_nonsense_weight_stops_nobody(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A weight that cannot be counted with counts as 1.
    """
    for number, weight in enumerate(("zero", "0", "-3", "nan", "inf", "")):
        redis.hset(f"{QueueKeys(queue).base}:tenants", f"t{number}:weight", weight)
    client.submit_many([a_job("abc", tenant=f"t{number % 6}") for number in range(60)])
    worker = consumer()

    served = [job.tenant for job in worker.pull(max_jobs=30)]

    assert {5} == {served.count(f"t{number}") for number in range(6)}


def test_a_heavy_tenant_pays_for_small_jobs_too(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A large weight does not round a small job's cost to nothing.
    """
    redis.hset(f"{QueueKeys(queue).base}:tenants", "heavy:weight", 100)
    client.submit_many([a_job("abc", max_tokens=9, tenant="heavy") for _ in range(300)])
    client.submit_many([a_job("abc", max_tokens=9, tenant="light") for _ in range(5)])
    worker = consumer()
    served = []
    # one at a time, so that each is charged by itself
    for _ in range(220):
        served += [job.tenant for job in worker.pull(max_jobs=1)]

    assert 2 <= served.count("light") <= 4
