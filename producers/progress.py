"""Shows how far a run is: a live bar on a terminal, a line now and then anywhere else."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from pagemill.client import Client
from pagemill.errors import PagemillError

log = structlog.get_logger(__name__)

LINE_EVERY_S = 5.0

# heartbeats come every second: over a few of them the rate does not jump
METER_S = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run stands: jobs or other units, and what its workers said last; kv_usage is a fraction, None unknown."""

    done: int
    total: int
    stage: str
    tokens_per_s: float = 0.0
    kv_usage: float | None = 0.0
    unit: str = "jobs"

    @property
    def usage(self) -> str:
        return "" if self.kv_usage is None else f"KV {self.kv_usage:>5.1%}"

    def __str__(self) -> str:
        if not self.tokens_per_s and not self.done:
            return self.stage
        rates = f"{self.tokens_per_s:.0f} tokens/s"
        if self.kv_usage is not None:
            rates += f", KV {self.kv_usage:.1%} used"
        return f"{self.stage}: {self.done}/{self.total} {self.unit}, {rates}"


class Meter:
    """The rate at which a counter grew over the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, count: int) -> float:
        """Take a reading; the counts of a second since the oldest one that is not too old."""
        now = self._clock()
        self._readings.append((now, count))
        while self._readings[0][0] < now - METER_S:
            self._readings.popleft()
        then, first = self._readings[0]
        return (count - first) / (now - then) if now > then else 0.0


def tell_of_no_worker(client: Client, tell: Callable[[str], object]) -> None:
    """Say that the jobs will wait, where no worker is there to do them."""
    # only a hint: a server that is away is told of by what follows
    with contextlib.suppress(PagemillError):
        if not client.workers():
            tell("no worker is alive: jobs wait until there is one")


class Display(Protocol):
    """Takes moments, as often as they come, while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, moment: Moment) -> None: ...


def display_for(console: Console, *, as_events: bool = False) -> Display:
    """A bar where the console can redraw one, lines where it cannot; or events of the log."""
    if as_events:
        return Lines(log_moment)
    if console.is_terminal:
        return Bar(console)
    return Lines(lambda moment: console.print(str(moment), highlight=False, soft_wrap=True))


class Bar:
    """A live progress bar."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
            TextColumn("{task.fields[rate]:>4.0f} tokens/s"),
            TextColumn("{task.fields[usage]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, moment: Moment) -> None:
        if self._task is None:
            self._task = self._progress.add_task(moment.stage, total=moment.total, unit=moment.unit, rate=0.0, usage="")
        self._progress.update(
            self._task,
            description=moment.stage,
            completed=moment.done,
            rate=moment.tokens_per_s,
            usage=moment.usage,
        )


def log_moment(moment: Moment) -> None:
    """A moment as an event of the log."""
    fields = {"done": moment.done, "total": moment.total, "tokens_per_s": round(moment.tokens_per_s, 1)}
    log.info("run.progress", stage=moment.stage, unit=moment.unit, **fields)


class Lines:
    """A line when the stage changes, when all is done, and every few seconds between."""

    def __init__(self, tell: Callable[[Moment], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._stage = ""
        self._done = 0
        self._printed_at = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def show(self, moment: Moment) -> None:
        now = self._clock()
        moved = moment.done > self._done and (moment.done == moment.total or now - self._printed_at >= LINE_EVERY_S)
        if moment.stage != self._stage or moved:
            self._tell(moment)
            self._stage, self._done, self._printed_at = moment.stage, moment.done, now
