"""
Requests for comparing engines on equal terms: token ids in, an exact count of tokens out.

A workload is a list of `Request(prompt, max_tokens)`; the engine ignores ends and generates
exactly `max_tokens`. Standard library only, so that any interpreter can build them; name, n,
seed, vocab and scale decide every token, and `digest` says so in twelve characters that both
sides of a comparison print.

    sharegpt   log-normal lengths, mean 220 in and 200 out, both clipped to 4..1024
    fixed512   512 in, 256 out
    summarize  4096 in, 256 out
    prefix     2048 tokens shared by all and 128 own in, 128 out
    single     128 in, 256 out, one request after another: latency
    batch32    128 in, 256 out, 32 of them: decoding in small batches
    groups     300 groups of 4 that share 700 tokens, 128 own in, 128 out, shuffled
    longtail   lengths as sharegpt, but 5 % of the answers have 4,096 tokens

`python -m benchmarks.workloads` prints each with its digest, `--dump NAME FILE` writes one.
"""

import argparse
import hashlib
import json
import math
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# ids from FIRST_ID to VOCAB are plain text in the vocabularies of Llama 3 and of Qwen2.5
FIRST_ID = 1000
VOCAB = 120_000


class Request(NamedTuple):
    """One prompt, and how many tokens must come out."""

    prompt: list[int]
    max_tokens: int


class Spec(NamedTuple):
    """A workload as it is when nothing is said: requests, seed and token counts at scale 1."""

    num_requests: int
    seed: int
    prompt: int
    output: int
    shared: int = 0
    log_normal: bool = False
    # requests that share one prefix; 0 for all of them
    group: int = 0
    # tokens of the longest answers, and which share of the requests has them
    longest: int = 0
    long_share: float = 0.0


SPECS = {
    "sharegpt": Spec(1000, 11, 220, 200, log_normal=True),
    "fixed512": Spec(1000, 12, 512, 256),
    "summarize": Spec(200, 13, 4096, 256),
    "prefix": Spec(200, 14, 128, 128, shared=2048),
    "single": Spec(4, 15, 128, 256),
    "batch32": Spec(32, 16, 128, 256),
    "groups": Spec(1200, 17, 128, 128, shared=700, group=4),
    "longtail": Spec(1000, 18, 220, 200, log_normal=True, longest=4096, long_share=0.05),
}

# requests of these are sent one after another
SEQUENTIAL = frozenset({"single"})

_PROMPT_SIGMA = 1.1
_OUTPUT_SIGMA = 0.95
_SHORTEST = 4
_LONGEST = 1024


def build(
    name: str, *, n: int | None = None, seed: int | None = None, vocab: int | None = None, scale: float = 1.0
) -> list[Request]:
    """
    Make the requests of a workload, always the same ones for the same arguments.

    Args:
        name: A key of `SPECS`.
        n: Requests; None takes the workload's own count.
        seed: None takes the workload's own; a warm-up uses another.
        vocab: Size of the model's vocabulary; ids stay below it, and below `VOCAB`.
        scale: Multiplies every length.
    """
    spec = SPECS[name]
    rng = random.Random(spec.seed if seed is None else seed)
    count = n or spec.num_requests
    size = min(VOCAB, vocab) if vocab else VOCAB
    if spec.log_normal:
        longest = max(8, int(_LONGEST * scale))
        prompts = _log_normal(rng, count, mean=spec.prompt * scale, sigma=_PROMPT_SIGMA, longest=longest)
        outputs = _log_normal(rng, count, mean=spec.output * scale, sigma=_OUTPUT_SIGMA, longest=longest)
    else:
        prompts = [_scaled(spec.prompt, scale)] * count
        outputs = [_scaled(spec.output, scale)] * count
    for index in _some(rng, count, spec.long_share):
        outputs[index] = _scaled(spec.longest, scale)
    shared = _prefixes(rng, spec, count, scale, size)
    return [
        Request(prefix + _draw_ids(rng, length, size), output)
        for prefix, length, output in zip(shared, prompts, outputs, strict=True)
    ]


