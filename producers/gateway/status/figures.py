"""Figures as people read them."""

from datetime import UTC, datetime

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(number: int) -> str:
    """All digits up to 99,999; of more the first three."""
    return f"{number:,}" if abs(number) < 100_000 else short(number)


def short(number: float) -> str:
    """At most three digits: 950, 1.2k, 38.4M."""
    for size, unit in _UNITS:
        # 999,960 is 1M, not 1000k
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def rate(number: float) -> str:
    """Of something a second: one decimal below ten, none above."""
    if number == 0:
        return "0"
    if number < 0.05:
        return "<0.1"
    return f"{number:.1f}" if number < 9.95 else count(round(number))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Two units at most: 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 1:
        return "<1 s" if seconds > 0 else "0 s"
    if whole < 60:
        return f"{whole} s"
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            # seconds beside ten minutes tell nothing
            is_told = rest and not (unit == "min" and whole >= 600)
            return f"{whole // size} {unit} {rest} {small}" if is_told else f"{whole // size} {unit}"
    raise AssertionError("a minute at least")


def ago(at_ms: int, now_ms: int) -> str:
    """How long before now; what is a moment ahead is now."""
    return f"{duration(max(0, now_ms - at_ms) / 1000)} ago"


def clock(at_ms: int) -> str:
    """Hours and minutes in UTC."""
    return f"{_utc(at_ms):%H:%M}"


def instant(at_ms: int) -> str:
    """As <time> takes it."""
    return f"{_utc(at_ms):%Y-%m-%dT%H:%M:%SZ}"


def _utc(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)
