"""
How often a command is tried.

redis-py tries a connect, and the question whether a connection still lives, as often as the command that needs them,
and each time the command is tried: with five repetitions, a server that is silent may be waited for 36 times.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from redis.asyncio.retry import Retry as RedisAsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry

_is_trying: ContextVar[bool] = ContextVar("_is_trying", default=False)


class Retry(RedisRetry):
    """Repeats what is asked for, and nothing within it."""

    def call_with_retry(self, do: Callable[[], Any], *how: Any, **more: Any) -> Any:
        if _is_trying.get():
            return RedisRetry(NoBackoff(), 0, self._supported_errors).call_with_retry(do, *how, **more)
        token = _is_trying.set(True)
        try:
            return super().call_with_retry(do, *how, **more)
        finally:
            _is_trying.reset(token)


class AsyncRetry(RedisAsyncRetry):
    """As Retry."""

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *how: Any, **more: Any) -> Any:
        if _is_trying.get():
            return await RedisAsyncRetry(NoBackoff(), 0, self._supported_errors).call_with_retry(do, *how, **more)
        token = _is_trying.set(True)
        try:
            return await super().call_with_retry(do, *how, **more)
        finally:
            _is_trying.reset(token)
