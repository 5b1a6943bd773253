"""OBITUARY and TAKE_SUSPECTS: from the death of a worker to the one job that caused it."""

from collections.abc import Callable

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.connection import connect
from pagemill.keys import QueueKeys
from pagemill.messages import Delivery, Renewal
from pagemill.obituary import LOOKS, DeathReport, report_death
from tests.support.servers import BlockingConsumer, a_job, wait_for

MakeConsumer = Callable[..., BlockingConsumer]
Report = Callable[..., DeathReport]


@pytest.fixture
def report(server_url: str, queue: str) -> Report:
    """Be the supervisor of a worker that has died."""

    def send(worker: BlockingConsumer, cause: str = "crash", why: str = "SIGSEGV") -> DeathReport:
        with connect(server_url) as redis:
            return report_death(redis, queue, worker.worker_id, cause=cause, why=why)  # type: ignore[arg-type]

    return send


def take(worker: BlockingConsumer) -> list[Delivery]:
    jobs: list[Delivery] = worker.run(worker.consumer.take_suspects())
    return jobs


def ids(jobs: list[Delivery]) -> list[str]:
    return [job.job_id for job in jobs]


def suspected(client: Client, consumer: MakeConsumer, report: Report, num_jobs: int, **fields: object) -> list[str]:
    """Jobs whose worker crashed while it held them all."""
    accepted = client.submit_many([a_job(f"{number}", **fields) for number in range(num_jobs)])
    worker = consumer()
    worker.pull(max_jobs=num_jobs)
    report(worker)
    return [one.job_id for one in accepted]


