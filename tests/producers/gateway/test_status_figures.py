"""Figures and lines of the status page."""

import re

import pytest

from producers.gateway.status import figures
from producers.gateway.status.plot import HEIGHT, WIDTH, ceiling, make_plot, shown
from tests.support.sights import NOW_MS, minutes

JOBS = {"jobs": lambda minute: minute.jobs}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.2, "<1 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (605, "10 min"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (86_400, "1 d"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    """
    What nobody needs is left out.
    """
    assert text == figures.duration(seconds)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9_999, "9,999"), (99_999, "99,999"), (100_000, "100k"), (1_234_567, "1.23M"), (999_960, "1M")],
)
def test_large_counts_are_shortened(number: int, text: str) -> None:
    """
    Five digits are shown whole, and three of what has more.
    """
    assert text == figures.count(number)


@pytest.mark.parametrize(
    ("number", "text"), [(0.0, "0"), (0.01, "<0.1"), (3.14, "3.1"), (9.96, "10"), (12_345.6, "12,346"), (2.5e6, "2.5M")]
)
def test_rates_have_a_decimal_below_ten(number: float, text: str) -> None:
    """
    A little is not nothing.
    """
    assert text == figures.rate(number)


def test_times_are_utc() -> None:
    """
    In words, and as <time> takes them; a clock that is a little ahead is now.
    """
    assert ("22:00", "2026-11-29T22:00:00Z") == (figures.clock(NOW_MS), figures.instant(NOW_MS))
    assert ("1 min 5 s ago", "0 s ago") == (figures.ago(NOW_MS - 65_000, NOW_MS), figures.ago(NOW_MS + 900, NOW_MS))


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (0.9, 1), (1, 1), (1.01, 1.2), (14, 16), (230, 300), (61_000, 80_000)]
)
def test_the_axis_ends_at_a_round_number(value: float, top: float) -> None:
    """
    The next one above the largest value, and not far above.
    """
    assert top == pytest.approx(ceiling(value))


def test_a_line_goes_from_the_first_minute_to_the_last() -> None:
    """
    120 jobs in the last minute are 2 a second, at the top; nothing before it is at the bottom.
    """
    plot = make_plot(minutes(120), JOBS)

    [curve] = plot.curves
    points = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", curve.line)]
    assert [(0.0, HEIGHT), (590.0, HEIGHT), (WIDTH, 0.0)] == [points[0], points[-2], points[-1]]
    assert 61 == len(points) == len(plot.spots)
    assert (("2", "1", "0"), ("21:00", "22:00")) == (plot.ticks, (plot.times[0], plot.times[-1]))
    assert "22:00: 2.0 jobs" == plot.spots[-1][2]
    assert "jobs: 2.0 a second now, 2.0 at most, <0.1 in the mean." == plot.summary
    assert curve.area.endswith("L600.0 160.0 L0 160.0 Z")


def test_the_running_minute_is_divided_by_what_of_it_is_over() -> None:
    """
    Forty jobs in twenty seconds are two a second; in the first ten seconds a minute is left out.
    """
    assert 2.0 == make_plot(shown(minutes(60, 40, seconds=20.0)), JOBS).curves[0].values[-1]
    assert 1.0 == make_plot(shown(minutes(60, 40, seconds=5.0)), JOBS).curves[0].values[-1]


def test_nothing_is_a_plot_too() -> None:
    """
    An hour in which nothing ended, and no hour at all.
    """
    assert make_plot(minutes(), JOBS).is_empty
    empty = make_plot((), JOBS)
    assert ("", (), "jobs: none.") == (empty.curves[0].line, empty.spots, empty.summary)
