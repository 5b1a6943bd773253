"""Kernels under the interpreter are left to it."""

import pytest
import torch

from kernels.cuda import launching
from kernels.cuda.rms_norm import rms_norm_triton
from tests.support.elementwise import EPS, cut_off, normed
from tests.support.numerics import assert_near


def test_the_interpreter_runs_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    On a machine with a GPU too: nothing is remembered.
    """
    monkeypatch.setattr(launching, "_current_device", lambda: 0)
    monkeypatch.setattr(launching, "_current_stream", lambda _device: 0)
    monkeypatch.setattr(launching, "_entries", {})

    for seed in range(3):
        torch.manual_seed(seed)
        x, weight = torch.randn(3, 64), torch.rand(64)
        assert_near(normed(x, weight), rms_norm_triton(x, weight, EPS), cut_off(torch.float32, 2))

    assert {} == launching._entries
