"""These tests need a GPU, and fail without one: nobody runs them by chance."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    assert torch.cuda.is_available(), "tests/gpu needs a GPU that torch can use"
    return torch.device("cuda", 0)
