"""
What the queue costs: through Redis against the engine alone, and the worker's own time per job.

    python -m benchmarks.queue                                        all five parts
    python -m benchmarks.queue --parts worker,submit,scripts,traces   those that need no model

    engine   the same jobs through Redis and one worker, and handed to the engine directly, in
             turns and with the same settings: the ratio of the rates
    worker   with the fake engine: the worker's processor microseconds per job, by thread, and
             what single pieces of the work take
    submit   submit_many against bare pipelined XADDs of the same payloads
    scripts  PULL of 64 and FINISH of 32 against bare scripts that move as much, with a backlog
    traces   the worker's time per job without traces, of jobs that nobody records, and with a span of each job

    python -m benchmarks.queue --parts engine --device cuda --model qwen2.5-0.5b --n 1000 --scale 1

On a GPU both engines are there at once, in bf16, and take turns. One JSON line a part. The server is
one of its own, started for this run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import gpu, queue_scripts, vocabulary, workloads
from benchmarks.contender import Answer, Case, Contender, ContenderError
from benchmarks.model import Model, find_model
from benchmarks.offline import environment
from benchmarks.queue_pieces import pieces
from benchmarks.trace_sink import TraceSink
from benchmarks.worker_process import Usage, WorkerFailed, running_worker
from engine.errors import StartupError
from pagemill.client import Client
from pagemill.errors import PagemillError
from pagemill.schema import Job, Options
from producers.local_redis import local_redis

PARTS = ("engine", "worker", "submit", "scripts", "traces")

# of a job whose producer does not record its trace
UNRECORDED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"

_WAIT_S = 600.0


def through_queue(client: Client, requests: Sequence[workloads.Request]) -> float:
    """Submit all requests and take all results; returns the seconds between."""
    jobs = [
        Job(prompt=tuple(request.prompt), options=Options(max_tokens=request.max_tokens, ignore_eos=True))
        for request in requests
    ]
    begin = time.perf_counter()
    client.submit_many(jobs)
    produced = sum(
        result.usage.completion_tokens for result in client.finished([job.id for job in jobs], wait_s=_WAIT_S)
    )
    took = time.perf_counter() - begin
    asked = sum(request.max_tokens for request in requests)
    if produced != asked:
        raise RuntimeError(f"the worker's results have {produced} tokens; {asked} were asked for")
    return took


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """What both engines of the engine part are told; names are those of EngineConfig, and of the worker's flags."""
    if args.device == "cpu":
        return {"dtype": "float32", "num_threads": str(args.threads)}
    # both are on the GPU at once: neither may take what is left of it
    settings = dict(option.split("=", 1) for option in gpu.our_options())
    return settings | {"kv_cache_bytes": str(args.kv_cache_gib * 2**30), "max_model_len": str(gpu.MAX_MODEL_LEN)}


def _same_engines(model: Model, args: argparse.Namespace) -> tuple[Contender, list[str], Mapping[str, str]]:
    """The engine alone, the flags of a worker whose engine has the same settings, and the environment of both."""
    settings = _settings(args)
    # cold for both: a repeat must not find its prompts in the cache
    arguments = ["--model", str(model.folder), *["--dummy"] * model.dummy, "--set", "prefix_caching=0"]
    flags = ["--model", str(model.folder), "--load-format", "dummy" if model.dummy else "auto", "--no-prefix-caching"]
    for name, value in settings.items():
        arguments += ["--max-model-len", value] if name == "max_model_len" else ["--set", f"{name}={value}"]
        flags += [f"--{name.replace('_', '-')}", value]
    env = environment(args.threads) if args.device == "cpu" else gpu.environment()
    return Contender("engine", "benchmarks.ours", arguments, environment=env), flags, env


