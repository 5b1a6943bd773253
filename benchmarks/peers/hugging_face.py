"""
transformers on the cases of a comparison, in one of its two ways.

    static      `generate` over left-padded batches in arrival order; a batch runs until its
                longest request is done, and only the tokens asked for are counted
    continuous  its continuous batching manager, each request with its own max_new_tokens
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.contender import serve
from benchmarks.workloads import Request


def load_model(folder: Path, *, dummy: bool, threads: int) -> Any:
    """The model in float32 with no end of sequence: every answer gets its full length."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    if dummy:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.eval()


class Static:
    """Padded batches, one after another."""

    def __init__(self, model: Any, batch_size: int) -> None:
        self.name = f"transformers {transformers.__version__} static"
        self.model = model
        self.batch_size = batch_size
        self._computed = 0

    def reset(self) -> None:
        """Nothing is kept between runs."""

    def generate(self, requests: Sequence[Request], run: int) -> list[list[int]]:  # noqa: ARG002
        outputs: list[list[int]] = []
        self._computed = 0
        for start in range(0, len(requests), self.batch_size):
            outputs += self._batch(requests[start : start + self.batch_size])
        return outputs

    @torch.inference_mode()
    def _batch(self, batch: Sequence[Request]) -> list[list[int]]:
        longest = max(len(request.prompt) for request in batch)
        most = max(request.max_tokens for request in batch)
        input_ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(batch):
            input_ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        tokens = self.model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=most)
        self._computed += len(batch) * most
        return [tokens[row, longest : longest + request.max_tokens].tolist() for row, request in enumerate(batch)]

    def stats(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "computed_tokens": self._computed}

    def close(self) -> None:
        """Nothing runs in the background."""


class Continuous:
    """The manager behind generate_batch, started once; blocks are not shared between requests or runs."""

    def __init__(self, model: Any, num_blocks: int, max_batch_tokens: int) -> None:
        self.name = f"transformers {transformers.__version__} continuous"
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        # left to itself it takes nine tenths of the free memory
        self.settings = {"num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
        self._manager = model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False, seed=0, **self.settings),
        )
        self._manager.start()

    def reset(self) -> None:
        """Nothing is kept between runs."""

    def generate(self, requests: Sequence[Request], run: int) -> list[list[int]]:
        for index, request in enumerate(requests):
            self._manager.add_request(
                list(request.prompt),
                request_id=f"{run}.{index}",
                max_new_tokens=request.max_tokens,
                eos_token_id=-1,
            )
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(requests):
            result = self._manager.get_result(timeout=0.5)
            if result is None and not self._manager.is_running():
                raise RuntimeError(f"its thread ended: {self._manager.background_thread_status.fatal_error!r}")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(str(result.error))
                outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[f"{run}.{index}"] for index in range(len(requests))]

    def stats(self) -> dict[str, Any]:
        return dict(self.settings)

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)


def load(args: argparse.Namespace) -> Static | Continuous:
    model = load_model(args.model, dummy=args.dummy, threads=args.threads)
    if args.mode == "static":
        return Static(model, args.batch_size)
    return Continuous(model, args.num_blocks, args.max_batch_tokens)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", choices=["static", "continuous"], default="static")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-blocks", type=int, default=128, help="of 256 tokens each")
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    args = parser.parse_args(argv)
    return serve(lambda: load(args))


if __name__ == "__main__":
    raise SystemExit(main())
