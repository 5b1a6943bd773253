"""A server that is away for a moment: who waits goes on, who does not hears of it."""

import time
from pathlib import Path
from threading import Timer

import pytest

from pagemill.client import Client
from pagemill.client_core import Outage
from pagemill.errors import ServerAway
from tests.support.outages import Waiters
from tests.support.redis_process import RedisProcess
from tests.support.servers import a_job, wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine


def test_a_restart(tmp_path: Path) -> None:
    """
    A submit with patience goes through, one without raises, and all ways to wait hear the end.
    """
    with (
        RedisProcess(tmp_path) as server,
        RunningService(server.url, "restarted", engine=FakeEngine(tokens_per_s=2000)) as service,
        Client(server.url, queue="restarted") as client,
    ):
        batch = client.create_batch().batch_id
        awaited = client.submit(a_job("awaited", max_tokens=4000, stream=True, batch=batch)).job_id
        client.seal_batch(batch)
        with Waiters(server.url, "restarted", awaited, batch) as waiters:
            waiters.wait_until_they_wait(server.client)
            server.kill()
            with pytest.raises(ServerAway) as caught:
                client.submit(a_job(id="impatient"))
            start = Timer(0.5, server.start)
            start.start()
            patient = client.submit(a_job("patient"), wait_s=30)
            start.join()
        assert "impatient" == caught.value.job_id
        assert "done" == client.result(patient.job_id, wait_s=30).status
        assert {client.text(awaited), 1} == set(waiters.heard.values())
        wait_for(lambda: service.service.ready)
    assert service.error is None


def test_an_outage_has_an_end() -> None:
    """
    It is over at the caller's time, or after the longest that one may last; another one is a new one.
    """
    away = ServerAway("away")
    now = time.monotonic()

    with pytest.raises(ServerAway):
        Outage(now - 1).pause_s(away)
    with pytest.raises(ServerAway):
        Outage(None, most_s=0).pause_s(away)
    assert 0 < Outage(now + 0.05).pause_s(away) <= 0.05

    outage = Outage(None, most_s=1e-9)
    outage._began = now - 1
    with pytest.raises(ServerAway):
        outage.pause_s(away)
    outage.over()
    assert outage._began is None