def against_engine(url: str, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """The engine part."""
    case = Case(args.workload, args.n, None, model.vocab, args.scale, 0)
    warm_up = Case(args.workload, min(args.n, args.warm_up), 7, model.vocab, args.scale, 0)
    if model.dummy:
        # a worker does not start without one
        vocabulary.write(model.folder, model.vocab)
    engine, flags, env = _same_engines(model, args)
    answers: list[Answer] = []
    walls: list[float] = []
    used: list[Usage] = []
    requests = case.requests()
    with ExitStack() as stack:
        stack.enter_context(engine)
        worker = stack.enter_context(running_worker(url, flags, queue="bench", environment=env))
        client = stack.enter_context(Client(url, queue="bench"))
        engine.run(warm_up)
        through_queue(client, warm_up.requests())
        for _ in range(args.repeat):
            answers.append(engine.run(case))
            before = worker.usage()
            walls.append(through_queue(client, requests))
            used.append(worker.usage().since(before))
    wall_s = {"engine": [one.wall_s for one in answers], "queue": walls}
    cpu_s = {"engine": [one.cpu_s for one in answers], "queue": [one.process for one in used]}
    tokens = sum(request.max_tokens for request in requests)
    return {
        "queue": "engine",
        "model": model.name,
        "device": args.device,
        "workload": case.workload,
        "digest": workloads.digest(requests),
        "requests": len(requests),
        "output_tok_s": {name: round(tokens / statistics.median(values), 1) for name, values in wall_s.items()},
        "queue_over_engine": _ratio(wall_s),
        # what neighbours on the same cores cannot distort
        "queue_over_engine_cpu": _ratio(cpu_s),
        "all_wall_s": {name: [round(value, 2) for value in values] for name, values in wall_s.items()},
        "all_cpu_s": {name: [round(value, 2) for value in values] for name, values in cpu_s.items()},
        "worker_cpu_s": {name: round(seconds, 2) for name, seconds in used[-1].threads.items()},
    }


def _ratio(seconds: Mapping[str, Sequence[float]]) -> float:
    return round(statistics.median(seconds["engine"]) / statistics.median(seconds["queue"]), 3)


def own_time(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """The worker part."""
    jobs = [_text_job(index, args.prompt_chars, args.max_tokens) for index in range(args.jobs)]
    used, took = _use(url, jobs)
    return {
        "queue": "worker",
        "jobs": len(jobs),
        "prompt_chars": args.prompt_chars,
        "max_tokens": args.max_tokens,
        "jobs_s": round(len(jobs) / took, 1),
        "cpu_us_per_job": _per_job(used.process, len(jobs)),
        "by_thread_us": {name: _per_job(seconds, len(jobs)) for name, seconds in sorted(used.threads.items())},
        "pieces_us": pieces(jobs[:200]),
    }


def _use(url: str, jobs: Sequence[Job], environment: Mapping[str, str] | None = None) -> tuple[Usage, float]:
    """What a worker with the fake engine uses for some jobs, and the seconds that it takes."""
    flags = ["--engine", "fake", "--max-num-seqs", "256", "--fake-kv-tokens", "1000000", "--log-level", "warning"]
    warm_up = [_text_job(-1 - index, 800, 64) for index in range(200)]
    with (
        running_worker(url, flags, queue="fake", environment=environment) as worker,
        Client(url, queue="fake") as client,
    ):
        _answer_all(client, warm_up)
        before, begin = worker.usage(), time.perf_counter()
        _answer_all(client, jobs)
        took = time.perf_counter() - begin
        return worker.usage().since(before), took


def with_traces(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """The traces part: turn by turn, as another program on the machine would be taken for the cost of traces."""
    found: dict[str, list[float]] = {"off": [], "unrecorded": [], "on": []}
    by_thread: dict[str, float] = {}
    with TraceSink() as sink:
        cases = {"off": (None, None), "unrecorded": (sink.environment, UNRECORDED), "on": (sink.environment, None)}
        for turn in range(args.repeat):
            for name, (environment, traceparent) in cases.items():
                numbers = range(turn * args.jobs, (turn + 1) * args.jobs)
                jobs = [_text_job(index, args.prompt_chars, args.max_tokens, traceparent) for index in numbers]
                used, _ = _use(url, jobs, environment)
                found[name].append(_per_job(used.process, len(jobs)))
                by_thread = {thread: _per_job(seconds, len(jobs)) for thread, seconds in sorted(used.threads.items())}
        num_bytes = sink.num_bytes
    return {
        "queue": "traces",
        "jobs": args.jobs,
        "cpu_us_per_job": {name: statistics.median(values) for name, values in found.items()},
        "all_cpu_us_per_job": found,
        "by_thread_us_when_on": by_thread,
        "bytes_per_job": round(num_bytes / (args.repeat * args.jobs)),
    }


def _text_job(index: int, chars: int, max_tokens: int, traceparent: str | None = None) -> Job:
    text = f"{index}: " + "the quick brown fox jumps over the lazy dog. " * (chars // 45 + 1)
    given = {} if traceparent is None else {"traceparent": traceparent}
    return Job(prompt=text[:chars], options=Options(max_tokens=max_tokens), **given)


def _answer_all(client: Client, jobs: Sequence[Job]) -> None:
    client.submit_many(jobs)
    failed = [r for r in client.finished([job.id for job in jobs], wait_s=_WAIT_S) if r.status != "done"]
    if failed:
        raise RuntimeError(f"{len(failed)} jobs failed, the first with {failed[0].failure}")


def _per_job(seconds: float, jobs: int) -> float:
    return round(seconds / jobs * 1e6, 1)


def run(args: argparse.Namespace, parts: Sequence[str]) -> None:
    """Run the parts in order, each at an empty server."""
    for part in parts:
        with local_redis() as url, TemporaryDirectory() as scratch:
            if part == "engine":
                line = against_engine(url, find_model(args.model, Path(scratch)), args)
            elif part == "worker":
                line = own_time(url, args)
            elif part == "traces":
                line = with_traces(url, args)
            elif part == "submit":
                line = queue_scripts.submit_rate(url, args.jobs, args.prompt_chars)
            else:
                line = queue_scripts.latencies(url, args.backlog, args.prompt_chars)
        print(json.dumps(line), flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--model", default="smollm2", help="of the engine part: as a worker takes it, or a shape")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the engine part")
    parser.add_argument("--kv-cache-gib", type=int, default=16, help="of each engine on a GPU")
    parser.add_argument("--warm-up", type=int, default=8, help="requests before the measured ones")
    parser.add_argument("--workload", default="sharegpt")
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--scale", type=float, default=0.2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--prompt-chars", type=int, default=800)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--backlog", type=int, default=20_000)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        print(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        run(args, parts)
    except (StartupError, PagemillError, WorkerFailed, ContenderError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
