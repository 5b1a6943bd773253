"""Pagemill's engine on the cases of a comparison, without a queue."""

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.contender import serve
from benchmarks.workloads import Request
from engine.config import EngineConfig
from engine.load import load_engine
from engine.request import BULK
from engine.request import Request as EngineRequest
from engine.sampling_params import SamplingParams


class Pagemill:
    """The engine with all requests handed over at once, in arrival order."""

    name = "pagemill"

    def __init__(self, config: EngineConfig) -> None:
        self.engine = load_engine(config)
        self._token_budget = config.max_num_batched_tokens
        # as the worker does
        gc.collect()
        gc.freeze()
        self._before = self.engine.stats()

    def reset(self) -> None:
        self.engine.reset_prefix_cache()
        self._before = self.engine.stats()

    def generate(self, requests: Sequence[Request], run: int) -> list[list[int]]:  # noqa: ARG002
        for index, request in enumerate(requests):
            self.engine.add(engine_request(str(index), request))
        outputs: dict[str, list[int]] = {}
        while self.engine.has_work:
            for finished in self.engine.step().finished:
                outputs[finished.request_id] = list(finished.completions[0].token_ids)
        return [outputs[str(index)] for index in range(len(requests))]

    def stats(self) -> dict[str, Any]:
        now, before = self.engine.stats(), self._before
        stats: dict[str, Any] = {
            "steps": now.num_steps - before.num_steps,
            "preemptions": now.num_preemptions - before.num_preemptions,
            "prefix_hit_tokens": now.prefix_hit_tokens - before.prefix_hit_tokens,
            "kv_tokens": self.engine.kv_tokens,
        }
        # 0 where CUDA was never started, which asking does not do
        if torch.cuda.memory_allocated():
            stats |= {"gpu": torch.cuda.get_device_name(), "max_num_batched_tokens": self._token_budget}
        return stats

    def close(self) -> None:
        """Nothing runs in the background."""


def engine_request(request_id: str, request: Request) -> EngineRequest:
    """A benchmark's request as the engine takes it: greedy, of exact length, and nobody waits for it."""
    params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
    return EngineRequest(request_id, np.asarray(request.prompt, dtype=np.int32), params, priority=BULK)


def configure(
    model: Path, *, dummy: bool, threads: int | None, max_model_len: int | None, options: Sequence[str] = ()
) -> EngineConfig:
    """The settings of a measurement; `options` are further ones, like "max_num_seqs=32", the last of a name counts."""
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
        config[name] = _parse(value)
    return EngineConfig(**config)


def _parse(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    config = configure(
        args.model, dummy=args.dummy, threads=args.threads, max_model_len=args.max_model_len, options=args.set
    )
    return serve(lambda: Pagemill(config))


if __name__ == "__main__":
    raise SystemExit(main())
