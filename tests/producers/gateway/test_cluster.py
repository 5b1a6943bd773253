"""A gateway whose queue is in a cluster: limits are where their keys are."""

from pathlib import Path

import httpx

from tests.support.gateways import running_gateway, write_keys
from tests.support.servers import is_routed, wait_for
from tests.support.services import RunningService
from tests.support.topologies import Cluster


def test_limits_hold_wherever_their_keys_are(tmp_path: Path) -> None:
    """
    Six callers, whose counters lie on all three nodes; each has two requests a minute.
    """
    names = [f"caller{number}" for number in range(6)]
    keys = write_keys(tmp_path / "keys.toml", **{name: {"requests_per_minute": 2} for name in names})
    body = {"model": "fake", "prompt": "x", "max_tokens": 4}
    with (
        Cluster(tmp_path / "cluster") as cluster,
        RunningService(cluster.url, "queue"),
        running_gateway(cluster.url, "queue", keys_file=tmp_path / "keys.toml") as gateway,
    ):
        wait_for(lambda: is_routed(cluster.url))
        statuses = {
            name: [
                httpx.post(
                    f"{gateway.url}/v1/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {keys[name]}"},
                    timeout=30,
                ).status_code
                for _ in range(3)
            ]
            for name in names
        }

    assert {name: [200, 200, 429] for name in names} == statuses
