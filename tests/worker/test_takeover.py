"""
Workers with a real engine are killed with SIGKILL while they generate, and others take up their jobs.

The answers are those of an undisturbed run, less than half a lease is done again, and a token
stream has each character once. The default run takes a tiny random model; the slow one SmolLM2,
killed twice:

    pytest -m slow tests/worker/test_takeover.py --timeout 900
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.schema import Job, Result
from tests.support.models import real_model
from tests.support.processes import is_alive
from tests.support.servers import wait_for
from tests.support.services import WorkerProcess, worker_process
from tests.support.tiny_models import save_tiny_writer
from worker.checkpoints import decode

# every state that is rebuilt, and drawn tokens throughout
KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"n": 2, "logprobs": 2},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"stop": ["\n\n\n\n"], "min_tokens": 20},
    # a text that has no end of its own
    {"regex": "([a-z]{3,7}, )*", "n": 2},
]
PROMPTS = (
    "Once upon a time",
    "The sea at night",
    "A letter to a friend:",
    "How bread is made.",
    "Why do stars shine?",
    "A list of words:",
)

# when a worker is killed, each of its answers has so many tokens more than it began with
TOKENS_TO_KILL = 30
MAX_MODEL_LEN = 1024
# what any of the prompts leaves room for
MOST_TOKENS = 1000


@dataclass(frozen=True)
class Stage:
    """A queue, and workers of one model that come and go."""

    url: str
    queue: str
    client: Client
    redis: Redis
    model: Path
    logs: Path
    lease_s: float

    @contextmanager
    def worker(self) -> Iterator[WorkerProcess]:
        flags = ("--model", str(self.model), "--dtype", "float32", "--lease-s", str(self.lease_s))
        place = ("--redis-url", self.url, "--queue", self.queue, "--max-model-len", str(MAX_MODEL_LEN))
        log = self.logs / f"log-{len(list(self.logs.iterdir()))}"
        with worker_process(log, *flags, *place, "--kv-cache-bytes", "512MiB") as worker:
            # which takes hundreds of megabytes, and is for the engine's process alone
            assert [False, True] == [has_loaded(pid, "libtorch") for pid in (worker.worker_pid, worker.engine_pid)]
            yield worker

    def key(self, kind: str, job: Job) -> str:
        return f"{{pagemill:{self.queue}}}:{kind}:{job.id}"

    def submit(self, max_tokens: int) -> list[Job]:
        """The same work each time, under new ids."""
        usual = {"max_tokens": max_tokens, "temperature": 0.8, "ignore_eos": True}
        jobs = [
            Job.build(prompt=prompt, stream=True, options=usual | {"seed": seed} | kind)
            for seed, (prompt, kind) in enumerate(zip(PROMPTS, KINDS, strict=True))
        ]
        self.client.submit_many(jobs)
        return jobs

    def results(self, jobs: list[Job]) -> list[Result]:
        return [self.client.result(job.id, wait_s=200) for job in jobs]

    def has_ended(self, jobs: list[Job]) -> bool:
        """Whether one of them has."""
        return any(self.client.status(job.id).ended for job in jobs)

    def saved(self, job: Job) -> list[int]:
        """Tokens of each answer in the checkpoint."""
        checkpoint = self.redis.get(self.key("ck", job)) or b""
        assert isinstance(checkpoint, bytes)
        answers = decode(checkpoint, n=job.options.n, with_logprobs=job.options.logprobs is not None)
        return [len(answer.token_ids) for answer in answers]

    def published(self, job: Job, until_ms: float = float("inf")) -> list[int]:
        """Tokens of each answer that were in its stream at a time."""
        tokens = [0] * job.options.n
        for entry_id, fields in self.redis.xrange(self.key("t", job)):
            if b"i" in fields and int(entry_id.split(b"-")[0]) <= until_ms:
                tokens[int(fields[b"i"])] = int(fields[b"n"])
        return tokens

    def last_published_ms(self, job: Job) -> int:
        """When the newest text of its stream came, by the server's clock."""
        [(entry_id, _)] = self.redis.xrevrange(self.key("t", job), count=1)
        return int(entry_id.split(b"-")[0])

    def kill_while_it_works(self, worker: WorkerProcess, jobs: list[Job], leases_later: float) -> bool:
        """
        Kill a worker when all its answers have grown, some time after a renewal; look at what is saved of them.

        False where one of the jobs had ended before.
        """
        begun = {job.id: self.saved(job) for job in jobs}
        wait_for(lambda: self.has_ended(jobs) or all(self.saved(job) != begun[job.id] for job in jobs), 200)
        not_before = time.monotonic() + leases_later * self.lease_s

        def have_grown() -> bool:
            return time.monotonic() >= not_before and all(
                now >= before + TOKENS_TO_KILL
                for job in jobs
                for before, now in zip(begun[job.id], self.published(job), strict=True)
            )

        wait_for(lambda: self.has_ended(jobs) or have_grown(), 200)
        pids = [int(fields["pid"]) for fields in self.client.workers().values()]
        worker.kill()
        wait_for(lambda: not any(map(is_alive, pids)))
        if self.has_ended(jobs):
            return False
        # of the time at which it died, not of now: this process may have had to wait for its turn
        half_a_lease_ago = max(map(self.last_published_ms, jobs)) - 500 * self.lease_s
        lost, half_a_lease = [], []
        for job in jobs:
            before, now = self.published(job, half_a_lease_ago), self.published(job)
            lost += [max(0, known - saved) for known, saved in zip(now, self.saved(job), strict=True)]
            half_a_lease += [known - old for known, old in zip(now, before, strict=True)]
        print(f"\nto be done again: {lost} tokens of each answer; half a lease gave {half_a_lease}")
        assert all(one <= most for one, most in zip(lost, half_a_lease, strict=True))
        return True

    def check_streams(self, jobs: list[Job], results: list[Result]) -> None:
        """Each token stream has each character of its answers once, in order."""
        for job, result in zip(jobs, results, strict=True):
            texts = [""] * job.options.n
            for _, fields in self.redis.xrange(self.key("t", job)):
                if b"i" in fields:
                    index = int(fields[b"i"])
                    assert len(texts[index]) == int(fields[b"o"])
                    texts[index] += fields[b"x"].decode()
            for text, answer in zip(texts, result.completions, strict=True):
                assert answer.text.startswith(text)
                assert text


