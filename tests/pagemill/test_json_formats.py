"""The formats of strings that are patterns of our own."""

import datetime
import ipaddress
import re

import pytest

from pagemill.json_formats import PATTERNS
from pagemill.json_schemas import with_json_patterns
from pagemill.regexes import json_pattern


def test_dates_are_those_of_the_calendar() -> None:
    """
    Each day of leap years and others, and no day that there is not.
    """
    pattern = re.compile(PATTERNS["date"])
    for year in (1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 9996, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                assert is_date(text) == bool(pattern.fullmatch(text)), text
    assert not pattern.fullmatch("0000-01-01")


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_times_are_those_of_a_clock() -> None:
    """
    With a zone, up to a second before midnight, without leap seconds.
    """
    pattern = re.compile(PATTERNS["time"])
    for good in ("00:00:00Z", "23:59:59.123456+23:59", "12:30:00.5-05:30"):
        assert pattern.fullmatch(good), good
        assert datetime.time.fromisoformat(good)
    for bad in ("24:00:00Z", "23:60:00Z", "23:59:60Z", "12:00:00", "12:00Z", "12:00:00+24:00", "12:00:00."):
        assert not pattern.fullmatch(bad), bad


def test_addresses_have_no_leading_zeros() -> None:
    """
    As Python reads them.
    """
    pattern = re.compile(PATTERNS["ipv4"])
    for number in range(256):
        assert pattern.fullmatch(f"{number}.0.0.{number}")
        assert ipaddress.IPv4Address(f"{number}.0.0.{number}")
    for bad in ("256.0.0.0", "01.0.0.0", "1.2.3", "1.2.3.4.5", "1.2.3.00"):
        assert not pattern.fullmatch(bad), bad


def test_durations_say_something() -> None:
    """
    Each part once and in order, one at least.
    """
    pattern = re.compile(PATTERNS["duration"])
    for good in ("P1Y2M3D", "PT1H", "P1DT12H30M5S", "P3W", "PT0S", "P2M"):
        assert pattern.fullmatch(good), good
    for bad in ("P", "PT", "P1DT", "P1D1Y", "P01D", "1D", "P1W1D", "P99999D"):
        assert not pattern.fullmatch(bad), bad


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_they_take_the_place_of_a_format(name: str) -> None:
    """
    Wherever a schema has it, also where the value may be null; another format stays.
    """
    schema = {"anyOf": [{"type": "string", "format": name}, {"type": ["string", "null"], "format": name}]}
    pattern = json_pattern(PATTERNS[name])

    changed = with_json_patterns(schema)

    assert [pattern, pattern] == [one["pattern"] for one in changed["anyOf"]]
    assert not any("format" in one for one in changed["anyOf"])
    assert {"type": "string", "format": "uuid"} == with_json_patterns({"type": "string", "format": "uuid"})
