"""Urgent jobs at a worker that is full of bulk work, counted in steps of its engine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from engine.llm_engine import LLMEngine
from engine.request import Request, StepOutputs
from pagemill.client import Client
from pagemill.schema import Job
from tests.support.cuda_engine import make_engine
from tests.support.servers import wait_for
from tests.support.services import RunningService
from tests.support.tiny_models import save_tiny_model
from worker.fake_engine import FakeEngine

SEATS = 4
LOOK_AHEAD = 4


class SteppedEngine(FakeEngine):
    """
    A fake whose steps end when the test says so, one token each.

    `added` and `computed` have, by request, how many steps had ended when the engine was given it, and
    when it first computed something of it.
    """

    def __init__(self) -> None:
        super().__init__(max_num_seqs=SEATS, kv_tokens=1000, tokens_per_s=1.0, sleep=lambda _: None)
        self.num_steps = 0
        self.added: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self._may_end = threading.Semaphore(0)
        self._free_running = False

    def add(self, request: Request) -> None:
        super().add(request)
        self.added[request.request_id] = self.num_steps

    def step(self) -> StepOutputs:
        outputs = super().step()
        for name in self.added:
            if self.num_started(name) or any(one.request_id == name for one in outputs.finished):
                self.computed.setdefault(name, self.num_steps)
        if not self._free_running:
            self._may_end.acquire()
        self.num_steps += 1
        return outputs

    def end_step(self) -> None:
        before = self.num_steps
        self._may_end.release()
        wait_for(lambda: self.num_steps > before)

    def run_freely(self) -> None:
        self._free_running = True
        self._may_end.release()


@contextmanager
def stepped_worker(url: str, queue: str) -> Iterator[SteppedEngine]:
    """A worker whose engine the test steps; it runs by itself when the test is over."""
    engine = SteppedEngine()
    with RunningService(url, queue, engine=engine):
        try:
            yield engine
        finally:
            engine.run_freely()


def submit(client: Client, lane: str, num_jobs: int, max_tokens: int) -> list[str]:
    jobs = [
        Job.build(prompt=f"{lane} {number}", lane=lane, options={"max_tokens": max_tokens})
        for number in range(num_jobs)
    ]
    return [one.job_id for one in client.submit_many(jobs)]


def fill(engine: SteppedEngine, client: Client) -> None:
    """Step until every seat and the whole look-ahead have bulk jobs, and one more step is under way."""
    for _ in count():
        if client.stats().running == SEATS + LOOK_AHEAD and len(engine.added) == SEATS + LOOK_AHEAD:
            break
        engine.end_step()
    engine.end_step()


def test_a_flood_of_bulk_delays_an_urgent_job_by_one_step(server_url: str, queue: str, client: Client) -> None:
    """
    It is claimed while the step that runs goes on, and the next step computes it.
    """
    with stepped_worker(server_url, queue) as engine:
        flood = submit(client, "bulk", num_jobs=40, max_tokens=60)
        fill(engine, client)
        under_way = engine.num_steps
        [urgent] = submit(client, "interactive", num_jobs=1, max_tokens=2)

        wait_for(lambda: client.status(urgent).state == "running")
        assert under_way == engine.num_steps
        while urgent not in engine.computed:
            engine.end_step()
        assert engine.added[urgent] == engine.computed[urgent]

        # one for each of its two tokens
        engine.end_step()
        engine.end_step()
        assert "done" == client.result(urgent, wait_s=10).status
        assert {"running", "queued"} == {client.status(job_id).state for job_id in flood}
        engine.run_freely()
        # who was preempted went on, and nobody was forgotten
        assert {60} == {client.result(job_id, wait_s=20).usage.completion_tokens for job_id in flood}


def test_urgent_jobs_take_every_seat_of_bulk(server_url: str, queue: str, client: Client) -> None:
    """
    As many as there are seats run in one step, and the standard ones among them before all bulk.
    """
    with stepped_worker(server_url, queue) as engine:
        flood = submit(client, "bulk", num_jobs=40, max_tokens=60)
        fill(engine, client)
        urgent = submit(client, "standard", num_jobs=2, max_tokens=5) + submit(client, "interactive", 2, 5)
        wait_for(lambda: {"running"} == {client.status(job_id).state for job_id in urgent})
        while not engine.computed.keys() >= {*urgent}:
            engine.end_step()

        assert all(engine.computed[job_id] == engine.added[job_id] for job_id in urgent)
        engine.run_freely()
        assert {"done"} == {client.result(job_id, wait_s=20).status for job_id in urgent + flood}


def test_bulk_does_not_pass_what_is_urgent(server_url: str, queue: str, client: Client) -> None:
    """
    While urgent work has all seats, no bulk job is claimed beyond those that wait here already.
    """
    with stepped_worker(server_url, queue) as engine:
        urgent = submit(client, "interactive", num_jobs=SEATS, max_tokens=30)
        wait_for(lambda: len(engine.added) == SEATS or (engine.end_step() if engine.added else None))
        bulk = submit(client, "bulk", num_jobs=20, max_tokens=5)
        wait_for(lambda: client.stats().running == SEATS + LOOK_AHEAD)
        for _ in range(5):
            engine.end_step()

        assert engine.computed.keys() == {*urgent}
        assert LOOK_AHEAD == sum(client.status(job_id).state == "running" for job_id in bulk)
        engine.run_freely()
        assert {"done"} == {client.result(job_id, wait_s=20).status for job_id in urgent + bulk}


class CountedEngine:
    """The real engine; how many steps it had launched when it was given a request, and when that ended."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.added: dict[str, int] = {}
        self.ended: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: Request) -> None:
        self._engine.add(request)
        self.added[request.request_id] = self._engine.stats().num_steps

    def step(self) -> StepOutputs:
        outputs = self._engine.step()
        self.ended |= {one.request_id: self._engine.stats().num_steps for one in outputs.finished}
        return outputs


def test_a_flood_delays_the_real_engine_by_no_step(server_url: str, queue: str, client: Client, tmp_path: Path) -> None:
    """
    A model computes an urgent prompt in the step after the one that ran when it came, whatever bulk has.
    """
    save_tiny_model("llama", tmp_path)
    engine = CountedEngine(make_engine(tmp_path, cuda=False, mode="swap", num_blocks=120, max_num_seqs=SEATS))
    with RunningService(server_url, queue, engine=engine):
        flood = submit(client, "bulk", num_jobs=32, max_tokens=60)
        wait_for(lambda: engine.stats().num_running == SEATS)
        urgent, answers = [], []
        for _ in range(3):
            urgent += submit(client, "interactive", num_jobs=1, max_tokens=1)
            answers.append(client.result(urgent[-1], wait_s=30))
        states = {client.status(job_id).state for job_id in flood}
        results = [client.result(job_id, wait_s=60) for job_id in flood]

    assert {"done"} == {answer.status for answer in answers + results}
    assert [1, 1, 1] == [engine.ended[job_id] - engine.added[job_id] for job_id in urgent]
    assert "queued" in states
    assert engine.stats().num_preemptions >= 1
