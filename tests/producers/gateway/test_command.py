"""`pagemill gateway`, as an operator ends it."""

import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from producers.child import Child
from tests.support.batch_files import environment
from tests.support.celery_box import comes_up
from tests.support.collector import collecting
from tests.support.servers import wait_for


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_it_in_order(redis_url: str, tmp_path: Path, number: signal.Signals) -> None:
    """
    The exit code is 0, and the last spans reach their collector.
    """
    command = [sys.executable, "-P", "-m", "producers.gateway", "--redis-url", redis_url, "--no-auth", "--port", "0"]
    log = tmp_path / "log"
    with collecting() as collector:
        environ = environment() | collector.environ | {"OTEL_BSP_SCHEDULE_DELAY": "60000"}
        with Child(command, log=log, environ=environ) as gateway:
            comes_up(gateway, "Application startup complete")
            events = [json.loads(line) for line in log.read_text().splitlines()]
            (url,) = (event["url"] for event in events if event["event"] == "gateway.listening")
            httpx.get(f"{url}/v1/models").raise_for_status()
            os.kill(gateway.pid, number)
            wait_for(lambda: gateway.exit_code() is not None, 20)

    assert (0, ["GET /v1/models"]) == (gateway.exit_code(), [span.name for span in collector.spans])
    assert "Traceback" not in log.read_text()
