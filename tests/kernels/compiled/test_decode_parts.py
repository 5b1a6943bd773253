"""What the compiler makes of the kernel that cuts sequences."""

import pytest

from kernels.cuda.decode_parts import _cut_kernel
from tests.support.compile import compile_sm90


@pytest.mark.parametrize(("rows", "num_warps"), [(1, 4), (256, 4), (1024, 8)])
@pytest.mark.parametrize("cascade", [False, True])
def test_spills_nothing(rows: int, num_warps: int, cascade: bool) -> None:
    """
    One program holds the numbers of all sequences.
    """
    signature = dict.fromkeys(("items", "shares", "firsts", "seq_lens"), "*i32")
    signature |= dict.fromkeys(("window", "num_seqs", "num_items", "programs"), "i32")
    fixed = {
        "ROWS": rows,
        "UNIT": 64,
        "MOST": 32,
        "WANTED": 1320,
        "ENOUGH": 528,
        "SHORT": 512,
        "SHIFT": 16,
        "EARLY": True,
    }
    if cascade:
        signature["prefix_rows"] = "*i32"
    else:
        fixed["prefix_rows"] = None

    assert 0 == compile_sm90(_cut_kernel, signature, fixed, num_warps=num_warps).spills
