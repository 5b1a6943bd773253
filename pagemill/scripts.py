"""Runs the Lua scripts: loaded once, called by hash, sent again where a server does not know them."""

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Generic, TypeVar

import redis.exceptions as redis_errors
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from pagemill.errors import NotPermitted, QueueUnavailable, ServerAway, ServerFull

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Arg = str | bytes | int

# parts that are no scripts by themselves, and how the first line of one asks for them
SHARED = ("common", "ending", "admission", "claim", "dead", "suspects", "raw")
WITH = "-- with: "

# said by a server that is no master (any more), or cannot write now; redis-py cuts some first words off
_NOT_READY = re.compile(
    "READONLY|read only replica|LOADING|MASTERDOWN|Link with MASTER|CLUSTERDOWN|NOREPLICAS|MISCONF|UNBLOCKED|^BUSY "
    # by a cluster while a slot is on its way
    "|^MOVED |^ASK |^TRYAGAIN|attempted to access a non local key"
)
_ON_ITS_WAY = (redis_errors.AskError, redis_errors.TryAgainError, redis_errors.ClusterDownError)

# what a user may not do: commands, keys, channels, in the words of 6.2, of 7.0, and from inside a script
_NOT_PERMITTED = re.compile("NOPERM|ACL failure in script|has no permissions|user executing the script can't")
_COMMAND = re.compile("the '([^'|]+)")


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, the hash that a server knows it by, and its name here."""

    source: bytes
    sha: str
    name: str = ""


@cache
def load(name: str) -> Script:
    """
    The script of pagemill/lua/<name>.lua, with what it shares put before it.

    That is common.lua for all, and those of SHARED that the first line asks for: making their
    functions costs several microseconds a call.
    """
    folder = files("pagemill") / "lua"
    body = (folder / f"{name}.lua").read_bytes()
    first = body.partition(b"\n")[0].decode()
    shared = ["common", *(first.removeprefix(WITH).split(", ") if first.startswith(WITH) else ())]
    source = b"\n".join([*((folder / f"{part}.lua").read_bytes() for part in shared), body])
    return Script(source, sha1(source, usedforsecurity=False).hexdigest(), name)


@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """
    One call of a script: what goes out, and how to read what comes back.

    The two clients and the consumer differ only in how they send it.

    Args:
        when_full: What stands for the reply where the server is out of memory; a script that is
            refused for that has written nothing. Without it the call raises ServerFull.
    """

    script: Script
    base: str
    args: Sequence[Arg]
    parse: Callable[[Any], T_co]
    when_full: Callable[[], T_co] | None = None

    @property
    def by_hash(self) -> tuple[Any, ...]:
        return ("EVALSHA", self.script.sha, 1, self.base, *self.args)

    @property
    def by_source(self) -> tuple[Any, ...]:
        return ("EVAL", self.script.source, 1, self.base, *self.args)


def run(redis: Redis, call: Call[T]) -> T:
    """
    Raises:
        QueueUnavailable: the server cannot be reached or refuses; ServerFull where it is out of memory.
    """
    with _reaching(redis):
        try:
            reply = redis.execute_command(*call.by_hash)
        except redis_errors.NoScriptError:
            reply = redis.execute_command(*call.by_source)
    return call.parse(reply)


async def run_async(redis: AsyncRedis, call: Call[T]) -> T:
    """As `run`."""
    async with _reaching_async(redis):
        try:
            reply = await redis.execute_command(*call.by_hash)
        except redis_errors.NoScriptError:
            reply = await redis.execute_command(*call.by_source)
    return call.parse(reply)


def run_many(redis: Redis, calls: Sequence[Call[T]]) -> list[T]:
    """Send all calls in one go; replies in order. Raises as `run`, for the first that failed."""
    with _reaching(redis):
        replies = _send(redis, [call.by_hash for call in calls])
        unknown = _unknown(replies)
        if unknown:
            again = _send(redis, [calls[index].by_source for index in unknown])
            _fill_in(replies, unknown, again)
        return [_read(call, reply) for call, reply in zip(calls, replies, strict=True)]


async def run_many_async(redis: AsyncRedis, calls: Sequence[Call[T]]) -> list[T]:
    """As `run_many`."""
    async with _reaching_async(redis):
        replies = await _send_async(redis, [call.by_hash for call in calls])
        unknown = _unknown(replies)
        if unknown:
            again = await _send_async(redis, [calls[index].by_source for index in unknown])
            _fill_in(replies, unknown, again)
        return [_read(call, reply) for call, reply in zip(calls, replies, strict=True)]


def _send(redis: Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    with redis.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline.execute(raise_on_error=False)


async def _send_async(redis: AsyncRedis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    async with redis.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return await pipeline.execute(raise_on_error=False)


def _unknown(replies: Sequence[Any]) -> list[int]:
    return [index for index, reply in enumerate(replies) if isinstance(reply, redis_errors.NoScriptError)]


def _fill_in(replies: list[Any], places: Sequence[int], again: Sequence[Any]) -> None:
    for place, reply in zip(places, again, strict=True):
        replies[place] = reply


def _read(call: Call[T], reply: Any) -> T:
    if not isinstance(reply, Exception):
        return call.parse(reply)
    if call.when_full is not None and _is_full(reply):
        return call.when_full()
    raise reply


def _is_full(error: Exception) -> bool:
    # from inside a script it comes as a plain error
    return isinstance(error, redis_errors.OutOfMemoryError) or "OOM" in str(error)


def is_not_ready(error: Exception) -> bool:
    """Whether the server says that it is no master, or that it cannot serve for now."""
    # on 6.2, what a command inside a script says comes as the script's own error
    return isinstance(error, _ON_ITS_WAY) or _NOT_READY.search(str(error)) is not None


@contextmanager
def _reaching(redis: Redis) -> Iterator[None]:
    """As `translated`; and where a failover may have moved the server, the next call looks for it anew."""
    try:
        with translated():
            yield
    except ServerAway:
        redis.connection_pool.disconnect(inuse_connections=False)
        raise


@asynccontextmanager
async def _reaching_async(redis: AsyncRedis) -> AsyncIterator[None]:
    """As `_reaching`."""
    try:
        with translated():
            yield
    except ServerAway:
        await redis.connection_pool.disconnect(inuse_connections=False)
        raise


@contextmanager
def translated() -> Iterator[None]:
    """Turn what redis-py raises into our errors; the one place where the two meet."""
    try:
        yield
    except redis_errors.AuthenticationError as error:
        raise QueueUnavailable(f"the queue's server refuses the login: {error}") from error
    except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
        if "certificate" in str(error).lower():
            hint = "see ssl_ca_certs, ssl_certfile and ssl_keyfile in the URL"
            raise QueueUnavailable(f"the queue's server and we do not trust each other: {error}; {hint}") from error
        raise ServerAway(f"the queue's server cannot be reached: {error}") from error
    except redis_errors.RedisError as error:
        if _is_full(error):
            raise ServerFull("the queue's server is out of memory") from error
        if is_not_ready(error):
            raise ServerAway(f"the queue's server is not ready: {error}") from error
        if _is_not_permitted(error):
            raise NotPermitted(
                f"the queue's server does not let this user do that: {error}; {_grant(error)}"
            ) from error
        raise QueueUnavailable(f"the queue's server refuses: {error}") from error


def _is_not_permitted(error: Exception) -> bool:
    return isinstance(error, redis_errors.NoPermissionError) or _NOT_PERMITTED.search(str(error)) is not None


def _grant(error: Exception) -> str:
    """What the operator is to add to the user's rules."""
    text = str(error)
    if "channel" in text:
        return "grant the queue's channels: &{pagemill:<queue>}:*"
    command = _COMMAND.search(text)
    if command is not None and "key" not in text.partition("script")[0]:
        return f"grant +{command[1]}, or all of docs/client.md, `A user of its own`"
    return "grant the queue's keys and the table of models: ~{pagemill:<queue>}* ~pagemill:models"
