"""The last hour as lines: what the SVG is drawn from, and the words that say the same."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagemill.survey import Minute
from producers.gateway.status.figures import clock, rate, short

# units of the drawing, which is stretched to the page's width: the text beside it is no part of it
WIDTH, HEIGHT = 600.0, 160.0
# the running minute is shown once it can be divided by
LEAST_S = 10.0


@dataclass(frozen=True, slots=True)
class Curve:
    """
    Args:
        line, area: Path data; the area is closed along the bottom.
        values: A second, a minute each.
    """

    name: str
    line: str
    area: str
    values: tuple[float, ...]

    @property
    def peak(self) -> str:
        return rate(max(self.values, default=0.0))

    @property
    def summary(self) -> str:
        """What somebody sees who looks at it."""
        if not any(self.values):
            return f"{self.name}: none."
        mean = sum(self.values) / len(self.values)
        return f"{self.name}: {rate(self.values[-1])} a second now, {self.peak} at most, {rate(mean)} in the mean."


@dataclass(frozen=True, slots=True)
class Plot:
    """
    Args:
        ticks: At the left, from the top.
        times: Below, from the left.
        spots: Where the pointer finds a minute: x, width and text.
    """

    curves: tuple[Curve, ...]
    ticks: tuple[str, ...]
    times: tuple[str, ...]
    spots: tuple[tuple[str, str, str], ...]
    summary: str

    @property
    def is_empty(self) -> bool:
        return not any(any(curve.values) for curve in self.curves)


def shown(minutes: Sequence[Minute]) -> tuple[Minute, ...]:
    """Those that a rate can be told of."""
    return tuple(minute for minute in minutes if minute.seconds >= LEAST_S)


def make_plot(minutes: Sequence[Minute], curves: dict[str, Callable[[Minute], int]]) -> Plot:
    """
    Args:
        minutes: As `shown` gives them.
        curves: What is counted, by name.
    """
    values = {name: tuple(read(minute) / minute.seconds for minute in minutes) for name, read in curves.items()}
    top = ceiling(max((max(one, default=0.0) for one in values.values()), default=0.0))
    step = WIDTH / max(1, len(minutes) - 1)
    drawn = tuple(_curve(name, one, top, step) for name, one in values.items())
    spots = []
    for place, minute in enumerate(minutes):
        left, right = max(0.0, (place - 0.5) * step), min(WIDTH, (place + 0.5) * step)
        told = ", ".join(f"{rate(one.values[place])} {one.name}" for one in drawn)
        spots.append((f"{left:.1f}", f"{right - left:.1f}", f"{clock(minute.at_ms)}: {told}"))
    times = tuple(clock(minutes[place].at_ms) for place in _spread(len(minutes)))
    summary = " ".join(curve.summary for curve in drawn)
    return Plot(drawn, (short(top), short(top / 2), "0"), times, tuple(spots), summary)


def ceiling(value: float) -> float:
    """The next round number, which the axis ends at."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * factor for factor in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if size * factor >= value * 0.9999)


def _curve(name: str, values: tuple[float, ...], top: float, step: float) -> Curve:
    points = [f"{place * step:.1f} {HEIGHT * (1 - value / top):.1f}" for place, value in enumerate(values)]
    line = "M" + " L".join(points) if points else ""
    area = f"{line} L{(len(values) - 1) * step:.1f} {HEIGHT:.1f} L0 {HEIGHT:.1f} Z" if points else ""
    return Curve(name, line, area, values)


def _spread(number: int) -> list[int]:
    """Five places from first to last."""
    return [round(part * (number - 1) / 4) for part in range(5)] if number >= 5 else list(range(number))
