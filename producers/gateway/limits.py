"""
Rates and quotas of API keys, kept in the queue's server so that all gateways share them.

One key a caller: `{pagemill:gateway:limits}:<id>`, a hash of its buckets, which expires after two days; see
limits.lua. All are on one node of a cluster, and no queue is called so: its name has no colon.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from pagemill.async_client import AsyncClient
from pagemill.scripts import Call, Script
from producers.gateway.api_keys import ApiKey
from producers.openai_api.errors import ApiError

KEY = "{pagemill:gateway:limits}:"

_WORDS = {
    "requests_per_minute": ("rate_limit_exceeded", "requests in a minute"),
    "tokens_per_minute": ("rate_limit_exceeded", "tokens in a minute"),
    "tokens_per_day": ("insufficient_quota", "tokens in a day"),
}


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a request was let in with, to be settled at its end."""

    key: ApiKey
    estimate: int
    # tokens that its bucket gave for the estimate
    taken: int
    # since 1970, that is charged
    day: int


class OverLimit(ApiError):
    """Raised for a request that came too early; `limit` names what ran out."""

    def __init__(self, limit: str, wait_s: float) -> None:
        code, what = _WORDS[limit]
        message = f"this key's {what} are used up: try again in {wait_s:.0f} s"
        super().__init__(429, message, code=code, retry_after_s=wait_s)
        self.limit = limit


class Limiter:
    """Asks the server before a request and tells it after."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def take(self, key: ApiKey, estimate: int) -> Ticket:
        """
        Let a request in.

        Args:
            estimate: Tokens that it may take, prompt and answers.

        Raises:
            OverLimit: not now.
            QueueUnavailable: the server cannot be reached.
        """
        taken, day = min(estimate, key.tokens_per_minute or estimate), 0
        if key.is_limited:
            passes, wait_ms, limit, day = await self._client._run(_call("take", key, estimate, taken))
            if not passes:
                raise OverLimit(limit, max(1.0, wait_ms / 1000))
        return Ticket(key, estimate, taken, day)

    async def settle(self, ticket: Ticket, used: int) -> None:
        """Put what a request took in place of its estimate."""
        key = ticket.key
        if key.tokens_per_minute or key.tokens_per_day:
            difference = used - ticket.estimate, used - ticket.taken
            await self._client._run(_call("settle", key, *difference, day=ticket.day))


def _call(verb: str, key: ApiKey, of_day: int, of_bucket: int, *, day: int = 0) -> Call[tuple[int, int, str, int]]:
    limits = (key.requests_per_minute or 0, key.tokens_per_minute or 0, key.tokens_per_day or 0)

    def parse(reply: list[Any]) -> tuple[int, int, str, int]:
        return int(reply[0]), int(reply[1]), reply[2].decode(), int(reply[3])

    return Call(_script(), KEY + key.id, [verb, *limits, of_day, of_bucket, day], parse)


@cache
def _script() -> Script:
    source = files("producers.gateway").joinpath("limits.lua").read_bytes()
    return Script(source, sha1(source, usedforsecurity=False).hexdigest())