def totals(requests: list[Request]) -> dict[str, float]:
    """How many requests and tokens, their means, and the longest."""
    prompts = [len(request.prompt) for request in requests]
    outputs = [request.max_tokens for request in requests]
    return {
        "requests": len(requests),
        "input_tokens": sum(prompts),
        "output_tokens": sum(outputs),
        "mean_in": round(sum(prompts) / len(requests), 1),
        "mean_out": round(sum(outputs) / len(requests), 1),
        "max_in": max(prompts),
        "max_out": max(outputs),
        "max_total": max(len(request.prompt) + request.max_tokens for request in requests),
    }


def digest(requests: list[Request]) -> str:
    """Twelve hex digits that differ when any length or token does."""
    state = hashlib.sha256()
    for request in requests:
        state.update(array("I", [len(request.prompt), request.max_tokens, *request.prompt]).tobytes())
    return state.hexdigest()[:12]


def result_line(
    engine: str, model: str, name: str, requests: list[Request], wall_s: float, produced: int, **extra: Any
) -> dict[str, Any]:
    """
    The fields that every engine prints for a workload.

    Args:
        wall_s: From the first request handed over to the last token, start-up and warm-up left out.
        produced: Output tokens that came; a note is added where they are not those asked for.
        extra: Further fields of the line.
    """
    asked = totals(requests)
    line: dict[str, Any] = {
        "engine": engine,
        "model": model,
        "workload": name,
        "digest": digest(requests),
        "requests": asked["requests"],
        "input_tokens": asked["input_tokens"],
        "output_tokens": produced,
        "wall_s": round(wall_s, 3),
        "output_tok_s": round(produced / wall_s, 1),
        "total_tok_s": round((produced + asked["input_tokens"]) / wall_s, 1),
        "requests_s": round(asked["requests"] / wall_s, 3),
    }
    if produced != asked["output_tokens"]:
        line["note"] = f"expected {asked['output_tokens']} output tokens"
    return line | extra


def _scaled(length: int, scale: float) -> int:
    return max(2, int(length * scale))


def _prefixes(rng: random.Random, spec: Spec, count: int, scale: float, vocab: int) -> list[list[int]]:
    """What each request begins with; those of a group are anywhere among the others."""
    if not spec.shared:
        return [[]] * count
    size = spec.group or count
    kinds = [_draw_ids(rng, _scaled(spec.shared, scale), vocab) for _ in range(-(-count // size))]
    places = _some(rng, count, 1.0) if spec.group else range(count)
    return [kinds[place // size] for place in places]


def _some(rng: random.Random, count: int, share: float) -> list[int]:
    """A share of the numbers below `count`, in random order."""
    if not share:
        return []
    keys = [rng.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)[: round(count * share)]


def _draw_ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    first = min(FIRST_ID, max(1, vocab // 10))
    span = vocab - first
    # random() is the one draw that stays the same in every Python
    return [first + int(rng.random() * span) for _ in range(count)]


def _log_normal(rng: random.Random, count: int, *, mean: float, sigma: float, longest: int) -> list[int]:
    """Log-normal integers, clipped, whose mean is `mean` to within rounding."""
    normal = _standard_normal(rng, count)

    def lengths(mu: float) -> list[int]:
        return [min(longest, max(_SHORTEST, round(math.exp(mu + sigma * value)))) for value in normal]

    # clipping moves the mean, so the place that gives the wanted one is searched
    low, high = 0.0, math.log(longest) + 3.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(lengths(middle)) / count < mean:
            low = middle
        else:
            high = middle
    return lengths(round(high, 4))


def _standard_normal(rng: random.Random, count: int) -> list[float]:
    # Box-Muller by hand: the library's own normal draws may change between versions
    values: list[float] = []
    while len(values) < count:
        radius = math.sqrt(-2.0 * math.log(1.0 - rng.random()))
        angle = 2.0 * math.pi * rng.random()
        values += (radius * math.cos(angle), radius * math.sin(angle))
    return values[:count]


def main(argv: list[str] | None = None, emit: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", nargs=2, metavar=("NAME", "FILE"), help="write one workload as JSON")
    parser.add_argument("--n", type=int, help="requests of each")
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args(argv)
    for name in [args.dump[0]] if args.dump else SPECS:
        requests = build(name, n=args.n, vocab=args.vocab, scale=args.scale)
        if args.dump:
            rows = [{"prompt_token_ids": request.prompt, "max_tokens": request.max_tokens} for request in requests]
            Path(args.dump[1]).write_text(json.dumps(rows))
        emit(json.dumps({"workload": name, "digest": digest(requests), **totals(requests)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
