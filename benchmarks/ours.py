"""Pagemill's engine on the cases of a comparison, without a queue."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.contender import serve
from benchmarks.workloads import Request
from engine.config import EngineConfig
from engine.load import load_engine
from engine.request import Request as EngineRequest
from engine.sampling_params import SamplingParams


class Pagemill:
    """The engine with all requests handed over at once, in arrival order."""

    name = "pagemill"

    def __init__(self, config: EngineConfig) -> None:
        self.engine = load_engine(config)
        self._preemptions = 0

    def generate(self, requests: Sequence[Request], run: int) -> list[list[int]]:
        # a salt of its own makes each run's prompts new to the prefix cache
        for index, request in enumerate(requests):
            params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
            prompt = np.asarray(request.prompt, dtype=np.int32)
            self.engine.add(EngineRequest(str(index), prompt, params, cache_salt=f"run {run}"))
        outputs: dict[str, list[int]] = {}
        while self.engine.has_work:
            for finished in self.engine.step().finished:
                outputs[finished.request_id] = list(finished.completions[0].token_ids)
        return [outputs[str(index)] for index in range(len(requests))]

    def stats(self) -> dict[str, Any]:
        before, self._preemptions = self._preemptions, self.engine.stats().num_preemptions
        return {"preemptions": self._preemptions - before, "kv_tokens": self.engine.kv_tokens}

    def close(self) -> None:
        """Nothing runs in the background."""


def configure(
    model: Path, *, dummy: bool, threads: int, max_model_len: int | None, options: Sequence[str] = ()
) -> EngineConfig:
    """The settings of a measurement; `options` are further ones, like "max_num_seqs=32"."""
    load_format: Literal["auto", "dummy"] = "dummy" if dummy else "auto"
    config: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "load_format": load_format,
        "max_model_len": max_model_len,
        "num_threads": threads,
    }
    for option in options:
        name, _, value = option.partition("=")
        config[name] = int(value) if value.isdigit() else value
    return EngineConfig(**config)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    config = configure(
        args.model, dummy=args.dummy, threads=args.threads, max_model_len=args.max_model_len, options=args.set
    )
    return serve(lambda: Pagemill(config))


if __name__ == "__main__":
    raise SystemExit(main())
