"""When the worker pulls: what it knows of the lanes, without a queue."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, cast

from pagemill.consumer import Consumer
from pagemill.errors import QueueUnavailable
from pagemill.messages import Room
from pagemill.schema import LANES, Lane
from worker.doorbell import TRUST_S, Doorbell
from worker.puller import NO_ROOM, NOTHING, Ask

ROOM = Room(4, 100)
ALL = Ask((ROOM,) * 3, frozenset(LANES))
URGENT = Ask((ROOM, ROOM, NO_ROOM), frozenset({"interactive", "standard"}))


class Street:
    """Bells that ring when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changes = 0
        self.ears: list[Lane] = []
        self.bells: dict[Lane, asyncio.Future[bool]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.doorbell = Doorbell(
            cast(Consumer, self), start=self._start, on_change=self._on_change, clock=lambda: self.now
        )

    async def wait_for_work(self, timeout_s: float, lanes: Sequence[Lane]) -> Lane | None:
        assert timeout_s <= TRUST_S
        [lane] = lanes
        self.ears.append(lane)
        self.bells[lane] = asyncio.get_running_loop().create_future()
        return lane if await self.bells[lane] else None

    async def ring(self, lane: Lane, *, heard: bool = True) -> None:
        before = self.changes
        self.bells[lane].set_result(heard)
        while self.changes == before:
            await asyncio.sleep(0)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        return task

    def _on_change(self) -> None:
        self.changes += 1


def play(story: Callable[[Street, Doorbell], Awaitable[None]]) -> Street:
    async def run() -> Street:
        street = Street()
        await story(street, street.doorbell)
        street.doorbell.stop()
        await asyncio.gather(*street.tasks, return_exceptions=True)
        return street

    return asyncio.run(run())


def test_a_quiet_lane_is_not_pulled_from_until_it_rings() -> None:
    """
    After a pull that left nothing, the next one waits for a bell, however often something changes here.
    """

    async def story(street: Street, doorbell: Doorbell) -> None:
        calls = [doorbell.calls_for(ALL)]
        doorbell.pulled(frozenset())
        doorbell.listen(ALL.starting)
        await asyncio.sleep(0)
        calls.append(doorbell.calls_for(ALL))
        await street.ring("bulk")
        calls.append(doorbell.calls_for(ALL))
        doorbell.pulled(frozenset())
        calls.append(doorbell.calls_for(ALL))

        assert [True, False, True, False] == calls
        assert {*LANES} == {*street.ears}

    play(story)


def test_what_was_left_is_asked_for_when_there_is_room() -> None:
    """
    A lane in which jobs were left is pulled from without a ring, and its bell is left to others.
    """

    async def story(street: Street, doorbell: Doorbell) -> None:
        doorbell.pulled(frozenset({"bulk"}))
        doorbell.listen(ALL.starting)
        await asyncio.sleep(0)

        assert {"interactive", "standard"} == {*street.ears}
        assert (False, True) == (doorbell.calls_for(URGENT), doorbell.calls_for(ALL))

    play(story)


def test_a_ring_that_we_have_no_room_for_is_passed_on() -> None:
    """
    Who hears a bell and has become full pulls all the same: the script rings again.
    """

    async def story(street: Street, doorbell: Doorbell) -> None:
        doorbell.pulled(frozenset())
        doorbell.listen(ALL.starting)
        await asyncio.sleep(0)
        await street.ring("bulk")

        assert (True, True) == (doorbell.calls_for(URGENT), doorbell.calls_for(NOTHING))

    play(story)


def test_a_lane_has_one_ear() -> None:
    """
    Looking again adds no listener to a lane that has one; a wait that ends is begun anew.
    """

    async def story(street: Street, doorbell: Doorbell) -> None:
        doorbell.pulled(frozenset())
        for _ in range(3):
            doorbell.listen(URGENT.starting)
            await asyncio.sleep(0)
        await street.ring("standard", heard=False)
        assert not doorbell.calls_for(URGENT)
        doorbell.listen(URGENT.starting)
        await asyncio.sleep(0)

        assert ["interactive", "standard", "standard"] == sorted(street.ears)

    play(story)


def test_rings_can_be_lost() -> None:
    """
    Every second all lanes with room are looked at again.
    """

    async def story(street: Street, doorbell: Doorbell) -> None:
        doorbell.pulled(frozenset())
        early = doorbell.calls_for(ALL)
        street.now += TRUST_S

        assert (False, True, False) == (early, doorbell.calls_for(ALL), doorbell.calls_for(NOTHING))

    play(story)


def test_a_server_that_is_away_is_left_to_the_next_pull() -> None:
    """
    A wait that fails counts as a ring: the pull meets the same trouble, and says so.
    """

    async def story(street: Street, doorbell: Doorbell) -> None:
        doorbell.pulled(frozenset())
        doorbell.listen(frozenset({"bulk"}))
        await asyncio.sleep(0)
        street.bells["bulk"].set_exception(QueueUnavailable("away"))
        while not street.changes:
            await asyncio.sleep(0.01)

        assert doorbell.calls_for(ALL)

    play(story)
