"""Memory that was freed goes back to the system."""

import os
import subprocess
import sys

import pytest

from worker.heap import give_back_free

CHECK = """
from worker.heap import give_back_free

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

# too large for Python's own pools; the last lives on, above all others
pieces = [bytes(700) for _ in range(100_000)]
full = resident()
del pieces[:-1]
freed = resident()
assert give_back_free()
print(full - freed, full - resident())
"""


@pytest.mark.skipif(not give_back_free(), reason="this C library keeps what is free")
def test_what_lies_free_below_what_lives_goes_back() -> None:
    """
    70 MB of pieces under one that lives stay resident until they are given back.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=env, check=True)
    before, after = map(int, done.stdout.split())

    assert before < 10_000_000 < 60_000_000 < after
