"""What decode attention is configured by."""

import functools
from collections.abc import Mapping

import torch

from kernels.configs import SMALL_STEP_ROWS, tuned


@functools.cache
def attention_key(head_dim: int, group_size: int, dtype: torch.dtype, num_seqs: int) -> Mapping[str, int | str]:
    """
    What rules in `tuned/decode_attention.json` may ask for.

    Args:
        group_size: Query heads of a KV head.
        dtype: Of the cache.
    """
    name = str(dtype).removeprefix("torch.")
    return {"head_dim": head_dim, "group_size": group_size, "dtype": name, "few": int(num_seqs <= SMALL_STEP_ROWS)}


def decode_config(head_dim: int, group_size: int, dtype: torch.dtype, num_seqs: int) -> dict[str, int]:
    """The configuration; small batches have as many "heads" in a program as others, as parts are counted alike."""
    return tuned("decode_attention", **attention_key(head_dim, group_size, dtype, num_seqs))
