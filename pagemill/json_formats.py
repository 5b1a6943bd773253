"""
Formats of strings as patterns of our own, where the library's lets through what is none: a 31st of November, a second
60, an address of 010.
"""

from collections.abc import Mapping

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG_MONTH = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
_SHORT_MONTH = r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
_FEBRUARY = r"02-(?:0[1-9]|1\d|2[0-8])"
_DATE = rf"(?:{_YEAR}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_CLOCK}:[0-5]\d(?:\.\d{{1,6}})?(?:Z|[+\-]{_CLOCK})"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d{2}|[1-9]?\d)"
# of time that programs can hold
_COUNT = r"(?:0|[1-9]\d{0,3})"
_HOURS = rf"T(?:{_COUNT}H(?:{_COUNT}M)?(?:{_COUNT}S)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DAYS = rf"(?:{_COUNT}Y(?:{_COUNT}M)?(?:{_COUNT}D)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"

PATTERNS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_COUNT}W)",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
}
