"""What the compiler makes of the kernels that read and write the host's memory."""

from kernels.cuda.step_state import RING_WARPS, _end_decode, _receive_decode
from tests.support.compile import compile_sm90

BOTH = dict.fromkeys(("row_stride", "num_rows", "num_slots"), "i32") | {"places": "*i32", "slots": "*i32"}


def test_numbers_of_a_step_come_from_the_host_and_no_cache() -> None:
    """
    A slot and a block each thread, both asked for before the first of them is needed; no thread has another's rows.
    """
    signature = BOTH | dict.fromkeys(("ring_numbers", "num_computed", "block_tables", "seq_lens"), "*i32")
    signature |= dict.fromkeys(("last_token", "input_ids", "positions", "slot_mapping"), "*i64")
    signature |= dict.fromkeys(("fresh_start", "max_blocks"), "i32")

    compiled = compile_sm90(_receive_decode, signature, {"BLOCK_SIZE": 16, "BLOCK": 256}, num_warps=RING_WARPS)

    assert (0, 0) == (compiled.spills, compiled.shared)
    accesses = [line for line in compiled.ptx.splitlines() if ".global." in line]
    # behind the place in the ring
    assert [1, 2] == [place for place, line in enumerate(accesses) if "ld.volatile" in line]


def test_tokens_are_written_through_to_the_host() -> None:
    """
    And nothing else is.
    """
    signature = BOTH | dict.fromkeys(("ring_token_ids", "token_ids", "last_token"), "*i64")
    signature |= {"positions": "*i32", "depth": "i32"}

    compiled = compile_sm90(_end_decode, signature, {"BLOCK": 256}, num_warps=RING_WARPS)

    assert (0, 0) == (compiled.spills, compiled.shared)
    assert 1 == compiled.count("st.global.wt")
