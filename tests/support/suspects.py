"""Workers that die with jobs in their hands, and what becomes of these."""

from collections.abc import Callable
from typing import Any, Literal

from pagemill.client import Client
from pagemill.connection import connect
from pagemill.messages import Delivery
from pagemill.obituary import DeathReport, report_death
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, wait_for


class Supervisor:
    """Tells a queue how workers have died."""

    def __init__(self, url: str, queue: str) -> None:
        self.url = url
        self.queue = queue

    def report(
        self, worker: BlockingConsumer, cause: Literal["lapse", "crash"] = "crash", why: str = "SIGSEGV"
    ) -> DeathReport:
        with connect(self.url) as redis:
            return report_death(redis, self.queue, worker.worker_id, cause=cause, why=why)


def take(worker: BlockingConsumer) -> list[Delivery]:
    jobs: list[Delivery] = worker.run(worker.consumer.take_suspects())
    return jobs


def ids(jobs: list[Delivery]) -> list[str]:
    return [job.job_id for job in jobs]


def suspected(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor, num_jobs: int, **fields: Any
) -> list[str]:
    """Jobs whose worker crashed while it held them all."""
    accepted = client.submit_many([a_job(f"{number}", **fields) for number in range(num_jobs)])
    worker = consumer()
    worker.pull(max_jobs=num_jobs)
    supervisor.report(worker)
    return [one.job_id for one in accepted]


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