def has_loaded(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


def assert_same_answers(expected: list[Result], actual: list[Result]) -> None:
    for want, got in zip(expected, actual, strict=True):
        assert "done" == want.status == got.status
        for one, other in zip(want.completions, got.completions, strict=True):
            assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
            assert logprobs_of(one.logprobs) == pytest.approx(logprobs_of(other.logprobs), abs=1e-4)
        assert logprobs_of(want.prompt_logprobs) == pytest.approx(logprobs_of(got.prompt_logprobs), abs=1e-4)


def logprobs_of(entries: Any) -> list[float]:
    return [number for one in entries or () if one for number in (one.logprob, *(top[2] for top in one.top))]


def lose_workers(
    stage: Stage, max_tokens: int, kills: int, leases_later: float
) -> tuple[list[Result], list[Job]] | None:
    """
    Answers of an undisturbed run, and the same jobs with as many workers dead.

    None where a job had ended before the last kill; none of the others is left then.
    """
    with stage.worker() as worker:
        expected = stage.results(stage.submit(max_tokens))
        jobs = stage.submit(max_tokens)
        killed = stage.kill_while_it_works(worker, jobs, leases_later)
    for _ in range(kills - 1):
        with stage.worker() as worker:
            killed = killed and stage.kill_while_it_works(worker, jobs, leases_later)
    if killed:
        return expected, jobs
    with stage.worker():
        stage.results(jobs)
    return None


def kill_and_compare(stage: Stage, *, max_tokens: int, kills: int, leases_later: float) -> None:
    # a faster machine has to be given more to do
    while not (lost := lose_workers(stage, max_tokens, kills, leases_later)):
        assert max_tokens < MOST_TOKENS, "jobs end before a worker can be killed"
        max_tokens = min(MOST_TOKENS, 2 * max_tokens)
    expected, jobs = lost
    saved = sum(sum(stage.saved(job)) for job in jobs)
    gone = stage.client.workers().keys()
    with stage.worker():
        actual = stage.results(jobs)
        stage.check_streams(jobs, actual)
        rest = sum(result.usage.completion_tokens for result in actual) - saved

        def num_computed() -> int:
            workers = stage.client.workers()
            return sum(int(fields["generated_tokens"]) for name, fields in workers.items() if name not in gone)

        wait_for(lambda: num_computed() >= rest)
        # what was saved is not computed again
        assert rest == num_computed()
    assert_same_answers(expected, actual)


@pytest.mark.timeout(400)
def test_a_killed_workers_answers_are_finished_by_another(
    server_url: str, queue: str, client: Client, redis: Redis, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """
    Answers, tokens and log-probabilities are those of an undisturbed run, and what was saved is not computed again.
    """
    model = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_writer(model)
    stage = Stage(server_url, queue, client, redis, model, tmp_path, lease_s=1.5)

    kill_and_compare(stage, max_tokens=400, kills=1, leases_later=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_kills_do_not_change_what_smollm2_writes(
    server_url: str, queue: str, client: Client, redis: Redis, tmp_path: Path
) -> None:
    """
    The same with a real model, and a second kill of the worker that had taken the jobs up.
    """
    stage = Stage(server_url, queue, client, redis, real_model(), tmp_path, lease_s=6.0)

    kill_and_compare(stage, max_tokens=160, kills=2, leases_later=0.6)
