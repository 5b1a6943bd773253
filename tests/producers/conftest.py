"""What all tests of producers share."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """Programs that are run within the tests' own process hear signals in their own way."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
