"""Which models are served, asked for many callers at a time."""

import asyncio
from pathlib import Path

import pytest

from pagemill.async_client import AsyncClient
from pagemill.catalogue import Catalogue, ModelFacts
from pagemill.errors import QueueUnavailable
from tests.support.redis_process import RedisProcess


def test_callers_share_one_question_and_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A server that is away is waited for once, and not by one caller after the other; one that leaves ends it for none.
    """
    asked = 0
    read = Catalogue._read

    async def counted(self: Catalogue) -> dict[str, ModelFacts]:
        nonlocal asked
        asked += 1
        return await read(self)

    async def scenario(server: RedisProcess) -> None:
        async with AsyncClient(server.url, queue="q") as client:
            catalogue = Catalogue(client)
            first, *others = [asyncio.create_task(catalogue.models()) for _ in range(50)]
            await asyncio.sleep(0)
            first.cancel()
            assert [{}] * 49 == await asyncio.gather(*others)
            assert 1 == asked
            server.kill()
            outcomes = await asyncio.gather(*(catalogue.models(fresh_s=0) for _ in range(50)), return_exceptions=True)
            assert all(isinstance(one, QueueUnavailable) for one in outcomes)
            assert 2 == asked

    monkeypatch.setattr(Catalogue, "_read", counted)
    with RedisProcess(tmp_path) as server:
        asyncio.run(scenario(server))
