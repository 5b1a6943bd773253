"""
What keys and values in eight bits cost in accuracy: a real model over the texts of examples/documents.

    python -m benchmarks.kv_perplexity --model smollm2

Two engines that differ in `kv_cache_dtype` alone read the same texts: each by itself, and all in one
prompt, which is read in pieces behind what the cache holds of it. One JSON line for each dtype and way:
the tokens that were predicted and their perplexity; of fp8 also its ratio to the other, the largest
difference between two logits beside the largest logit, the mean of all, and the share of places at
which the same token is the likeliest. What a decode attends is what was stored too, so that answers
are as accurate as the prompts here.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu import emitter
from benchmarks.model import find_model
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.llm_engine import LLMEngine
from engine.load import load_engine
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

DOCUMENTS = Path(__file__).resolve().parent.parent / "examples" / "documents"
# both engines are there at once
KV_CACHE_BYTES = 1 << 30

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Reading:
    """
    What an engine says to a prompt.

    Args:
        logprobs: [num_tokens - 1], of each token but the first.
        logits: [num_tokens - 1, vocab_size] float32, where they were taken from.
    """

    logprobs: list[float]
    logits: Tensor


class Reader:
    """An engine whose logits are kept while it reads."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine: LLMEngine = load_engine(config)
        self._kept: list[Tensor] = []
        runner: Any = self.engine._runner
        compute = runner.model.logits

        def keep(hidden: Tensor) -> Tensor:
            logits: Tensor = compute(hidden)
            self._kept.append(logits.float().cpu())
            return logits

        runner.model.logits = keep

    def read(self, prompt: Tokens) -> Reading:
        """Read one prompt, of which nothing is in the cache."""
        self.engine.reset_prefix_cache()
        self._kept.clear()
        output = self.engine.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        logprobs = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
        # the last row is that of the answer
        return Reading(logprobs, torch.cat(self._kept)[: len(prompt) - 1])


@dataclass(slots=True)
class Tally:
    """What was seen of pairs of readings: sums, until `lines` divides them."""

    num_tokens: int = 0
    num_logits: int = 0
    num_same: int = 0
    loss: float = 0.0
    loss_fp8: float = 0.0
    largest_logit: float = 0.0
    largest_difference: float = 0.0
    differences: float = 0.0

    def add(self, wide: Reading, fp8: Reading) -> None:
        """Count the readings of one prompt."""
        self.num_tokens += len(wide.logprobs)
        self.num_logits += wide.logits.numel()
        self.num_same += int((wide.logits.argmax(-1) == fp8.logits.argmax(-1)).sum())
        self.loss -= sum(wide.logprobs)
        self.loss_fp8 -= sum(fp8.logprobs)
        difference = (wide.logits - fp8.logits).abs_()
        self.largest_logit = max(self.largest_logit, float(wide.logits.abs().max()))
        self.largest_difference = max(self.largest_difference, float(difference.max()))
        self.differences += float(difference.sum(dtype=torch.float64))

    def lines(self, dtype: str) -> Iterator[dict[str, Any]]:
        """That of the activations' dtype, then that of fp8."""
        wide, fp8 = (math.exp(loss / self.num_tokens) for loss in (self.loss, self.loss_fp8))
        yield {"kv_cache": dtype, "tokens": self.num_tokens, "perplexity": round(wide, 4)}
        yield {
            "kv_cache": "fp8",
            "tokens": self.num_tokens,
            "perplexity": round(fp8, 4),
            "ratio": round(fp8 / wide, 5),
            "largest_logit_difference": round(self.largest_difference, 3),
            "largest_logit": round(self.largest_logit, 1),
            "mean_logit_difference": round(self.differences / self.num_logits, 4),
            "same_likeliest": round(self.num_same / self.num_tokens, 4),
        }


def compare(config: dict[str, Any], ways: dict[str, list[Tokens]]) -> Iterator[dict[str, Any]]:
    """
    Read every way's prompts with both engines.

    Args:
        config: Settings of both.
    """
    wide, fp8 = (Reader(EngineConfig(**config, kv_cache_dtype=dtype)) for dtype in ("auto", "fp8"))
    runner: Any = wide.engine._runner
    dtype = str(runner.model.dtype).removeprefix("torch.")
    for way, prompts in ways.items():
        tally = Tally()
        for prompt in prompts:
            tally.add(wide.read(prompt), fp8.read(prompt))
        for line in tally.lines(dtype):
            yield {"prompts": way, "computed": dtype} | line


def make_prompts(tokenizer: Tokenizer, texts: Sequence[str], max_model_len: int) -> dict[str, list[Tokens]]:
    """Each text by itself, and all of them in one prompt, in the order of their names."""
    joined = tokenizer.encode("\n\n".join(texts))
    return {"each text": [tokenizer.encode(text) for text in texts], "all in one": [joined[: max_model_len - 1]]}


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(args.texts.glob("*.txt"))]
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(args.model, Path(scratch))
        prompts = make_prompts(Tokenizer(model.folder), texts, args.max_model_len)
        config = {
            "model": model.folder,
            "device": args.device,
            "dtype": args.dtype,
            "max_model_len": args.max_model_len,
            "kv_cache_bytes": KV_CACHE_BYTES,
            "preemption": "recompute",
            "num_threads": args.threads,
        }
        for line in compare(config, prompts):
            yield {"model": model.name, "device": args.device} | line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="with weights: a folder, or what a worker takes")
    parser.add_argument("--texts", type=Path, default=DOCUMENTS, help="a folder of .txt files")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", help="what both compute in")
    parser.add_argument("--max-model-len", type=int, default=4096, help="where the joined texts are cut off")
    parser.add_argument("--threads", type=int, help="of the CPU backend")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    emit = emitter(args.out)
    try:
        for line in run(args):
            emit(line)
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
