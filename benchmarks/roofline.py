"""
The physical limit of a GPU for a model and a list of requests, step by step.

A lower bound on time, so nothing reaches it: each step costs its matrix products, the larger of
their arithmetic and of reading the weights once, and its attention, the larger of arithmetic and
of reading the KV cache. Norms, rotary embeddings, sampling, launches and the host cost nothing.

    python -m benchmarks.roofline llama-3.1-8b
    python -m benchmarks.roofline llama-3.1-8b --fp8 --workloads sharegpt,fixed512

One JSON line a workload; divide a measured output_tok_s by the limit's. Mixtures of experts are
not modelled. Seconds, bytes and floating-point operations throughout; a multiply-add is two.
"""

import argparse
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import shapes, workloads
from benchmarks.workloads import Request


@dataclass(frozen=True, slots=True)
class Hardware:
    """
    What one GPU can do in a second.

    Args:
        matrix: Operations of large bf16 products.
        matrix_fp8: The same in fp8.
        attention: Operations of causal prefill attention.
        read: Bytes from memory.
    """

    matrix: float
    matrix_fp8: float
    attention: float
    read: float


# bf16 and read measured on the card (8192^3 product of random data, device copy); 989e12 on the
# data sheet. fp8 and attention are assumed from it: 1.78 times bf16, and FlashAttention 3's best
H200 = Hardware(matrix=790e12, matrix_fp8=1400e12, attention=550e12, read=4.3e12)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense decoder that decide what a step costs."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """Read a Hugging Face config."""
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
        )

    @property
    def linear_params(self) -> int:
        """Weights of all layers' products, the head left out."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    def kv_elements(self, tokens: int) -> int:
        """Elements of the KV cache of that many tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens

    def attention_operations(self, pairs: float) -> float:
        """Operations for that many (query, key) pairs, in all layers and heads."""
        return 4 * self.layers * self.heads * self.head_dim * pairs


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a weight and of a KV element, and whether the products run in fp8."""

    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    fp8: bool = False


BF16 = Precision()
# scales of keys and values are left out: a bound may be too low
FP8_KV = Precision(kv_bytes=1.0)
FP8 = Precision(weight_bytes=1.0, kv_bytes=1.0, fp8=True)

_ACTIVATION_BYTES = 2.0
_HEAD_BYTES = 2.0
_LOGIT_BYTES = 4.0


def linear_s(shape: Shape, tokens: int, rows: int, precision: Precision, gpu: Hardware = H200) -> float:
    """Seconds of all matrix products of a step over `tokens` tokens, of which `rows` get logits."""
    operations = 2 * tokens * shape.linear_params + 2 * rows * shape.head_params
    # each product reads its input and writes its output once
    moved = shape.linear_params * precision.weight_bytes
    moved += tokens * shape.layers * _ACTIVATION_BYTES * (4 * shape.hidden + 3 * shape.intermediate)
    if rows:
        moved += shape.head_params * _HEAD_BYTES + rows * shape.vocab * _LOGIT_BYTES
    peak = gpu.matrix_fp8 if precision.fp8 else gpu.matrix
    return max(operations / peak, moved / gpu.read)


def decode_attention_s(shape: Shape, context: int, precision: Precision, gpu: Hardware = H200) -> float:
    """Seconds for queries of one token each over `context` cached tokens in all."""
    read = shape.kv_elements(context) * precision.kv_bytes / gpu.read
    return max(read, shape.attention_operations(context) / gpu.matrix)


def prefill_attention_s(shape: Shape, new: int, cached: int, gpu: Hardware = H200) -> float:
    """Seconds for `new` prompt tokens, causal, after `cached` ones."""
    return shape.attention_operations(new * cached + new * (new + 1) / 2) / gpu.attention


def limit(
    requests: Sequence[Request],
    shape: Shape,
    precision: Precision = BF16,
    *,
    gpu: Hardware = H200,
    max_batch: int = 1024,
    token_budget: int = 8192,
    shared_prefix: int = 0,
) -> dict[str, float]:
    """
    The least time for these very requests, with the tail of the last ones.

    Args:
        requests: Admitted in this order, as early as `max_batch` and `token_budget` allow.
        shared_prefix: Leading tokens that prompts share where they are equal: computed once, and
            read once a step for all that run.
    """
    prefixes: dict[tuple[int, ...], int] = {}
    waiting = deque(
        (request, prefixes.setdefault(tuple(request.prompt[:shared_prefix]), len(prefixes))) for request in requests
    )
    # context, tokens to go and prefix of each request that decodes
    running: list[tuple[int, int, int]] = []
    wall_s, num_steps, known = 0.0, 0, set[int]()
    while waiting or running:
        fresh: list[tuple[Request, int]] = []
        starting: list[tuple[int, int, int]] = []
        prompt_tokens = 0
        while waiting and len(running) + len(fresh) < max_batch:
            request, prefix = waiting[0]
            new = len(request.prompt) - (shared_prefix if prefix in known else 0)
            if fresh and prompt_tokens + new > token_budget:
                break
            waiting.popleft()
            known.add(prefix)
            fresh.append((request, new))
            starting.append((len(request.prompt), request.max_tokens, prefix))
            prompt_tokens += new
        wall_s += linear_s(shape, len(running) + prompt_tokens, len(running) + len(fresh), precision, gpu)
        if running:
            context = sum(length - shared_prefix for length, _, _ in running)
            context += shared_prefix * len({prefix for _, _, prefix in running})
            wall_s += decode_attention_s(shape, context, precision, gpu)
        wall_s += sum(prefill_attention_s(shape, new, len(one.prompt) - new, gpu) for one, new in fresh)
        running = [(length + 1, left - 1, prefix) for length, left, prefix in running + starting if left > 1]
        num_steps += 1
    output = sum(request.max_tokens for request in requests)
    return {"wall_s": wall_s, "output_tok_s": output / wall_s, "steps": num_steps}


def limit_of(
    name: str, requests: Sequence[Request], shape: Shape, precision: Precision, *, scale: float = 1.0
) -> dict[str, float]:
    """The limit of a workload, made at `scale`, the way its requests are sent: at once, or one after another."""
    if name in workloads.SEQUENTIAL:
        return limit(requests, shape, precision, max_batch=1)
    return limit(requests, shape, precision, shared_prefix=int(workloads.SPECS[name].shared * scale))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(shapes.SHAPES))
    parser.add_argument("--workloads", default=",".join(workloads.SPECS))
    parser.add_argument("--fp8", action="store_true", help="fp8 weights, products and KV cache")
    parser.add_argument("--fp8-kv", action="store_true", help="the KV cache in fp8, all else in bf16")
    args = parser.parse_args(argv)
    config = shapes.SHAPES[args.shape]
    precision = FP8 if args.fp8 else FP8_KV if args.fp8_kv else BF16
    for name in args.workloads.split(","):
        requests = workloads.build(name, vocab=config["vocab_size"])
        found = limit_of(name, requests, Shape.of(config), precision)
        line = {"limit": "H200", "model": args.shape, "fp8": args.fp8, "fp8_kv": precision.kv_bytes == 1.0}
        line |= {"workload": name}
        line |= {"digest": workloads.digest(requests), "wall_s": round(found["wall_s"], 3)}
        print(json.dumps(line | {"output_tok_s": round(found["output_tok_s"]), "steps": found["steps"]}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
