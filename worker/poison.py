"""
Deaths that a prompt can ask for: how the fake engine shows what a real one may do to its process.

A prompt says "poison:" and one of the words of DEATHS. Only an engine that was set to heed it does.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable

from engine.errors import DeviceFull, DeviceLost


def _segv() -> None:
    ctypes.string_at(0)


def _exit() -> None:
    # as some libraries do; the code of a worker that could not start
    os._exit(1)


def _raise() -> None:
    raise RuntimeError("poison: a fault in a step")


def _hang() -> None:
    while True:
        time.sleep(60)


def _freeze() -> None:
    # with the interpreter lock, which no other thread gets any more
    ctypes.PyDLL(None).sleep(3600)


def _oom() -> None:
    raise DeviceFull("poison: the device is out of memory")


def _cuda() -> None:
    raise DeviceLost("poison: CUDA error: an illegal memory access was encountered")


DEATHS: dict[str, Callable[[], None]] = {
    "segv": _segv,
    "exit": _exit,
    "raise": _raise,
    "hang": _hang,
    "freeze": _freeze,
    "oom": _oom,
    "cuda": _cuda,
}

_POISON = re.compile(rb"poison:(%s)" % b"|".join(word.encode() for word in DEATHS))


def take_effect(prompt: bytes) -> None:
    """Die as the prompt says; nothing happens where it says nothing."""
    found = _POISON.search(prompt)
    if found is not None:
        DEATHS[found.group(1).decode()]()
