"""
Launch configurations of kernels: tables made by benchmarks, never searched for at run time.

`kernels/tuned/<kernel>.json` is a list of rules in ascending order of weight:

    {"when": {"gpu": "NVIDIA H200", "head_dim": 64}, "use": {"tile": 64, "warps": 2}}

A rule whose every "when" holds overrides what came before it; the first has none and is the default.
"""

import functools
import json
from pathlib import Path

import torch

# of a step whose products have kernels of ours, which start before the one ahead has ended (kernels/cuda/early.py)
SMALL_STEP_ROWS = 64

TABLES = Path(__file__).with_name("tuned")


@functools.cache
def tuned(kernel: str, **key: int | str) -> dict[str, int]:
    """
    The configuration of a kernel for a key, on the GPU at hand.

    Args:
        kernel: Names its table.
        key: What rules may ask for, like head_dim=128; "gpu" is added.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    facts = {"gpu": gpu, **key}
    config: dict[str, int] = {}
    for rule in json.loads((TABLES / f"{kernel}.json").read_text(encoding="utf-8")):
        if rule["when"].items() <= facts.items():
            config |= rule["use"]
    return config
