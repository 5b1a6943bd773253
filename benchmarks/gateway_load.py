"""
The other processes of `benchmarks.gateway`: its worker, and its callers.

    python -m benchmarks.gateway_load worker REDIS_URL QUEUE STEP_S MAX_SEQS
    python -m benchmarks.gateway_load callers URL NUMBER EVENTS

A caller is a socket and a loop over lines: on two cores a client library would be most of what is measured.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

from tests.support.services import RunningService
from worker.fake_engine import FakeEngine


class PacedEngine(FakeEngine):
    """Gives each running request one token a step, however many there are."""

    def __init__(self, *, step_s: float, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs=max_num_seqs, kv_tokens=1 << 30, tokens_per_s=None)
        self._step_s = step_s

    def _stride(self) -> int:
        time.sleep(self._step_s)
        return 1


@dataclass(slots=True)
class Heard:
    """What callers saw: seconds to the first text, events with text, and what went wrong."""

    first_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    events: list[int] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def prompt_of(number: int) -> str:
    return f"caller number {number}"


async def call_all(url: str, number: int, tokens: int) -> Heard:
    """All callers at once; each is done when it has read [DONE]."""
    heard = Heard()
    began = time.monotonic()
    await asyncio.gather(*(_call(url, caller, tokens, heard) for caller in range(number)))
    heard.last_s = time.monotonic() - began
    return heard


async def _call(url: str, caller: int, tokens: int, heard: Heard) -> None:
    place = urlsplit(url)
    message = {"role": "user", "content": prompt_of(caller)}
    body = json.dumps({"model": "fake", "messages": [message], "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    began = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(head.encode() + body)
        events, text = 0, ""
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(status.decode())
        async for line in reader:
            if line == b"data: [DONE]\n":
                break
            if not line.startswith(b"data: "):
                continue
            [choice] = json.loads(line[6:])["choices"]
            if piece := choice["delta"].get("content"):
                if not events:
                    heard.first_s.append(time.monotonic() - began)
                events, text = events + 1, text + piece
        else:
            raise RuntimeError("the stream was cut")
        writer.close()
        heard.events.append(events)
        heard.characters.append(len(text))
    except (OSError, RuntimeError, ValueError) as error:
        heard.errors.append(repr(error)[:200])


def work(url: str, queue: str, step_s: float, max_num_seqs: int) -> None:
    """Be the worker until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with RunningService(url, queue, engine=PacedEngine(step_s=step_s, max_num_seqs=max_num_seqs)):
        signal.sigwait([signal.SIGTERM])


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "worker":
        work(arguments[1], arguments[2], float(arguments[3]), int(arguments[4]))
        return
    print(json.dumps(asdict(asyncio.run(call_all(arguments[1], int(arguments[2]), int(arguments[3]))))))


if __name__ == "__main__":
    main(sys.argv[1:])
