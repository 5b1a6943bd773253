"""
Streaming chats on the gateway, a thousand at a time, beside the same jobs without it.

    python -m benchmarks.gateway

A fake engine gives every running request one token a step; callers, gateway, worker and server are
processes of their own. A case is one JSON line: time to first text (median, p99), events, errors.

    engine    the fake engine alone, all requests at once
    hub       the same jobs through pagemill's submitter and stream hub
    gateway   the same chats as HTTP streams
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gateway_load import Heard, PacedEngine, prompt_of
from engine.request import Request
from engine.sampling_params import SamplingParams
from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.messages import TokenDelta
from pagemill.schema import Job
from pagemill.stream_hub import StreamHub
from pagemill.submitter import Submitter
from producers.child import Child
from producers.local_redis import local_redis

QUEUE = "bench-gateway"


def engine_alone(number: int, tokens: int, step_s: float) -> Heard:
    """Steps until all have ended; a request's first text comes with the step that made it."""
    engine = PacedEngine(step_s=step_s, max_num_seqs=number)
    heard = Heard()
    counts: dict[str, int] = {}
    began = time.monotonic()
    for caller in range(number):
        prompt = engine.tokenizer.encode(f"user: {prompt_of(caller)}\n")
        engine.add(Request(str(caller), prompt, SamplingParams(max_tokens=tokens), stream=True))
    while engine.has_work:
        for delta in engine.step().deltas:
            if delta.request_id not in counts:
                heard.first_s.append(time.monotonic() - began)
            counts[delta.request_id] = counts.get(delta.request_id, 0) + 1
    heard.last_s = time.monotonic() - began
    heard.events, heard.characters = list(counts.values()), [tokens] * number
    return heard


async def through_hub(url: str, number: int, tokens: int) -> Heard:
    """As the gateway does it, without HTTP."""
    heard = Heard()
    async with AsyncClient(url, queue=QUEUE) as client:
        submitter, hub = Submitter(client), StreamHub(client)

        async def call(caller: int) -> None:
            messages = [{"role": "user", "content": prompt_of(caller)}]
            options = {"max_tokens": tokens, "temperature": 1.0}
            job = Job.build(messages=messages, options=options, lane="interactive", stream=True)
            began, events, characters = time.monotonic(), 0, 0
            await submitter.submit(job)
            async for item in hub.follow(job.id):
                if isinstance(item, TokenDelta):
                    if not events:
                        heard.first_s.append(time.monotonic() - began)
                    events, characters = events + 1, characters + len(item.text)
            heard.events.append(events)
            heard.characters.append(characters)

        began = time.monotonic()
        await asyncio.gather(*map(call, range(number)))
        heard.last_s = time.monotonic() - began
        await hub.close()
    return heard


def through_gateway(port: int, number: int, tokens: int) -> Heard:
    command = [sys.executable, "-m", "benchmarks.gateway_load", "callers", f"http://127.0.0.1:{port}"]
    done = subprocess.run([*command, str(number), str(tokens)], capture_output=True, text=True, check=True)
    return Heard(**json.loads(done.stdout))


def line_of(case: str, heard: Heard, options: argparse.Namespace, repeat: int) -> dict[str, Any]:
    first = sorted(heard.first_s)
    whole = sum(characters == options.events for characters in heard.characters)
    return {
        "case": case,
        "callers": options.callers,
        "tokens": options.events,
        "step_s": options.step_s,
        "repeat": repeat,
        "first_median_s": round(first[len(first) // 2], 3) if first else None,
        "first_p99_s": round(first[min(len(first) - 1, len(first) * 99 // 100)], 3) if first else None,
        "all_s": round(heard.last_s, 2),
        "whole": whole,
        "events": sum(heard.events),
        "fewest_events": min(heard.events, default=0),
        "errors": len(heard.errors),
        "first_error": heard.errors[0] if heard.errors else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Streaming chats on the gateway.")
    parser.add_argument("--callers", type=int, default=1000)
    parser.add_argument("--events", type=int, default=16, help="tokens of each answer, an event each")
    parser.add_argument("--step-s", type=float, default=0.5, help="time between two tokens of an answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cases", default="engine,hub,gateway")
    options = parser.parse_args(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * options.callers + 256)), hard))
    failed = 0
    with ExitStack() as stack:
        url, port, gateway = start_all(stack, options)
        for repeat in range(options.repeat):
            for case in options.cases.split(","):
                before = cpu_seconds(gateway.pid)
                line = line_of(case, run_case(case, url, port, options), options, repeat)
                # of the gateway alone: unlike the times it says the same on a busy machine
                line["gateway_cpu_s"] = round(cpu_seconds(gateway.pid) - before, 2)
                failed += line["errors"] + options.callers - line["whole"]
                print(json.dumps(line), flush=True)
    return 1 if failed else 0


def run_case(case: str, url: str, port: int, options: argparse.Namespace) -> Heard:
    if case == "engine":
        return engine_alone(options.callers, options.events, options.step_s)
    if case == "hub":
        return asyncio.run(through_hub(url, options.callers, options.events))
    return through_gateway(port, options.callers, options.events)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; Linux tells it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_all(stack: ExitStack, options: argparse.Namespace) -> tuple[str, int, Child]:
    """A server, a worker and a gateway; the server's URL and the gateway's port."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-bench-")))
    url = stack.enter_context(local_redis())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    worker = [sys.executable, "-m", "benchmarks.gateway_load", "worker", url, QUEUE, str(options.step_s)]
    gateway = [sys.executable, "-m", "producers.gateway", "--no-auth", "--port", str(port), "--max-batches", "0"]
    place = ["--redis-url", url, "--queue", QUEUE]
    stack.enter_context(Child([*worker, str(options.callers)], log=folder / "worker.log"))
    served = stack.enter_context(Child([*gateway, *place], log=folder / "gateway.log"))
    deadline = time.monotonic() + 60
    with Client(url, queue=QUEUE) as client:
        while not client.workers() or "startup complete" not in served.last_lines():
            assert time.monotonic() < deadline, served.last_lines()
            time.sleep(0.05)
    return url, port, served


if __name__ == "__main__":
    sys.exit(main())
