"""What can be seen of real workers, and of an exporter, from outside."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from pagemill.client import Client
from producers.child import Child
from tests.support.redis_process import RedisProcess
from tests.support.scrapes import Scrape, get, get_json, scrape
from tests.support.servers import a_job, wait_for
from tests.support.services import CHECKOUT, WorkerProcess, worker_process
from worker.timings import STEP_BOUNDS

FAKE = ("--engine", "fake", "--metrics-port", "0")


def port_of(worker: WorkerProcess, event: str = "metrics.listening") -> int:
    return int(next(entry["port"] for entry in worker.events() if entry["event"] == event))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_worker_shows_its_work(server_url: str, queue: str, client: Client, tmp_path: Path) -> None:
    """
    What the engine's process measures, what the worker counts, what the queue says; all with the queue's name.

    A port for health has that alone.
    """
    flags = (*FAKE, "--redis-url", server_url, "--queue", queue, "--fake-tokens-per-s", "400", "--vllm-metrics")
    with worker_process(tmp_path / "log", *flags, "--health-port", "0") as worker:
        paths = ("/healthz", "/readyz", "/metrics", "/autoscale")
        assert [200, 200, 404, 404] == [get(port_of(worker, "health.listening"), path)[0] for path in paths]
        port = port_of(worker)
        jobs = client.submit_many(
            [a_job(f"{number}", lane="interactive", max_tokens=20) for number in range(3)]
            + [a_job("long", lane="bulk", max_tokens=100_000)]
        )
        for job in jobs[:3]:
            client.result(job.job_id, wait_s=20)
        # the engine tells a few times a second, and the worker counts an end when it has been told of
        done = {"lane": "interactive", "outcome": "done", "reason": "length"}

        def all_told() -> Scrape | None:
            page = scrape(port)
            first_token = page.value("pagemill_engine_first_token_seconds_count", lane="bulk")
            held = page.value("pagemill_inflight_jobs"), page.value("pagemill_engine_running")
            return page if (page.value("pagemill_jobs_total", **done), first_token, *held) == (3, 1, 1, 1) else None

        found: Scrape = wait_for(all_told)
        autoscale = get_json(port, "/autoscale")
        client.cancel(jobs[3].job_id)

    assert (1, 1, 1) == (
        found.value("pagemill_engine_running"),
        found.value("pagemill_held_jobs", phase="engine"),
        found.value("pagemill_inflight_jobs"),
    )
    usage = found.value("pagemill_engine_kv_usage_ratio")
    assert usage is not None
    assert 0 < usage < 1
    assert usage == found.value("vllm:kv_cache_usage_perc", model_name="fake")
    for name in ("queue", "first_token"):
        counts = [found.value(f"pagemill_engine_{name}_seconds_count", lane=lane) for lane in ("interactive", "bulk")]
        assert [3, 1] == counts
    assert found.value("pagemill_engine_step_seconds_bucket", le=str(STEP_BOUNDS[-1])) == found.value(
        "pagemill_engine_step_seconds_count"
    )
    generated = found.value("pagemill_engine_generated_tokens_total")
    assert generated is not None
    assert generated >= 60
    assert 3 == found.value("pagemill_jobs_total", lane="interactive", outcome="done", reason="length")
    assert 3 == found.value("vllm:request_success_total", finished_reason="length")
    assert 4 == found.value("vllm:time_to_first_token_seconds_count")
    assert 1 == found.value("pagemill_worker_info", model="fake", engine="fake")
    # this machine's GPU, if it has one, is not the fake engine's
    assert found.value("pagemill_gpu_utilization_ratio") is None
    assert "pagemill_gpu_utilization_ratio" in found.names
    assert {queue} == {sample.labels["queue"] for family in found.families for sample in family.samples}
    assert (200, 1, True) == (autoscale[0], autoscale[1]["desired_workers"], autoscale[1]["source_up"])
    assert "1 jobs have not ended" in autoscale[1]["reason"]


def test_a_worker_that_drains_is_not_ready(server_url: str, queue: str, client: Client, tmp_path: Path) -> None:
    """
    It goes on to answer, and says that it takes nothing more; with health and metrics on one port.
    """
    port = free_port()
    flags = ("--engine", "fake", "--redis-url", server_url, "--queue", queue, "--fake-tokens-per-s", "50")
    ports = ("--health-port", str(port), "--metrics-port", str(port))
    with worker_process(tmp_path / "log", *flags, *ports, "--drain-s", "60", "--lease-s", "1") as worker:
        assert 200 == get(port, "/readyz")[0]
        job = client.submit(a_job("a", max_tokens=5000)).job_id
        wait_for(lambda: scrape(port).value("pagemill_engine_running") == 1)

        worker.send(signal.SIGTERM)
        wait_for(lambda: get(port, "/readyz")[0] == 503)

        assert 200 == get(port, "/healthz")[0]
        assert 0 == scrape(port).value("pagemill_worker_ready")
        # a pull that is under way ends first
        wait_for(lambda: scrape(port).value("pagemill_pull_empty_total", why="draining") == 1)
        client.cancel(job)
        assert 0 == worker.wait(30)


def test_a_server_that_is_away_is_told(tmp_path: Path) -> None:
    """
    Metrics of the queue are gone while it is, those of the worker stay, and the worker is healthy.
    """
    with (
        RedisProcess(tmp_path / "redis") as server,
        worker_process(tmp_path / "log", *FAKE, "--redis-url", server.url) as worker,
    ):
        port = port_of(worker)
        assert 1 == scrape(port).value("pagemill_source_up")

        server.kill()
        wait_for(lambda: scrape(port).value("pagemill_source_up") == 0)
        found = scrape(port)
        status, autoscale = get_json(port, "/autoscale")

        assert found.value("pagemill_queue_depth", lane="bulk") is None
        assert 1 == found.value("pagemill_engine_up")
        assert 200 == get(port, "/healthz")[0]
        assert (503, False) == (status, autoscale["source_up"])
        wait_for(lambda: any((scrape(port).value("pagemill_redis_errors_total", op=op) or 0) > 0 for op in OPS))

        server.start()
        wait_for(lambda: scrape(port).value("pagemill_source_up") == 1)


OPS = ("pull", "heartbeat", "take_suspects", "lock")


def exporter(url: str, queue: str, log: Path) -> Child:
    flags = ["--redis-url", url, "--queue", queue, "--metrics-port", "0", "--autoscale-tokens-per-s", "10"]
    return Child([sys.executable, "-m", "worker.exporter", *flags], log=log)


def test_an_exporter_shows_a_queue_without_workers(server_url: str, queue: str, client: Client, tmp_path: Path) -> None:
    """
    What waits, and how many workers it wants, while there is none.
    """
    log = tmp_path / "log"
    jobs = client.submit_many([a_job(f"{number}", max_tokens=1000) for number in range(9)])
    with exporter(server_url, queue, log):
        address = wait_for(lambda: re.search(r"http://127\.0\.0\.1:(\d+)/metrics", log.read_text()))
        port = int(address.group(1))
        found = scrape(port)
        _, autoscale = get_json(port, "/autoscale")

    assert (9, 0) == (
        found.value("pagemill_queue_depth", lane="standard"),
        found.value("pagemill_workers", state="running"),
    )
    # about 9,000 tokens, at 10 a second within 300 seconds
    tokens = found.value("pagemill_backlog_tokens", lane="standard")
    assert tokens is not None
    assert -(-tokens // 3000) == autoscale["desired_workers"] == found.value("pagemill_autoscale_desired_workers")
    assert not any(name.startswith("pagemill_engine") for name in found.names)
    for job in jobs:
        client.cancel(job.job_id)


def test_an_exporter_needs_neither_torch_nor_the_workers_libraries() -> None:
    """
    It runs where the gateway does; without traces nothing of OpenTelemetry is loaded.
    """
    others = ("torch", "numpy", "pagemill.tracing", "tokenizers")
    code = f"import sys, worker.exporter; print([name for name in {others} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)

    assert "[]" == done.stdout.strip()


def test_a_wrong_flag_of_an_exporter_is_explained() -> None:
    """
    As of a worker: the name, the nearest one, and exit code 2.
    """
    command = [sys.executable, "-m", "worker.exporter", "--metric-port", "0"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)

    assert (2, "pagemill exporter: unknown setting --metric-port: did you mean --metrics-port?\n") == (
        done.returncode,
        done.stderr,
    )
