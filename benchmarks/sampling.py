"""
Time of sampling on the GPU at hand, from a replayed CUDA graph, beside torch's argmax and sort.

    python -m benchmarks.sampling
    python -m benchmarks.sampling --rows 256 --vocabs 128256 --set FILTER_WARPS=32 STAGES=1

One JSON line a case: microseconds, and the share of the time that one read of the logits would
take at the memory's copy rate. Logits are bf16 noise times 3, so the distribution is flat: top-p
alone keeps some 10,000 tokens and is searched for in the row, which real models seldom need.
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.device_time import replayed_s
from benchmarks.roofline import H200
from kernels.cuda import argmax as argmax_module
from kernels.cuda import sampling as sampling_module
from kernels.logprobs import token_logprobs
from kernels.sampling import argmax, sample_slots

LAUNCHES, REPLAYS = 20, 5

# temperature, top-k, top-p
CASES = {
    "temperature": (1.0, 0, 1.0),
    "top_k": (1.0, 50, 1.0),
    "top_k_top_p": (1.0, 50, 0.9),
    "sharp_top_p": (0.25, 0, 0.9),
    "flat_top_p": (1.0, 0, 0.9),
}


def _slot_inputs(rows: int, heat: float, top_k: int, top_p: float) -> tuple[Tensor, ...]:
    knobs = torch.tensor([heat, top_p, 0.0, 1.0, 0.0, 0.0]).repeat(rows, 1).cuda()
    top_ks = torch.full((rows,), top_k, dtype=torch.int32, device="cuda")
    streams = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32, device="cuda")
    places = torch.arange(rows, dtype=torch.int32, device="cuda")
    return places, knobs, top_ks, streams, places


def works(logits: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed on one matrix of logits, by name."""
    rows = len(logits)
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    named: dict[str, Callable[[], object]] = {"greedy": lambda: argmax(logits)}
    for name, options in CASES.items():
        inputs = _slot_inputs(rows, *options)
        named[name] = lambda inputs=inputs: sample_slots(logits, *inputs)  # type: ignore[misc]
    named["logprobs_20"] = lambda: token_logprobs(logits, tokens, 20)
    named["torch_argmax"] = lambda: logits.argmax(dim=-1)
    if rows <= 256:
        # more would take gigabytes
        named["torch_sort"] = lambda: logits.sort(dim=-1, descending=True)
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--vocabs", type=int, nargs="+", default=[128_256, 151_936])
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=NUMBER", help="constants of kernels/cuda/sampling"
    )
    parser.add_argument("--set-argmax", nargs="+", default=[], metavar="NAME=NUMBER", help="of kernels/cuda/argmax")
    options = parser.parse_args()
    for module, changes in ((sampling_module, options.set), (argmax_module, options.set_argmax)):
        for change in changes:
            name, _, number = change.partition("=")
            assert hasattr(module, name), f"{module.__name__} has no {name}"
            setattr(module, name, int(number))

    for vocab in options.vocabs:
        for rows in options.rows:
            logits = (torch.randn(rows, vocab, device="cuda") * 3).bfloat16()
            for name, work in works(logits).items():
                us = 1e6 * replayed_s(work, REPLAYS, LAUNCHES)
                of_read = logits.nbytes / H200.read * 1e6 / us
                facts = {"rows": rows, "vocab": vocab, "us": round(us, 1), "of_read_rate": round(of_read, 3)}
                print(json.dumps({"case": name, **facts}), flush=True)


if __name__ == "__main__":
    main()
