"""What vLLM's builds for CPUs and for GPUs have in common as a contender."""

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.workloads import Request

_RESET_TRIES = 100


class Vllm:
    """
    vllm.LLM, tokens in and tokens out.

    Args:
        name: Before its version.
        environment: What vLLM reads when it is imported; what is set already stays.
        settings: Arguments of vllm.LLM beside those of every comparison.
    """

    def __init__(self, name: str, environment: Mapping[str, str], **settings: Any) -> None:
        for variable, value in environment.items():
            os.environ.setdefault(variable, value)
        # not there in our own environment
        vllm: Any = importlib.import_module("vllm")

        self.name = f"{name} {vllm.__version__}"
        self.llm = vllm.LLM(skip_tokenizer_init=True, seed=0, **settings)
        self._params = vllm.SamplingParams
        self._reset = False

    def reset(self) -> None:
        # it refuses while the last requests are still being let go
        for _ in range(_RESET_TRIES):
            self._reset = bool(self.llm.reset_prefix_cache())
            if self._reset:
                return
            time.sleep(0.01)

    def generate(self, requests: Sequence[Request], run: int) -> list[list[int]]:  # noqa: ARG002
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            self._params(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stats(self) -> dict[str, Any]:
        return {"prefix_cache_reset": self._reset}

    def close(self) -> None:
        """Nothing runs in the background where the engine is in this process."""
