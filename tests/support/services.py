"""Workers for tests: inside this process on a thread of their own, or as real processes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pagemill.connection import AsyncServers, timeout_of_a_lease
from pagemill.consumer import Consumer
from pagemill.ids import uuid7
from pagemill.keys import MODELS, QueueKeys
from pagemill.object_store import ObjectStore
from pagemill.versions import SCHEMA_VERSION
from tests.support.engine_thread import EngineThread
from tests.support.servers import wait_for
from worker.engine_port import Engine
from worker.fake_engine import ByteTokenizer, FakeEngine
from worker.heartbeat import Heartbeat
from worker.intake import Intake
from worker.metrics import WorkerMetrics
from worker.puller import LookAhead
from worker.results import ResultMaker
from worker.service import Service, ServiceOptions

CHECKOUT = Path(__file__).resolve().parents[2]


class RunningService:
    """A service on its own thread and event loop; leaving the context drains it."""

    def __init__(
        self,
        url: str,
        queue: str,
        *,
        engine: Engine | None = None,
        store: ObjectStore | None = None,
        lease_s: float = 10.0,
        drain_s: float = 10.0,
        version: int = SCHEMA_VERSION,
        **options: Any,
    ) -> None:
        self._version = version
        self.engine = engine or FakeEngine()
        self.error: BaseException | None = None
        self.worker_id = f"in-process-{uuid7()}"
        self.metrics = WorkerMetrics()
        self._url = url
        self._queue = queue
        self._store = store
        self._options = ServiceOptions(
            lease_s=lease_s, drain_s=drain_s, **{"look_ahead": LookAhead(jobs=4, tokens=16384), **options}
        )
        self._loop = asyncio.new_event_loop()
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._built.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.service.stop)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except Exception as error:
                self.error = error

    async def _serve(self) -> None:
        servers = AsyncServers(self._url, timeout_s=timeout_of_a_lease(self._options.lease_s))
        consumer = Consumer(
            servers.at(QueueKeys(self._queue).base),
            self._queue,
            worker_id=self.worker_id,
            lease_ms=round(self._options.lease_s * 1000),
            version=self._version,
            models=servers.at(MODELS),
            on_call=self.metrics.redis_call,
        )
        tokenizer = ByteTokenizer()
        engine = self.engine
        self.service = Service(
            consumer=consumer,
            engine=EngineThread(engine),
            intake=Intake(
                tokenizer=tokenizer,
                models=frozenset({engine.model_name}),
                max_model_len=engine.max_model_len,
                fingerprint=engine.fingerprint,
                store=self._store,
                version=self._version,
            ),
            results=ResultMaker(tokenizer=tokenizer, model=engine.model_name, worker_id=self.worker_id),
            store=self._store,
            heartbeat=Heartbeat({"model": engine.model_name, "max_model_len": engine.max_model_len}),
            tokenizer=tokenizer,
            options=self._options,
            metrics=self.metrics,
        )
        self._built.set()
        try:
            await self.service.run()
        finally:
            await servers.close()


class WorkerProcess:
    """
    `python -m worker` as two processes, the supervisor and its worker; their log is JSON lines in a file.

    With --no-supervisor among the flags it is one.
    """

    def __init__(self, log: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.log_path = log
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "worker", "--log-format", "json", *flags],
                cwd=CHECKOUT,
                # torch may have been built for GPUs that this machine lacks
                env=clean | {"PAGEMILL_DEVICE": "cpu"} | (environment or {}),
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def events(self) -> list[dict[str, Any]]:
        """What it has logged so far."""
        # of a line that is being written there may be a part
        whole, _, _ = self.log_path.read_bytes().rpartition(b"\n")
        lines = whole.decode().split("\n")
        return [json.loads(line) for line in lines if line.startswith("{")]

    def has_logged(self, event: str) -> bool:
        return any(entry["event"] == event for entry in self.events())

    @property
    def worker_pid(self) -> int:
        """The process that does the work, or did it last; the other one starts it and is waited for."""
        started = [entry["pid"] for entry in self.events() if entry["event"] == "supervisor.started"]
        return started[-1] if started else self.process.pid

    @property
    def engine_pid(self) -> int:
        """The process of that one's engine."""
        return int(Path(f"/proc/{self.worker_pid}/task/{self.worker_pid}/children").read_text())

    @property
    def worker_id(self) -> str:
        """Of the process that does the work, or did it last."""
        return str([entry["worker"] for entry in self.events() if entry["event"] == "supervisor.started"][-1])

    @property
    def serves(self) -> bool:
        """Whether the newest process has come up."""
        steps = [
            entry["event"] for entry in self.events() if entry["event"] in ("supervisor.started", "worker.started")
        ]
        return self.running and steps[-1:] == ["worker.started"]

    def send(self, number: signal.Signals) -> None:
        """What an operator sends: to the process that was started."""
        if self.running:
            self.process.send_signal(number)

    def send_worker(self, number: signal.Signals) -> None:
        """What happens to the working process alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker_pid, number)

    def wait(self, timeout_s: float = 20.0) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """End both at once and without a last word, as when a host goes down; also when they are stopped."""
        if self.running:
            # the supervisor would tell the queue of the worker's end
            self.process.send_signal(signal.SIGSTOP)
            self.send_worker(signal.SIGKILL)
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def worker_process(log: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[WorkerProcess]:
    """A worker process that is up, and is killed at the end if it still runs."""
    worker = WorkerProcess(log, *flags, environment=environment)
    try:
        wait_for(lambda: worker.has_logged("worker.started") or not worker.running, 90)
        yield worker
    finally:
        worker.kill()
