"""
What a decode step's matrix products cost on this CPU, beside the reading of as much memory.

    python -m benchmarks.products

One JSON line: the best of several sweeps over all weights of the SmolLM2-135M shape, by rows.
"""

import json
import time
from collections.abc import Callable

import torch

from benchmarks.shapes import SHAPES
from kernels.linear import linear, pack_weight

_SWEEPS = 7


def _best_s(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_SWEEPS):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


@torch.inference_mode()
def main() -> None:
    shape = SHAPES["smollm2-135m"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_dim = hidden // shape["num_attention_heads"]
    qkv = hidden + 2 * shape["num_key_value_heads"] * head_dim
    sizes = [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * shape["num_hidden_layers"]
    sizes.append((shape["vocab_size"], hidden))
    num_bytes = sum(4 * rows * columns for rows, columns in sizes)
    memory = torch.ones(num_bytes // 4)
    read_s = _best_s(memory.sum)
    weights = [pack_weight(torch.randn(size)) for size in sizes]
    products_ms = {}
    for rows in (1, 2, 4, 8, 32):
        inputs = {columns: torch.randn(rows, columns) for columns in (hidden, inner)}
        pairs = [(inputs[columns], weight) for (_, columns), weight in zip(sizes, weights, strict=True)]
        products_ms[rows] = round(1e3 * _best_s(lambda pairs=pairs: [linear(x, weight) for x, weight in pairs]), 1)
    line = {"products": "smollm2-135m", "weight_mb": num_bytes // 10**6, "threads": torch.get_num_threads()}
    print(json.dumps(line | {"read_ms": round(1e3 * read_s, 1), "products_ms": products_ms}))


if __name__ == "__main__":
    main()
