"""
Several questions at once on one event loop, each answer printed as it is generated.

    python examples/stream_async.py "Name three rivers." "Name three mountains."
"""

import asyncio
import sys

from pagemill.async_client import AsyncClient
from pagemill.schema import Message, Options


async def ask(client: AsyncClient, number: int, question: str) -> None:
    job = await client.submit(
        messages=(Message(role="user", content=question),),
        options=Options(max_tokens=40, temperature=0.7, seed=number),
        stream=True,
    )
    # a worker may die meanwhile: another one goes on, and no character comes twice
    async for delta in client.stream(job.job_id, wait_s=120):
        print(f"[{number}] {delta.text!r}", flush=True)


async def main() -> None:
    questions = sys.argv[1:] or ["Name three rivers.", "Name three mountains."]
    async with AsyncClient() as client:
        await asyncio.gather(*(ask(client, number, question) for number, question in enumerate(questions)))


if __name__ == "__main__":
    asyncio.run(main())