def test_after_a_lapse_the_jobs_run_elsewhere_at_once(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    A worker that was ended from outside gives its jobs back as they were, with no lease to wait for.
    """
    job_id = client.submit(a_job()).job_id
    dead, peer = consumer(), consumer()
    dead.pull()

    told = report(dead, "lapse")

    [job] = peer.pull()
    assert (DeathReport(returned=1), job_id, 1, 0) == (told, job.job_id, job.attempt, job.lapses)
    assert [peer.worker_id] == list(client.workers())


def test_after_a_crash_the_jobs_are_suspects(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    What a crashed worker held is in no lane any more, and says why.
    """
    job_ids = suspected(client, consumer, report, 3)

    assert [] == consumer().pull()
    assert {("suspect", "SIGSEGV", 0)} == {(one.state, one.reason, one.attempt) for one in map(client.status, job_ids)}
    stats = client.stats()
    assert (3, 0, 0, 3) == (stats.suspects, stats.running, stats.queued["standard"], stats.totals["suspected"])


def test_suspects_come_in_halves(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    Each half is one group, in the order in which the jobs had come; the first attempt still counts as none.
    """
    job_ids = suspected(client, consumer, report, 5)
    worker = consumer()

    first = take(worker)
    assert ["done"] * 3 == worker.finish(*first)
    second = take(worker)
    worker.finish(*second)

    assert (job_ids[:3], job_ids[3:], []) == (ids(first), ids(second), take(worker))
    assert {(1, 0)} == {(job.attempt, job.lapses) for job in first + second}
    assert (0, 0) == (client.stats().suspects, client.stats().running)


@pytest.mark.parametrize("place", [0, 4, 12])
def test_the_poison_among_innocents_is_found(
    place: int, client: Client, consumer: MakeConsumer, report: Report
) -> None:
    """
    However often the worker dies of one job, that job alone is dead in the end, and all others are done.
    """
    job_ids = suspected(client, consumer, report, 13)
    poison = job_ids[place]
    num_deaths = 1
    worker = consumer()

    while jobs := take(worker):
        if poison in ids(jobs):
            report(worker)
            num_deaths += 1
            worker = consumer()
        else:
            worker.finish(*jobs)

    ends = [client.result(job_id, wait_s=0) for job_id in job_ids]
    assert [poison] == [one.job_id for one in ends if one.status != "done"]
    failure = ends[place].failure
    assert failure is not None
    assert ("poison", True) == (failure.code, failure.message.endswith("SIGSEGV"))
    # 13, 7, 4, 2, 1 and once more alone
    assert num_deaths <= 6
    assert (0, 0, 1) == (client.stats().suspects, client.stats().running, client.stats().dead)


def test_one_death_alone_proves_nothing(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    A worker can die beside a job: only the second time that it was alone is the job to blame.
    """
    [job_id] = suspected(client, consumer, report, 1)
    worker = consumer()

    assert [job_id] == ids(take(worker))
    assert DeathReport(dead=1) == report(worker)


def test_a_repeated_obituary_changes_nothing(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    A supervisor that lost the reply reports again.
    """
    client.submit_many([a_job("a"), a_job("b")])
    worker = consumer()
    worker.pull()

    reports = [report(worker), report(worker), report(worker, "lapse")]

    assert [DeathReport(suspects=2), DeathReport(), DeathReport()] == reports
    assert (2, 0) == (client.stats().suspects, client.stats().running)


def test_a_call_that_arrives_after_the_death_claims_nothing(
    client: Client, consumer: MakeConsumer, report: Report
) -> None:
    """
    A command of the dead worker may still be on its way when its supervisor has reported.
    """
    worker = consumer()
    report(worker)
    client.submit(a_job())

    assert [] == worker.pull()
    assert [] == take(worker)


def test_very_many_jobs_take_several_scripts(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    More than a thousand jobs become suspects in groups that one script can hand out, and none is blamed alone.
    """
    num_jobs = 8 * (LOOKS - 1) + 1
    client.submit_many([a_job(f"{number}", tenant=f"t{number % 3}") for number in range(num_jobs)])
    worker = consumer()
    worker.pull(max_jobs=num_jobs)

    told = report(worker)

    assert DeathReport(suspects=num_jobs) == told
    assert (num_jobs, 0) == (client.stats().suspects, client.stats().running)
    last, sizes = consumer(), []
    while jobs := take(last):
        sizes.append(len(jobs))
        last.finish(*jobs)
    assert (num_jobs, True) == (sum(sizes), max(sizes) <= LOOKS // 2)
    assert num_jobs == client.stats().totals["done"]


def test_one_worker_isolates(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    Of two workers that ask for suspects, one gets a group, and the next only when no other is left running.
    """
    suspected(client, consumer, report, 4)
    first, second = consumer(), consumer()

    jobs, refused = take(first), take(second)
    waiting = [one.run(one.consumer.num_suspects_waiting()) for one in (first, second)]
    first.finish(*jobs)
    first.finish(*take(first))

    assert (2, 0, [2, 0]) == (len(jobs), len(refused), waiting)
    assert ([], []) == (take(first), take(second))


def test_suspects_that_nobody_takes_are_seen(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    A busy worker learns that suspects wait and no peer is free for them.
    """
    suspected(client, consumer, report, 3)
    busy = consumer()

    assert 3 == busy.run(busy.consumer.num_suspects_waiting())


def test_the_right_to_isolate_runs_out(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    When the worker that isolates falls silent, another goes on with the next group within a lease.
    """
    suspected(client, consumer, report, 2)
    silent, peer = consumer(lease_ms=40), consumer()
    take(silent)

    assert [] == take(peer)
    assert wait_for(lambda: take(peer))


def test_signs_of_life_keep_the_right_to_isolate(
    client: Client, consumer: MakeConsumer, report: Report, redis: Redis, queue: str
) -> None:
    """
    Renewing a suspect and the heartbeat extend it; a renewal of other jobs does not.
    """
    suspected(client, consumer, report, 2)
    worker = consumer()
    jobs = take(worker)
    lock = QueueKeys(queue).isolation

    def extended_by(sign: Callable[[], object]) -> bool:
        redis.pexpire(lock, 1000)
        sign()
        left: int = redis.pttl(lock)  # type: ignore[assignment]
        return left > 1000

    assert extended_by(lambda: worker.run(worker.consumer.renew(jobs)))
    assert extended_by(lambda: worker.run(worker.consumer.heartbeat({})))
    worker.finish(*jobs)
    client.submit(a_job("other"))
    [other] = worker.pull()
    assert not extended_by(lambda: worker.run(worker.consumer.renew([other])))


def test_leaving_gives_the_right_up(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    A worker that drains while it isolates hands its group to whoever asks next.
    """
    job_ids = suspected(client, consumer, report, 2)
    first, second = consumer(), consumer()
    jobs = take(first)
    first.run(first.consumer.release(jobs))
    first.run(first.consumer.leave())

    assert [job_ids[1:], job_ids[:1]] == [ids(found) for found in (take(second), take(second))]


def test_a_suspect_that_is_handed_back_stays_one(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    Neither a drain nor a pause, neither a lost worker nor a lost reply brings a suspect back into its lane.
    """
    [job_id] = suspected(client, consumer, report, 1)
    worker = consumer()

    def again() -> tuple[str, int]:
        assert ([], "suspect") == (worker.pull(), client.status(job_id).state)
        [job] = take(worker)
        return job.job_id, job.attempt

    [job] = take(worker)
    worker.run(worker.consumer.release([job]))
    assert (job_id, 1) == again()
    report(worker, "lapse")
    worker = consumer(lease_ms=20)
    assert (job_id, 1) == again()
    peer = consumer(lease_ms=20)
    wait_for(lambda: peer.run(peer.consumer.sweep()).reclaimed)
    worker = consumer()
    assert (job_id, 1) == again()


def test_a_suspect_that_is_put_off_stays_one(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    After a retry's delay it waits among the suspects.
    """
    [job_id] = suspected(client, consumer, report, 1)
    worker = consumer()
    [job] = take(worker)
    worker.run(worker.consumer.retry(job, delay_ms=0, why="store is down"))

    wait_for(lambda: worker.run(worker.consumer.sweep()).promoted)

    assert ([], [job_id]) == (worker.pull(), ids(take(worker)))


def lose(consumer: MakeConsumer, take_jobs: Callable[[BlockingConsumer], list[Delivery]]) -> list[str]:
    """A worker falls silent with what it takes, and a peer's sweep takes that back."""
    silent, peer = consumer(lease_ms=20), consumer(lease_ms=20)
    held = ids(take_jobs(silent))
    num_left = len(held)

    def swept() -> bool:
        nonlocal num_left
        num_left -= peer.run(peer.consumer.sweep()).reclaimed
        return num_left == 0

    wait_for(swept)
    return held


def test_jobs_that_are_lost_again_are_suspects(client: Client, consumer: MakeConsumer) -> None:
    """
    A worker that is gone for unknown reasons gets the benefit of the doubt once; then its jobs are halved.
    """
    first = [one.job_id for one in client.submit_many([a_job(f"{number}") for number in range(4)])]
    assert first == lose(consumer, BlockingConsumer.pull)
    assert {"queued"} == {client.status(job_id).state for job_id in first}
    fresh = client.submit(a_job("fresh")).job_id

    assert [*first, fresh] == lose(consumer, BlockingConsumer.pull)

    worker = consumer()
    assert (4, [fresh]) == (client.stats().suspects, ids(worker.pull()))
    assert "lost with its worker again" in client.status(first[0]).reason
    halves = [take(worker), take(worker)]
    assert [first[:2], first[2:]] == [ids(half) for half in halves]
    assert {(1, 2)} == {(job.attempt, job.lapses) for half in halves for job in half}


def test_suspects_that_are_lost_again_are_halved(client: Client, consumer: MakeConsumer) -> None:
    """
    Where workers vanish without an obituary, isolation goes on by what is known; nobody is blamed for that alone.
    """
    job_ids = [one.job_id for one in client.submit_many([a_job("a"), a_job("b")])]
    lose(consumer, BlockingConsumer.pull)
    lose(consumer, BlockingConsumer.pull)
    for _ in range(3):
        assert [[job_id] for job_id in job_ids] == [lose(consumer, take), lose(consumer, take)]

    assert (2, 0) == (client.stats().suspects, client.stats().dead)


def test_a_waiting_suspect_can_be_cancelled(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    It ends at once, and its group is run without it.
    """
    job_ids = suspected(client, consumer, report, 3)

    states = [client.cancel(job_id) for job_id in job_ids[:2]]

    assert ["cancelled"] * 2 == states
    assert (1, job_ids[2:]) == (client.stats().suspects, ids(take(consumer())))


def test_a_running_suspect_hears_its_cancel(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    As any job: by the renewal, and when it is handed back before.
    """
    first, second = suspected(client, consumer, report, 2)
    worker = consumer()
    jobs = take(worker)
    client.cancel(first)

    assert Renewal(cancelled=frozenset({first})) == worker.run(worker.consumer.renew(jobs))
    worker.run(worker.consumer.release(jobs))
    assert ("cancelled", [second]) == (client.result(first, wait_s=0).status, ids(take(worker)))


def test_a_waiting_suspect_expires(client: Client, consumer: MakeConsumer, report: Report, redis: Redis) -> None:
    """
    Its deadline goes on counting, for the sweep and for whoever takes its group.
    """
    swept = suspected(client, consumer, report, 1, timeout_s=0.5)
    worker = consumer()
    wait_for(lambda: worker.run(worker.consumer.sweep()).expired)
    taken = suspected(client, consumer, report, 1, timeout_s=0.5)
    deadline_ms = client.status(taken[0]).deadline_ms
    wait_for(lambda: redis.time()[0] * 1000 + redis.time()[1] // 1000 > deadline_ms)  # type: ignore[index]

    assert [] == take(worker)
    assert {"expired"} == {client.result(job_id, wait_s=0).status for job_id in swept + taken}
    assert (0, 0) == (client.stats().suspects, client.stats().running)


def test_suspects_of_a_cancelled_batch_end(
    client: Client, consumer: MakeConsumer, report: Report, redis: Redis, queue: str
) -> None:
    """
    Whoever takes or hands them back meets the cancel of the whole batch, before the sweep has come to them.
    """
    batch = client.create_batch().batch_id
    job_ids = suspected(client, consumer, report, 2, batch=batch)
    worker = consumer()
    jobs = take(worker)
    redis.hset(f"{QueueKeys(queue).base}:b:{batch}", "cancel", "1")

    worker.run(worker.consumer.release(jobs))

    assert [] == take(worker)
    assert {"cancelled"} == {client.result(job_id, wait_s=0).status for job_id in job_ids}
    assert (2, 0) == (client.batch_status(batch).cancelled, client.stats().suspects)


def test_a_cancelled_job_is_not_suspected(client: Client, consumer: MakeConsumer, report: Report) -> None:
    """
    A job that nobody wants any more ends with its worker, and is counted among those that were held.
    """
    cancelled, other = (client.submit(a_job(text)).job_id for text in "ab")
    worker = consumer()
    worker.pull()
    client.cancel(cancelled)

    assert DeathReport(returned=1, suspects=1) == report(worker)
    assert "cancelled" == client.result(cancelled, wait_s=0).status
    # the other was not alone: this death is none of its two
    worker = consumer()
    take(worker)
    assert DeathReport(suspects=1) == report(worker)
    assert "suspect" == client.status(other).state


def test_a_lost_reply_gives_suspects_back(
    client: Client, consumer: MakeConsumer, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Suspects that were claimed by a call whose reply never came are handed back by the next call.
    """
    import pagemill.consumer as module
    from pagemill.errors import QueueUnavailable

    job_ids = suspected(client, consumer, report, 1)
    worker = consumer()
    real = module.send_once

    async def cut(*command: object, **options: object) -> object:
        await real(*command, **options)  # type: ignore[arg-type]
        raise ConnectionResetError("cut")

    monkeypatch.setattr(module, "send_once", cut)
    with pytest.raises(QueueUnavailable):
        take(worker)
    monkeypatch.setattr(module, "send_once", real)

    assert job_ids == ids(take(worker))


def test_streams_of_suspects_go(
    client: Client, consumer: MakeConsumer, report: Report, redis: Redis, queue: str
) -> None:
    """
    When no suspect is left, sweeping removes their streams as it does all others.
    """
    suspected(client, consumer, report, 2)
    worker = consumer(lease_ms=10)
    while jobs := take(worker):
        worker.finish(*jobs)

    sweeper = consumer(lease_ms=10)
    wait_for(lambda: sweeper.run(sweeper.consumer.sweep()) and not redis.keys(f"{QueueKeys(queue).base}:s:*"))
