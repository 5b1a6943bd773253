"""Swaps under overlapped steps: blocks leave for the host and come back while tokens are in flight."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cuda.cascade import CascadeGate
from engine.cuda.model_runner import CudaModelRunner
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.cuda_engine import make_engine
from tests.support.tiny_models import save_tiny_model


@pytest.mark.parametrize(("depth", "fp8"), [(1, False), (2, False), (3, False), (2, True)])
def test_answers_survive_swaps(tmp_path: Path, depth: int, fp8: bool) -> None:
    """
    An engine that runs short of blocks answers as one that has plenty; scales go with blocks of eight bits.
    """
    save_tiny_model("qwen3", tmp_path)
    requests = make_requests(seed=3)
    # where last bits decide roundings, the references compute in float64
    options: dict[str, Any] = {"fp8": fp8, "dtype": torch.float64 if fp8 else torch.float32}
    expected = run_all(make_engine(tmp_path, cuda=False, **options), requests)
    engine = make_engine(tmp_path, cuda=True, depth=depth, mode="swap", num_blocks=40, **options)

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert engine.stats().num_preemptions


def test_who_comes_back_from_the_host_shares_prefixes(tmp_path: Path) -> None:
    """
    Blocks that stayed are shared again, and those that were copied are one's own.
    """
    save_tiny_model("qwen3", tmp_path)
    requests = make_requests(seed=3)
    expected = run_all(make_engine(tmp_path, cuda=False), requests)
    engine = make_engine(tmp_path, cuda=True, mode="swap", num_blocks=40, cascade=CascadeGate(2, 16))
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert engine.stats().num_preemptions
    assert runner.cascade.num_steps
