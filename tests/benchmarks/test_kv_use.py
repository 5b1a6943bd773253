"""The KV pool is full of tokens while jobs wait."""

import pytest

from benchmarks import kv_use, workloads


@pytest.mark.parametrize("swap_tokens", [0, 8192])
def test_the_pool_is_used_while_jobs_wait(swap_tokens: int) -> None:
    """
    On sharegpt lengths, over 90 % of the blocks are in use and under 4 % of their slots empty.
    """
    requests = workloads.build("sharegpt", n=200)

    line = kv_use.run(requests, pool_tokens=16384, block_size=16, swap_tokens=swap_tokens)

    assert line["use"] > 0.90
    assert line["waste"] < 0.04
    assert line["steps_while_jobs_wait"] > 300
