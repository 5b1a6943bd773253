"""The kernel that cuts sequences, against its reference."""

from dataclasses import replace

import pytest
import torch

from kernels.cascade_attention import CascadeLayout
from kernels.cuda.decode_parts import cut_sequences_triton
from kernels.decode_parts import cut_sequences_reference, make_parts
from tests.kernels.test_decode_parts import BATCHES
from tests.support.paged import paged_batch
from tests.support.shared import cascaded, share


@pytest.mark.parametrize("seq_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("programs", "window"), [(2, None), (8, 500)])
def test_equals_the_reference(seq_lens: list[int], programs: int, window: int | None) -> None:
    """
    The same items, shares and firsts, whatever stood there before.
    """
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    expected, actual = (make_parts(len(seq_lens), programs, 4, 8, torch.device("cpu")) for _ in range(2))
    actual.items.fill_(7)

    cut_sequences_triton(actual, lengths, window, programs)

    cut_sequences_reference(expected, lengths, window, programs)
    assert expected.items.tolist() == actual.items.tolist()
    assert expected.shares.tolist() == actual.shares.tolist()
    assert expected.firsts.tolist() == actual.firsts.tolist()


def test_what_is_attended_for_all_needs_no_part() -> None:
    """
    A prefix that sequences share does not count.
    """
    batch = paged_batch([1000, 900, 70, 20], num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)
    layout = CascadeLayout(4, 2, 16, 4, 16, 64)
    plan = cascaded(batch.plan(8), layout, share(batch, [([0, 1], 896)]), 16)
    expected, actual = (make_parts(4, 2, 4, 8, torch.device("cpu")) for _ in range(2))

    cut_sequences_triton(actual, plan.seq_lens, None, 2, plan.cascade)

    cut_sequences_reference(expected, plan.seq_lens, None, 2, plan.cascade)
    assert expected.items.tolist() == actual.items.tolist()
    assert [2, 1, 2, 1] == actual.firsts.diff().tolist()
    uncut = replace(plan, cascade=None)
    cut_sequences_triton(actual, uncut.seq_lens, None, 2)
    assert actual.firsts.diff().tolist()[0] > 2
