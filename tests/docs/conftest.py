"""What tests of pages need."""

import socket
from contextlib import ExitStack

import pytest


@pytest.fixture
def free_ports() -> tuple[str, str]:
    """Two that nobody has, in place of those that the pages name."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(2)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        first, second = (str(probe.getsockname()[1]) for probe in probes)
        return first, second
