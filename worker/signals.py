"""What signals do to a worker process."""

import asyncio
import signal
from types import FrameType

from worker.lifeline import HURRY_SIGNAL, STOP_SIGNALS, Lifeline
from worker.service import Service


def heed_signals(service: Service, lifeline: Lifeline | None) -> None:
    """
    Have signals stop a service; without a supervisor the second one hurries it.

    A supervised worker is told by SIGTERM to drain, and by another signal to hurry. It hurries at once
    where its supervisor is gone: who starts the next one wants the device.
    """
    loop = asyncio.get_running_loop()

    def heed(number: int, _frame: FrameType | None) -> None:
        if lifeline is None:
            loop.call_soon_threadsafe(service.stop)
        elif number == HURRY_SIGNAL or lifeline.orphaned:
            loop.call_soon_threadsafe(service.hurry)
        else:
            loop.call_soon_threadsafe(service.drain)

    # not the loop's own handlers: these go with the loop, and a late signal would then kill us on the way out
    for number in (*STOP_SIGNALS, HURRY_SIGNAL):
        signal.signal(number, heed)


def ignore_signals() -> None:
    """Heed none of them any more, on the way out."""
    for number in (*STOP_SIGNALS, HURRY_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
