"""Processor time of the pieces that a worker does for a job, each alone and without a server."""

import time
from collections.abc import Callable, Sequence

from engine.request import RequestOutput
from pagemill.calls import finish, in_chunks
from pagemill.keys import QueueKeys
from pagemill.messages import Delivery, Finished
from pagemill.schema import Job
from worker.engine_port import Turn
from worker.engine_wire import Add, Unpacker, pack
from worker.fake_engine import FakeEngine
from worker.intake import Accepted, Intake
from worker.results import ResultMaker

_ROUNDS = 7
_A_MESSAGE = 16


def pieces(jobs: Sequence[Job]) -> dict[str, float]:
    """
    Microseconds a job, the best of several rounds over `jobs`.

    intake: the payload to a request, with the fake tokenizer; parse is its first part.
    engine: the fake engine's own work, which no worker has with a real one.
    pack, unpack: its request on the way to the engine's process and its output on the way back, in messages of 16.
    result: the engine's output to a Result; json: to its bytes; finish: to the script's arguments.
    """
    engine = FakeEngine(max_num_seqs=256, kv_tokens=1_000_000)
    intake = Intake(
        tokenizer=engine.tokenizer, models=frozenset({"fake"}), max_model_len=8192, fingerprint=engine.fingerprint
    )
    maker = ResultMaker(tokenizer=engine.tokenizer, model="fake", worker_id="bench")
    deliveries = [_delivery(job) for job in jobs]
    accepted = [one for one in intake.prepare(deliveries) if isinstance(one, Accepted)]
    outputs = _run(engine, accepted)
    messages = _messages(accepted, list(outputs.values()))
    packed = b"".join(map(pack, messages))
    results = [maker.make(one, {}, "done", outputs[one.job_id]) for one in deliveries]
    payloads = [result.payload() for result in results]
    ends = [Finished(*pair) for pair in zip(deliveries, results, strict=True)]
    return {
        name: round(_best(work) / len(jobs) * 1e6, 1)
        for name, work in (
            ("parse", lambda: [Job.parse(one.payload or b"") for one in deliveries]),
            ("intake", lambda: intake.prepare(deliveries)),
            ("engine", lambda: _run(engine, accepted)),
            ("pack", lambda: [pack(message) for message in messages]),
            ("unpack", lambda: list(Unpacker().feed(packed))),
            ("result", lambda: [maker.make(one, {}, "done", outputs[one.job_id]) for one in deliveries]),
            ("json", lambda: [result.payload() for result in results]),
            ("finish", lambda: finish(QueueKeys("bench"), "bench", ends, payloads).by_hash),
        )
    }


def _run(engine: FakeEngine, accepted: Sequence[Accepted]) -> dict[str, RequestOutput]:
    for one in accepted:
        engine.add(one.request)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step().finished}
    return outputs


def _messages(accepted: Sequence[Accepted], outputs: Sequence[RequestOutput]) -> list[Add | Turn]:
    requests = in_chunks((one.request for one in accepted), _A_MESSAGE)
    return [*map(Add, requests), *(Turn(finished=part) for part in in_chunks(outputs, _A_MESSAGE))]


def _best(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def _delivery(job: Job) -> Delivery:
    return Delivery(
        job_id=job.id,
        lane=job.lane,
        tenant=job.tenant,
        stream="s",
        entry_id="1-1",
        attempt=1,
        payload=job.payload(),
        payload_ref=None,
        tokens=job.estimated_tokens(),
        seed=1,
        accepted_ms=1,
        started_ms=1,
        deadline_ms=0,
        result_ttl_s=60,
        stream_tokens=False,
    )
