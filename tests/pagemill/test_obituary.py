"""OBITUARY, and RECLAIM's second loss: from the death of a worker to the one job that caused it."""

import pytest

from pagemill.client import Client
from pagemill.obituary import LOOKS, DeathReport
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job
from tests.support.suspects import Supervisor, ids, lose, suspected, take


def test_after_a_lapse_the_jobs_run_elsewhere_at_once(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor
) -> None:
    """
    A worker that was ended from outside gives its jobs back as they were, with no lease to wait for.
    """
    job_id = client.submit(a_job()).job_id
    dead, peer = consumer(), consumer()
    dead.pull()

    told = supervisor.report(dead, "lapse")

    [job] = peer.pull()
    assert (DeathReport(returned=1), job_id, 1, 0) == (told, job.job_id, job.attempt, job.lapses)
    assert [peer.worker_id] == list(client.workers())


def test_after_a_crash_the_jobs_are_suspects(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    What a crashed worker held is in no lane any more, and says why.
    """
    job_ids = suspected(client, consumer, supervisor, 3)

    assert [] == consumer().pull()
    assert {("suspect", "SIGSEGV", 0)} == {(one.state, one.reason, one.attempt) for one in map(client.status, job_ids)}
    stats = client.stats()
    assert (3, 0, 0, 3) == (stats.suspects, stats.running, stats.queued["standard"], stats.totals["suspected"])


@pytest.mark.parametrize("place", [0, 4, 12])
def test_the_poison_among_innocents_is_found(
    place: int, client: Client, consumer: MakeConsumer, supervisor: Supervisor
) -> None:
    """
    However often the worker dies of one job, that job alone is dead in the end, and all others are done.
    """
    job_ids = suspected(client, consumer, supervisor, 13)
    poison = job_ids[place]
    num_deaths = 1
    worker = consumer()

    while jobs := take(worker):
        if poison in ids(jobs):
            supervisor.report(worker)
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


def test_innocents_are_not_dead_lettered_with_the_poison(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor
) -> None:
    """
    Row 18 of the failure catalogue: one poison among 3,000 jobs of three workers, and the dead letters are
    exactly that one, although each worker that held it died.
    """
    job_ids = [one.job_id for one in client.submit_many(a_job(f"{number}") for number in range(3000))]
    poison = job_ids[1234]
    fleet = [consumer() for _ in range(3)]
    num_deaths = 0

    idle = 0
    while idle < len(fleet):
        worker = fleet.pop(0)
        held = take(worker) or worker.pull(max_jobs=100)
        idle = 0 if held else idle + 1
        if poison in ids(held):
            supervisor.report(worker)
            num_deaths += 1
            worker = consumer()
        elif held:
            assert {"done"} == set(worker.finish(*held))
        fleet.append(worker)

    stats = client.stats()
    assert ([poison], 2999, 1) == ([one.job_id for one in client.dead_letters()], stats.totals["done"], stats.dead)
    # 100 at first, then 50, 25, 13, 7, 4, 2, 1 and once more alone
    assert 7 <= num_deaths <= 9


def test_one_death_alone_proves_nothing(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    A worker can die beside a job: only the second time that it was alone is the job to blame.
    """
    [job_id] = suspected(client, consumer, supervisor, 1)
    worker = consumer()

    assert [job_id] == ids(take(worker))
    assert DeathReport(dead=1) == supervisor.report(worker)


def test_a_repeated_obituary_changes_nothing(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    A supervisor that lost the reply reports again.
    """
    client.submit_many([a_job("a"), a_job("b")])
    worker = consumer()
    worker.pull()

    reports = [supervisor.report(worker), supervisor.report(worker), supervisor.report(worker, "lapse")]

    assert [DeathReport(suspects=2), DeathReport(), DeathReport()] == reports
    assert (2, 0) == (client.stats().suspects, client.stats().running)


def test_a_call_that_arrives_after_the_death_claims_nothing(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor
) -> None:
    """
    A command of the dead worker may still be on its way when its supervisor has reported.
    """
    worker = consumer()
    supervisor.report(worker)
    client.submit(a_job())

    assert [] == worker.pull()
    assert [] == take(worker)


def test_very_many_jobs_take_several_scripts(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    More than a thousand jobs become suspects in groups that one script can hand out, and none is blamed alone.
    """
    num_jobs = 8 * (LOOKS - 1) + 1
    client.submit_many([a_job(f"{number}", tenant=f"t{number % 3}") for number in range(num_jobs)])
    worker = consumer()
    worker.pull(max_jobs=num_jobs)

    told = supervisor.report(worker)

    assert DeathReport(suspects=num_jobs) == told
    assert (num_jobs, 0) == (client.stats().suspects, client.stats().running)
    last, sizes = consumer(), []
    while jobs := take(last):
        sizes.append(len(jobs))
        last.finish(*jobs)
    assert (num_jobs, True) == (sum(sizes), max(sizes) <= LOOKS // 2)
    assert num_jobs == client.stats().totals["done"]


def test_a_cancelled_job_is_not_suspected(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    A job that nobody wants any more ends with its worker, and is counted among those that were held.
    """
    cancelled, other = (client.submit(a_job(text)).job_id for text in "ab")
    worker = consumer()
    worker.pull()
    client.cancel(cancelled)

    assert DeathReport(returned=1, suspects=1) == supervisor.report(worker)
    assert "cancelled" == client.result(cancelled, wait_s=0).status
    # the other was not alone: this death is none of its two
    worker = consumer()
    take(worker)
    assert DeathReport(suspects=1) == supervisor.report(worker)
    assert "suspect" == client.status(other).state


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
