"""The server's clock is set back: what was noted before lies in the future then."""

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.errors import Busy
from pagemill.keys import QueueKeys
from tests.support.servers import MakeConsumer, a_job

DAY_MS = 86_400_000


def test_the_rate_at_which_the_queue_drains_outlives_a_step_back(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    What ended before the step counts as if it had ended now; counters stay numbers, and who is refused
    is told a time that can be waited.
    """
    keys = QueueKeys(queue)
    worker = consumer()
    client.submit(a_job("abc", max_tokens=9))
    worker.finish(*worker.pull())
    now_ms = int(redis.hget(keys.stats, "drain:at") or 0)
    redis.hset(keys.stats, mapping={"drain:at": now_ms + DAY_MS, "drain:from": now_ms + DAY_MS - 1000})

    client.set_lane_limit("standard", 5)
    first = client.submit(a_job("abc", max_tokens=9)).job_id
    with pytest.raises(Busy) as caught:
        client.submit(a_job("abc", max_tokens=9))
    worker.finish(*worker.pull())

    # 10 tokens ended within what counts as a second, and 15 are to go
    assert 0.1 <= caught.value.retry_after_s <= 2
    assert "done" == client.status(first).state
    assert 2 == client.stats().totals["done"]
    noted = {name: int(redis.hget(keys.stats, f"drain:{name}") or 0) for name in ("at", "from", "standard")}
    assert 20 == noted["standard"]
    assert noted["from"] <= noted["at"] < now_ms + DAY_MS
