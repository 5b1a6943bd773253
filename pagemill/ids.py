"""Identifiers that sort by time."""

import os
import time
import uuid


def uuid7() -> str:
    """
    A UUIDv7: 48 bits of Unix milliseconds, then 74 random bits.

    Source: RFC 9562, section 5.7.
    """
    millis = time.time_ns() // 1_000_000
    value = (millis & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))
