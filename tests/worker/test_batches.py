"""A batch from its first job to its end, with a worker."""

from pagemill.client import Client
from tests.support.servers import a_job, wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine


def test_the_batch_knows_what_its_jobs_took(server_url: str, queue: str, client: Client) -> None:
    """
    Tokens and engine time of a batch are the sums over its jobs' results.
    """
    batch_id = client.create_batch().batch_id
    jobs = [a_job(f"{number}", batch=batch_id, max_tokens=20) for number in range(12)]
    client.submit_many(jobs)
    client.seal_batch(batch_id)
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=4000)):
        batch = client.wait_batch(batch_id, wait_s=30)

    usages = [client.result(job.id, wait_s=0).usage for job in jobs]
    assert 12 == batch.done
    assert batch.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert batch.completion_tokens == sum(usage.completion_tokens for usage in usages) == 240
    assert batch.gpu_ms == sum(usage.gpu_ms for usage in usages) == client.stats().totals["gpu_ms"]
    # 240 tokens at 4,000 a second
    assert batch.gpu_ms >= 59


def test_a_running_batch_is_cancelled(server_url: str, queue: str, client: Client) -> None:
    """
    Those that wait and those that run end within a renewal; these keep their text, and the engine is free.
    """
    batch_id = client.create_batch().batch_id
    jobs = [a_job(f"{number}", batch=batch_id, max_tokens=5000) for number in range(600)]
    client.submit_many(jobs)
    with RunningService(
        server_url, queue, engine=FakeEngine(max_num_seqs=8, tokens_per_s=2000), lease_s=1.5
    ) as running:
        wait_for(lambda: running.engine.stats().generated_tokens > 100)
        client.cancel_batch(batch_id)
        batch = client.wait_batch(batch_id, wait_s=20)
        wait_for(lambda: not running.engine.has_work)

    assert (600, 600) == (batch.total, batch.cancelled)
    texts = [client.result(job.id, wait_s=0).text for job in jobs]
    assert 8 <= sum(bool(text) for text in texts) < 30
    assert batch.gpu_ms > 0
