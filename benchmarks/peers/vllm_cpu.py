"""
vLLM's CPU build on the cases of a comparison, in the interpreter that has it installed.

Its pins differ from ours, so it lives in an environment of its own (benchmarks/README.md says
how to make one); `python -m benchmarks.offline --peer vllm --peer-python PATH` starts this there.
"""

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contender import serve
from benchmarks.workloads import Request

# one process; two threads that are not tied to cores; 2 GiB of KV cache, as ours
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
}


class Vllm:
    """vllm.LLM, tokens in and tokens out."""

    def __init__(self, args: argparse.Namespace) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        # it reads them when imported, and is not there in our own environment
        vllm: Any = importlib.import_module("vllm")

        self.name = f"vllm-cpu {vllm.__version__}"
        self._params = vllm.SamplingParams
        self._reset = False
        self._llm = vllm.LLM(
            model=str(args.model),
            dtype="float32",
            load_format="dummy" if args.dummy else "auto",
            max_model_len=args.max_model_len,
            enforce_eager=not args.compile,
            skip_tokenizer_init=True,
            seed=0,
        )

    def reset(self) -> None:
        self._reset = bool(self._llm.reset_prefix_cache())

    def generate(self, requests: Sequence[Request], run: int) -> list[list[int]]:  # noqa: ARG002
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            self._params(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stats(self) -> dict[str, Any]:
        return {"prefix_cache_reset": self._reset}

    def close(self) -> None:
        """Nothing runs in the background."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager")
    args = parser.parse_args(argv)
    return serve(lambda: Vllm(args))


if __name__ == "__main__":
    raise SystemExit(main())
