"""Answers for those that wait on the event loop."""

import asyncio
from typing import Any


def settle(future: "asyncio.Future[Any]", result: object = None, error: Exception | None = None) -> None:
    """Answer whoever waits; they may have been cancelled meanwhile."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
