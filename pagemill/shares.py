"""
Who gets how much of a queue: weights of tenants, and limits on what tenants and lanes may have waiting.

For the operator. Workers and submits see a change at their next call.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from re import fullmatch
from typing import Any

from pagemill.client_base import AsyncClientBase, ClientBase
from pagemill.errors import SettingsError
from pagemill.keys import QueueKeys
from pagemill.schema import LANES, NAME, Lane

# stands for every tenant that has no limit of its own
ANY_TENANT = "*"

# the scripts count with no others (lua/common.lua)
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True)
class TenantShare:
    """
    A tenant's share of a queue.

    Args:
        tenant: Its name; "*" is the limit of all who have none of their own.
        weight: While two tenants have jobs waiting in a lane, they are served tokens in this ratio.
        max_queued_tokens: Submits are busy while more estimated tokens of it would wait in all
            lanes together; 0 where only "*" counts, or nothing.
        queued_tokens: Its estimated tokens that wait, by lane.
        used_tokens: What its jobs took, prompts and answers, ever.
        gpu_ms: Engine time of its jobs, ever.
    """

    tenant: str
    weight: float = 1.0
    max_queued_tokens: int = 0
    queued_tokens: dict[str, int] = field(default_factory=dict)
    used_tokens: int = 0
    gpu_ms: int = 0


class ShareVerbs(ClientBase):
    """What an operator sets in this client's queue."""

    def tenants(self) -> list[TenantShare]:
        """All tenants that were ever served, that have jobs waiting, or that something was set for; by name."""
        return _read_tenants(*self._pipeline(*_tenant_commands(self._directory.own)))

    def set_tenant(self, tenant: str, *, weight: float | None = None, max_queued_tokens: int | None = None) -> None:
        """
        Set a tenant's weight, its limit, or both.

        Args:
            tenant: Its name, or "*" for the limit of all who have none of their own.
            weight: From 0.001 to 1000; 1 is what a tenant has that nothing is set for.
            max_queued_tokens: 0 takes the limit away.

        Raises:
            SettingsError: a value is out of range.
        """
        self._pipeline(*_set_tenant(self._directory.own, tenant, weight, max_queued_tokens))

    def lane_limits(self) -> dict[Lane, int]:
        """Most estimated tokens that may wait in each lane; 0 for no limit."""
        return _read_lanes(*self._pipeline(_lane_command(self._directory.own)))

    def set_lane_limit(self, lane: str, max_queued_tokens: int) -> None:
        """
        Have submits to a lane be busy while more estimated tokens would wait there; 0 takes the limit away.

        Raises:
            SettingsError: there is no such lane, or the limit is below 0.
        """
        self._pipeline(*_set_lane(self._directory.own, lane, max_queued_tokens))


class AsyncShareVerbs(AsyncClientBase):
    """As ShareVerbs, for one event loop."""

    async def tenants(self) -> list[TenantShare]:
        """As ShareVerbs.tenants."""
        return _read_tenants(*await self._pipeline(*_tenant_commands(self._directory.own)))

    async def set_tenant(
        self, tenant: str, *, weight: float | None = None, max_queued_tokens: int | None = None
    ) -> None:
        """As ShareVerbs.set_tenant."""
        await self._pipeline(*_set_tenant(self._directory.own, tenant, weight, max_queued_tokens))

    async def lane_limits(self) -> dict[Lane, int]:
        """As ShareVerbs.lane_limits."""
        return _read_lanes(*await self._pipeline(_lane_command(self._directory.own)))

    async def set_lane_limit(self, lane: str, max_queued_tokens: int) -> None:
        """As ShareVerbs.set_lane_limit."""
        await self._pipeline(*_set_lane(self._directory.own, lane, max_queued_tokens))


def _tenant_commands(keys: QueueKeys) -> list[tuple[Any, ...]]:
    waiting = [("HGETALL", keys.waiting(lane)) for lane in LANES]
    return [("HGETALL", keys.tenants), ("HGETALL", keys.limits), ("HGETALL", keys.stats), *waiting]


