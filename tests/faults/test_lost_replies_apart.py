"""
As test_lost_replies.py, for what stands beside the life of a job: dead letters, suspects, batches,
webhooks, raw entries.
"""

import ast
from pathlib import Path

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.client_core import prepare
from pagemill.connection import connect
from pagemill.errors import QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.messages import HookDelivery
from pagemill.obituary import DeathReport, report_death
from pagemill.raw import Adoption, Refusal
from pagemill.schema import Failure
from tests.support.servers import MakeConsumer, a_job, wait_for
from tests.support.tcp_proxy import TcpProxy, lose_replies_of

pytestmark = pytest.mark.usefixtures("known_scripts")


def test_every_script_is_tested(known_scripts: list[str]) -> None:
    """
    Here or in test_lost_replies.py, each script loses a reply.
    """
    pages = [ast.parse(page.read_text()) for page in Path(__file__).parent.glob("test_lost_replies*.py")]
    calls = [node for page in pages for node in ast.walk(page) if isinstance(node, ast.Call)]
    losing = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "lose_replies_of"]
    tested = {name.value for call in losing for name in call.args if isinstance(name, ast.Constant)}

    assert set(known_scripts) == tested


def test_a_letter_is_written_requeued_and_purged_once(
    proxy: TcpProxy, far_client: Client, far_consumer: MakeConsumer
) -> None:
    """
    One letter is written, its job runs anew once, and a letter that is purged is gone.
    """
    job_id = far_client.submit(a_job()).job_id
    worker = far_consumer()
    [job] = worker.pull()
    lose_replies_of(proxy, "bury")
    assert "duplicate" == worker.run(worker.consumer.bury(job, why="retries", message="given up"))
    [letter] = far_client.dead_letters()

    lose_replies_of(proxy, "requeue")
    accepted = far_client.requeue_dead(letter.entry_id)
    [again] = worker.pull()
    assert (job_id, True) == (accepted.job_id, accepted.duplicate)
    assert (job_id, 1) == (again.job_id, far_client.stats().running)

    worker.run(worker.consumer.bury(again, why="retries", message="given up"))
    lose_replies_of(proxy, "purge")
    far_client.purge_dead([far_client.dead_letters()[0].entry_id])
    assert ([], 3) == (far_client.dead_letters(), proxy.num_replies_lost)


def test_a_death_without_a_reply_is_counted_once(
    proxy: TcpProxy, far_consumer: MakeConsumer, client: Client, queue: str
) -> None:
    """
    A crash is counted once, and the suspects are given out once.
    """
    job_id = client.submit(a_job()).job_id
    dead, worker = far_consumer(), far_consumer()
    dead.pull()
    lose_replies_of(proxy, "obituary")
    with connect(proxy.url) as redis:
        report = report_death(redis, queue, dead.worker_id, cause="crash", why="SIGSEGV")
    assert (DeathReport(), "suspect") == (report, client.status(job_id).state)

    lose_replies_of(proxy, "take_suspects")
    with pytest.raises(QueueUnavailable):
        worker.run(worker.consumer.take_suspects())
    [suspect] = worker.run(worker.consumer.take_suspects())

    assert (job_id, 1, 1, 0) == (suspect.job_id, suspect.attempt, client.stats().running, client.stats().suspects)
    assert ["done"] == worker.finish(suspect)


def test_a_batch_is_made_sealed_and_cancelled_once(
    proxy: TcpProxy, far_client: Client, far_consumer: MakeConsumer
) -> None:
    """
    It is made, sealed, cancelled and counted once.
    """
    lose_replies_of(proxy, "create_batch", "seal_batch", "cancel_batches", "cancel_batches")
    batch_id = far_client.create_batch().batch_id
    far_client.submit_many([a_job(f"{number}", batch=batch_id) for number in range(3)])
    far_client.seal_batch(batch_id)
    worker = far_consumer()
    worker.finish(*worker.pull(max_jobs=1))
    far_client.cancel_batch(batch_id)
    wait_for(lambda: worker.run(worker.consumer.sweep()) and far_client.batch_status(batch_id).ended)

    batch = far_client.batch_status(batch_id)
    assert (3, 1, 2, 4) == (batch.total, batch.done, batch.cancelled, proxy.num_replies_lost)
    assert 1 == len(far_client.list_batches())


def test_a_webhook_that_was_given_out_in_vain_is_due_again(
    proxy: TcpProxy, far_client: Client, far_consumer: MakeConsumer
) -> None:
    """
    One that was given out in vain is due again, and its delivery is noted once.
    """
    batch_id = far_client.create_batch(webhook="https://example.com/hook").batch_id
    far_client.seal_batch(batch_id)
    worker = far_consumer()
    lose_replies_of(proxy, "take_hooks")
    assert [] == worker.run(worker.consumer.take_hooks(8, hold_ms=1500))
    [taken] = wait_for(lambda: worker.run(worker.consumer.take_hooks(8, hold_ms=1500)))

    lose_replies_of(proxy, "settle_hook")
    worker.run(worker.consumer.settle_hook(batch_id, HookDelivery("delivered")))

    assert (batch_id, 2) == (taken.batch_id, proxy.num_replies_lost)
    assert "delivered" == far_client.batch_status(batch_id).webhook_state
    assert [] == worker.run(worker.consumer.take_hooks(8, hold_ms=1500))


def test_a_raw_entry_is_one_job_or_one_letter(
    proxy: TcpProxy, far_consumer: MakeConsumer, client: Client, redis: Redis, queue: str
) -> None:
    """
    An entry becomes one job or one dead letter, whichever reply was lost on the way.
    """
    raw = QueueKeys(queue).raw
    redis.xadd(raw, {"d": b'{"prompt": "Why?"}'})
    redis.xadd(raw, {"d": b"garbage"})
    worker = far_consumer()
    lose_replies_of(proxy, "take_raw", "adopt", "refuse_raw")
    good, bad = worker.run(worker.consumer.raw.take()).entries
    adoption = Adoption(good.entry_id, prepare(a_job("Why?", id=good.job_id)))
    [answer] = worker.run(worker.consumer.raw.adopt([adoption], 0))
    refusal = Refusal(bad.entry_id, bad.job_id, Failure(code="invalid_job", message="no JSON"))
    worker.run(worker.consumer.raw.refuse([refusal]))

    # the second call found the entry gone: the job is there all the same
    assert (None, 3) == (answer, proxy.num_replies_lost)
    assert [good.job_id] == [job.job_id for job in worker.pull()]
    assert ["garbage"] == [letter.why for letter in client.dead_letters()]
    assert 0 == redis.xlen(raw)
