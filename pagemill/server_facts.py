"""What the server says of itself, and whether a queue is safe there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

from pagemill.errors import UnsafeServer
from pagemill.scripts import translated

MIN_VERSION = (6, 2)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server says of itself; None where it does not say."""

    version: str | None = None
    policy: str | None = None
    append_only: bool | None = None
    saves: bool | None = None
    refused: tuple[str, ...] = field(default=())


async def read_facts(redis: AsyncRedis) -> ServerFacts:
    """
    Ask the server for its version, eviction policy and persistence.

    Managed servers and access lists refuse some of it; that is noted, not raised.

    Raises:
        QueueUnavailable: the server cannot be reached.
    """
    with translated():
        await redis.execute_command("PING")
    refused: list[str] = []
    info: dict[str, str] = {}
    for section in ("server", "memory", "persistence"):
        text = await _ask(redis, refused, "INFO", section)
        info |= _info_lines(text)
    settings: dict[str, str] = {}
    for name in ("maxmemory-policy", "save"):
        pair = await _ask(redis, refused, "CONFIG", "GET", name)
        settings |= _config_pair(pair)
    return facts_of(info, settings, tuple(refused))


async def _ask(redis: AsyncRedis, refused: list[str], *command: str) -> Any:
    try:
        return await redis.execute_command(*command)
    except RedisError:
        refused.append(" ".join(command))
        return None


def _info_lines(reply: Any) -> dict[str, str]:
    # redis-py parses INFO for us, into whatever types it likes
    return {str(name): str(value) for name, value in reply.items()} if isinstance(reply, dict) else {}


def _config_pair(reply: Any) -> dict[str, str]:
    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    return {text(name): text(value) for name, value in reply.items()} if isinstance(reply, dict) else {}


def facts_of(info: Mapping[str, str], settings: Mapping[str, str], refused: tuple[str, ...] = ()) -> ServerFacts:
    """Pick what matters out of INFO and CONFIG GET."""
    appends = info.get("aof_enabled")
    return ServerFacts(
        version=info.get("redis_version"),
        policy=settings.get("maxmemory-policy") or info.get("maxmemory_policy"),
        append_only=None if appends is None else appends == "1",
        saves=None if "save" not in settings else bool(settings["save"]),
        refused=refused,
    )


def judge(facts: ServerFacts, *, allow_unsafe: bool) -> list[str]:
    """
    What an operator should know of this server, a sentence each.

    Raises:
        UnsafeServer: its version is too old, or it may evict jobs; the latter is a warning
            where `allow_unsafe`.
    """
    version = _version(facts.version)
    if version is not None and version < MIN_VERSION:
        raise UnsafeServer(f"the server is Redis {facts.version}: Pagemill needs 6.2 or newer, or Valkey")
    warnings = []
    if facts.policy is None:
        warnings.append("the server does not say its eviction policy: make sure that it is noeviction")
    elif facts.policy != "noeviction":
        message = (
            f"the server's eviction policy is {facts.policy}: when its memory is full it deletes jobs and results. "
            "Set it with `CONFIG SET maxmemory-policy noeviction`"
        )
        if not allow_unsafe:
            raise UnsafeServer(f"{message}, or start with allow_unsafe_redis to take the risk")
        warnings.append(message)
    if facts.append_only is False:
        what = "keeps no append-only file"
        what += ", only snapshots" if facts.saves else " and no snapshots" if facts.saves is False else ""
        lost = "the last jobs before it stops" if facts.saves else "all jobs when it stops"
        warnings.append(f"the server {what}: it loses {lost}. Set `appendonly yes`")
    return warnings


def _version(text: str | None) -> tuple[int, ...] | None:
    parts = (text or "").split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else None