def _read_tenants(
    weights: Mapping[bytes, bytes],
    limits: Mapping[bytes, bytes],
    counters: Mapping[bytes, bytes],
    *waiting: Mapping[bytes, bytes],
) -> list[TenantShare]:
    weight = {name.removesuffix(":weight"): value for name, value in _numbers(weights) if name.endswith(":weight")}
    limit = _under("tenant:", _numbers(limits))
    used = _under("tenant_tokens:", _numbers(counters))
    gpu_ms = _under("tenant_gpu_ms:", _numbers(counters))
    queued = [dict(_numbers(lane)) for lane in waiting]
    return [
        TenantShare(
            tenant=name,
            weight=_clean_weight(weight.get(name, 1.0)),
            max_queued_tokens=int(limit.get(name, 0)),
            queued_tokens={lane: int(sums.get(name, 0)) for lane, sums in zip(LANES, queued, strict=True)},
            used_tokens=int(used.get(name, 0)),
            gpu_ms=int(gpu_ms.get(name, 0)),
        )
        for name in sorted({*weight, *limit, *used}.union(*queued))
    ]


def _numbers(fields: Mapping[bytes, bytes]) -> Iterable[tuple[str, float]]:
    """Names and values; what is no number was set by hand, and counts for nothing."""
    for name, value in fields.items():
        with suppress(ValueError):
            number = float(value)
            if isfinite(number):
                yield name.decode(), number


def _under(prefix: str, values: Iterable[tuple[str, float]]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values if name.startswith(prefix)}


def _clean_weight(weight: float) -> float:
    # as the scripts do
    return weight if LEAST_WEIGHT <= weight <= MOST_WEIGHT else 1.0


def _set_tenant(
    keys: QueueKeys, tenant: str, weight: float | None, max_queued_tokens: int | None
) -> list[tuple[Any, ...]]:
    if tenant != ANY_TENANT and not fullmatch(NAME, tenant):
        raise SettingsError(f"the tenant's name is {tenant!r}: want letters, digits, dots, dashes, underscores, @")
    commands: list[tuple[Any, ...]] = []
    if weight is not None:
        if tenant == ANY_TENANT:
            raise SettingsError("a weight is one tenant's: all who have none weigh 1")
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise SettingsError(f"the weight is {weight:g}: want {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
        commands.append(_put(keys.tenants, f"{tenant}:weight", f"{weight:.6g}", usual=weight == 1))
    if max_queued_tokens is not None:
        commands.append(_limit(keys, f"tenant:{tenant}", max_queued_tokens))
    return commands


def _lane_command(keys: QueueKeys) -> tuple[Any, ...]:
    return ("HGETALL", keys.limits)


def _read_lanes(limits: Mapping[bytes, bytes]) -> dict[Lane, int]:
    found = _under("lane:", _numbers(limits))
    return {lane: int(found.get(lane, 0)) for lane in LANES}


def _set_lane(keys: QueueKeys, lane: str, max_queued_tokens: int) -> Sequence[tuple[Any, ...]]:
    if lane not in LANES:
        raise SettingsError(f"the lane is {lane!r}: want {', '.join(LANES)}")
    return [_limit(keys, f"lane:{lane}", max_queued_tokens)]


def _limit(keys: QueueKeys, name: str, max_queued_tokens: int) -> tuple[Any, ...]:
    if max_queued_tokens < 0:
        raise SettingsError(f"the limit is {max_queued_tokens:,} tokens: want 0 for none, or more")
    return _put(keys.limits, name, max_queued_tokens, usual=max_queued_tokens == 0)


def _put(key: str, name: str, value: str | int, *, usual: bool) -> tuple[Any, ...]:
    """Write what differs from what counts where nothing is written."""
    return ("HDEL", key, name) if usual else ("HSET", key, name, value)
