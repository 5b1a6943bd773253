"""The kernel changes the tokens that were seen, as the reference does, and writes no other."""

import pytest
import torch

from kernels.cuda import penalties
from kernels.cuda.penalties import apply_penalties_triton
from kernels.penalties import apply_penalties_reference
from tests.support.numerics import assert_near


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_penalties_are_those_of_the_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Named rows of a wider matrix change by the formulas; other rows, padding and unseen tokens stay.
    """
    monkeypatch.setattr(penalties, "BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    wide = (torch.randn(5, 220, generator=generator) * 3).to(dtype)
    expected = wide.double()
    in_prompt = torch.rand(7, 200, generator=generator) < 0.2
    counts = torch.randint(-6, 5, (7, 200), generator=generator, dtype=torch.int32).clamp(min=0)
    rows, slots = torch.tensor([3, 0, 4]), torch.tensor([6, 2, 0])
    strengths = torch.tensor([[1.25, 0.5, -0.25], [0.5, 0.0, 1.0], [1.0, -2.0, 0.0]])
    apply_penalties_reference(expected[:, :200], rows, slots, in_prompt, counts, strengths)
    before = wide.clone()

    apply_penalties_triton(wide[:, :200], rows, slots, in_prompt, counts, strengths)

    assert_near(expected, wide)
    seen = torch.zeros_like(wide, dtype=torch.bool)
    seen[rows, :200] = in_prompt[slots] | (counts[slots] > 0)
    assert torch.equal(before[~seen], wide[~seen])


def test_no_rows_are_fine() -> None:
    """
    With nothing to penalise nothing happens.
    """
    none = torch.zeros(0, dtype=torch.int64)
    logits = torch.ones(2, 8)

    apply_penalties_triton(
        logits, none, none, torch.zeros(1, 8, dtype=torch.bool), torch.zeros(1, 8, dtype=torch.int32), torch.ones(0, 3)
    )

    assert torch.equal(torch.ones(2, 8), logits)
