"""Jobs with seeds, and the answers that the fake engine gives them."""

from collections.abc import Sequence
from typing import Any

from engine.request import Request
from engine.sampling_params import SamplingParams
from pagemill.client import Client
from pagemill.schema import Job
from worker.fake_engine import ByteTokenizer, FakeEngine


def seeded_jobs(number: int, max_tokens: int, *, first: int = 0, **fields: Any) -> list[Job]:
    """Jobs that differ in prompt and seed, which are numbers from `first` on."""
    return [
        Job.build(prompt=f"prompt number {place}", options={"max_tokens": max_tokens, "seed": place}, **fields)
        for place in range(first, first + number)
    ]


def submitted(client: Client, number: int, max_tokens: int, **fields: Any) -> list[Job]:
    """Jobs as above, in the queue."""
    jobs = seeded_jobs(number, max_tokens, **fields)
    client.submit_many(jobs)
    return jobs


def expected_texts(jobs: Sequence[Job]) -> list[str]:
    """What the fake engine answers when nothing disturbs it."""
    engine, tokenizer = FakeEngine(kv_tokens=1 << 40, max_num_seqs=len(jobs)), ByteTokenizer()
    for job in jobs:
        params = SamplingParams(max_tokens=job.options.max_tokens, seed=job.options.seed or 0)
        engine.add(Request(job.id, tokenizer.encode(str(job.prompt)), params))
    texts = {output.request_id: output.completions[0].text for output in engine.step().finished}
    return [texts[job.id] for job in jobs]
