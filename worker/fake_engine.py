"""
An engine without a model: for load tests of a queue, and for testing services that submit jobs.

It takes and gives what the real engine does: it counts KV tokens, admits in order, preempts what
is less urgent, runs a batch at a set speed, resumes, aborts. A token is one byte of UTF-8. An answer is letters that
depend on the prompt, the seed and the answer's index alone, always `max_tokens` of them where
the context allows it.
"""

import hashlib
import itertools
import json
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.capacity import Capacity, Freeable
from engine.errors import EmptyPrompt, GrammarsUnavailable, PromptTooLong
from engine.request import (
    NO_PROGRESS,
    Completion,
    FinishReason,
    Progress,
    Request,
    RequestOutput,
    StepOutputs,
    TextDelta,
    TokenIds,
)
from worker.poison import take_effect

# a step lasts about that long, so that a slow fake does not busy the processor
STEP_S = 0.005

_LETTERS = bytes(b"etaoin shrdlucmfwypvbgkjqxz "[byte % 28] for byte in range(256))


class ByteTokenizer:
    """One token a byte of UTF-8; a chat is its contents, one role a line."""

    vocab_size = 256
    bos_token_id: int | None = None

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> TokenIds:
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return bytes(token_ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def to_json(self) -> str:
        model = {"type": "BPE", "vocab": {byte: token_id for token_id, byte in enumerate(_byte_names())}, "merges": []}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return json.dumps({"version": "1.0", "model": model, "pre_tokenizer": level, "decoder": level})


def _byte_names() -> list[str]:
    """The characters that stand for the 256 bytes where tokens are bytes: itself if it shows, else one from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = itertools.count(256)
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class FakeStats:
    """Counters of the fake engine, from its start."""

    num_running: int
    num_waiting: int
    num_swapped: int
    kv_usage: float
    num_steps: int
    num_preemptions: int
    num_sheds: int
    generated_tokens: int
    prompt_tokens: int
    # it has no cache
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0


@dataclass(slots=True)
class _Job:
    request: Request
    # all tokens that each answer will have; the first `num_done` are "generated"
    answers: tuple[bytes, ...]
    num_done: int
    arrival: int = 0
    # letters of each answer that were streamed
    num_shown: int = 0
    num_preemptions: int = 0
    started: bool = False
    cost: int = field(init=False)

    def __post_init__(self) -> None:
        self.cost = len(self.request.prompt) + sum(map(len, self.answers))

    @property
    def length(self) -> int:
        return len(self.answers[0])

    @property
    def num_seqs(self) -> int:
        return self.request.params.n

    @property
    def order(self) -> tuple[int, int, str]:
        """The smaller is served first and preempted last."""
        return self.request.priority, self.arrival, self.request.request_id


class FakeEngine:
    """
    Answers with letters at a set speed.

    Args:
        max_num_batched_tokens: What it says of itself; its steps are cut by nothing.
        tokens_per_s: Tokens that all requests together get in a second; None is at once.
        kv_tokens: Size of the pretended KV cache.
        sleep: Waits; tests pass their own.
        poison: Die of prompts that say how; see `worker.poison`.
    """

    def __init__(
        self,
        *,
        model_name: str = "fake",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 8192,
        kv_tokens: int = 131072,
        tokens_per_s: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        poison: bool = False,
    ) -> None:
        self.tokenizer = ByteTokenizer()
        self.model_name = model_name
        self.fingerprint = f"fake-{model_name}-1"
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_tokens = kv_tokens
        self._tokens_per_s = tokens_per_s
        self._sleep = sleep
        self._poison = poison

        # all the mutable state there is
        self._waiting: dict[str, _Job] = {}
        self._running: dict[str, _Job] = {}
        # the waiting ones, the most urgent first
        self._line: list[tuple[int, int, str]] = []
        self._arrivals = 0
        self._used_tokens = 0
        self._used_seqs = 0
        self._generated_tokens = 0
        self._prompt_tokens = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._started: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """
        Queue a request.

        Raises:
            EmptyPrompt, PromptTooLong: as the real engine does.
            GrammarsUnavailable: it has a grammar.
        """
        if request.params.grammar is not None:
            raise GrammarsUnavailable("the fake engine follows no grammar: leave json_schema, regex and choice out")
        room = self.max_model_len - len(request.prompt)
        if len(request.prompt) == 0:
            raise EmptyPrompt("the prompt has no token")
        if room < 1 or len(request.prompt) >= self.kv_tokens:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt):,} tokens and the model takes {self.max_model_len - 1:,}"
            )
        job = _plan(request, min(request.params.max_tokens, room))
        job.arrival = self._arrivals
        self._arrivals += 1
        self._queue(job)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Forget a request and return what it has; None where it is not here."""
        job = None
        if request_id in self._waiting:
            job = self._unqueue(request_id)
        elif request_id in self._running:
            job = self._leave(request_id)
        return None if job is None else _output(job, FinishReason.ABORT)

    def step(self) -> StepOutputs:
        """Admit what fits, give every running request its share of tokens, and wait for as long as that takes."""
        self._admit()
        stride = self._stride()
        if self._poison:
            for job in self._running.values():
                take_effect(bytes(job.request.prompt.astype(np.uint8)))
        finished, deltas = [], []
        num_tokens = 0
        for job in list(self._running.values()):
            before, job.num_done = job.num_done, min(job.length, job.num_done + stride)
            num_tokens += (job.num_done - before) * len(job.answers)
            if job.request.stream:
                deltas += _deltas(job)
            if job.num_done == job.length:
                self._leave(job.request.request_id)
                finished.append(_output(job, FinishReason.LENGTH))
        if self._tokens_per_s is not None:
            self._sleep(num_tokens / self._tokens_per_s)
        self._generated_tokens += num_tokens
        self._num_steps += 1
        # each step gives every job that runs a token
        started, self._started = tuple(self._started), []
        return StepOutputs(tuple(finished), tuple(deltas), started=started, answered=started)

    def capacity(self) -> Capacity:
        waiting = self._waiting.values()
        free_tokens = self.kv_tokens - self._used_tokens - sum(map(_promised, waiting))
        return Capacity(
            free_seqs=max(0, self.max_num_seqs - self._used_seqs),
            free_tokens=max(0, free_tokens),
            waiting_seqs=sum(job.num_seqs for job in waiting),
            total_tokens=self.kv_tokens,
            max_model_len=self.max_model_len,
            freeable=self._freeable(over_promised=max(0, -free_tokens)),
        )

    def _freeable(self, *, over_promised: int) -> tuple[Freeable, ...]:
        found = []
        for priority in range(max((job.request.priority for job in self._jobs()), default=0)):
            running = [job for job in self._running.values() if job.request.priority > priority]
            passed = [job for job in self._waiting.values() if job.request.priority > priority]
            tokens = sum(job.cost for job in running) + sum(map(_promised, passed))
            seqs = sum(job.num_seqs for job in running)
            found.append(Freeable(seqs, max(0, tokens - over_promised), sum(job.num_seqs for job in passed)))
        return tuple(found)

    def _jobs(self) -> Iterable[_Job]:
        return itertools.chain(self._waiting.values(), self._running.values())

    def stats(self) -> FakeStats:
        return FakeStats(
            num_running=self._used_seqs,
            num_waiting=len(self._waiting),
            num_swapped=0,
            kv_usage=self._used_tokens / self.kv_tokens,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_sheds=0,
            generated_tokens=self._generated_tokens,
            prompt_tokens=self._prompt_tokens,
        )

    def progress(self, known: Mapping[str, Sequence[int]]) -> dict[str, list[Progress]]:
        """What each answer has beyond its first `known` tokens; requests that are not here are left out."""
        jobs = self._waiting | self._running
        return {
            name: [
                Progress(tuple(answer[start : jobs[name].num_done]))
                for answer, start in zip(jobs[name].answers, starts, strict=True)
            ]
            for name, starts in known.items()
            if name in jobs
        }

    def num_started(self, request_id: str) -> int:
        """Answers of a request that have computed something; 0 also when it is not here."""
        job = self._running.get(request_id) or self._waiting.get(request_id)
        return job.num_seqs if job and job.started else 0

    def _admit(self) -> None:
        # in order: the first that does not fit keeps its place
        while self._line:
            job = self._waiting[self._line[0][-1]]
            if not self._fits(job):
                self._preempt_for(job)
            if self._running and not self._fits(job):
                return
            self._unqueue(job.request.request_id)
            self._running[job.request.request_id] = job
            self._used_tokens += job.cost
            self._used_seqs += job.num_seqs
            if not job.started:
                self._prompt_tokens += len(job.request.prompt)
                self._started.append(job.request.request_id)
            job.started = True

    def _fits(self, job: _Job, tokens: int = 0, seqs: int = 0) -> bool:
        """Whether a job could run, with so much more than now is free."""
        has_tokens = self._used_tokens - tokens + job.cost <= self.kv_tokens
        return has_tokens and self._used_seqs - seqs + job.num_seqs <= self.max_num_seqs

    def _preempt_for(self, job: _Job) -> None:
        """Have less urgent ones wait, the last first, where that makes room; they keep what they have done."""
        less_urgent = [one for one in self._running.values() if one.request.priority > job.request.priority]
        victims: list[_Job] = []
        for victim in sorted(less_urgent, key=lambda one: one.order, reverse=True):
            victims.append(victim)
            if self._fits(job, sum(one.cost for one in victims), sum(one.num_seqs for one in victims)):
                self._num_preemptions += len(victims)
                for one in victims:
                    one.num_preemptions += 1
                    self._queue(self._leave(one.request.request_id))
                return

    def _queue(self, job: _Job) -> None:
        self._waiting[job.request.request_id] = job
        insort(self._line, job.order)

    def _unqueue(self, request_id: str) -> _Job:
        job = self._waiting.pop(request_id)
        del self._line[bisect_left(self._line, job.order)]
        return job

    def _leave(self, request_id: str) -> _Job:
        job = self._running.pop(request_id)
        self._used_tokens -= job.cost
        self._used_seqs -= job.num_seqs
        return job

    def _stride(self) -> int:
        if self._tokens_per_s is None:
            return self.max_model_len
        return max(1, round(self._tokens_per_s * STEP_S / max(1, self._used_seqs)))


def _plan(request: Request, length: int) -> _Job:
    resumed = [one.token_ids for one in request.resumed or (NO_PROGRESS,) * request.params.n]
    answers = []
    for index, tokens in enumerate(resumed):
        key = b"%d:%d:" % (request.params.seed, index) + request.prompt.tobytes()
        fresh = hashlib.shake_128(key).digest(length).translate(_LETTERS)
        answers.append((bytes(tokens) + fresh[len(tokens) :])[:length])
    return _Job(request, tuple(answers), num_done=min(length, *map(len, resumed)))


def _promised(job: _Job) -> int:
    # what a waiting job is sure to need
    return len(job.request.prompt) + job.num_done * job.num_seqs


def _deltas(job: _Job) -> list[TextDelta]:
    shown, job.num_shown = job.num_shown, job.num_done
    return [
        TextDelta(job.request.request_id, index, answer[shown : job.num_done].decode(), job.num_done)
        for index, answer in enumerate(job.answers)
        if job.num_done > shown
    ]


def _output(job: _Job, reason: FinishReason) -> RequestOutput:
    done = [answer[: job.num_done] for answer in job.answers]
    completions = tuple(
        Completion(index=index, token_ids=tuple(tokens), text=tokens.decode(errors="replace"), finish_reason=reason)
        for index, tokens in zip(itertools.count(), done, strict=False)
    )
    num_prompt_tokens = len(job.request.prompt)
    return RequestOutput(
        job.request.request_id, completions, num_prompt_tokens, num_cached_tokens=0, num_preemptions=job.num_preemptions
    )
