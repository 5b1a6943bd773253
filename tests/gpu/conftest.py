"""These tests need a GPU, and fail without one: nobody runs them by chance."""

import os

import pytest
import torch

# workers side by side compare with a CPU's engine each: threads of all of them would wait for one another
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    assert torch.cuda.is_available(), "tests/gpu needs a GPU that torch can use"
    return torch.device("cuda", 0)
