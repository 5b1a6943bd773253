"""
vLLM's CUDA build on the cases of a comparison.

Where it is no part of the environment, `--peer-path` of `benchmarks.gpu` names a folder that
holds it; the folder is on the path of this process alone.
"""

import argparse
import importlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contender import serve
from benchmarks.workloads import Request

_SETTINGS = {
    # offline and quiet
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # installations cut to what a dense model on Hopper needs have neither of these
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # no NVLink multicast: hosts may be shared
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}

_RESET_TRIES = 100


class Vllm:
    """vllm.LLM, tokens in and tokens out, with the engine in a process of its own as it is by default."""

    def __init__(self, args: argparse.Namespace) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        # it reads them when imported
        vllm: Any = importlib.import_module("vllm")

        self.name = f"vllm {vllm.__version__}"
        self._params = vllm.SamplingParams
        self._reset = False
        settings: dict[str, Any] = {
            "model": str(args.model),
            "dtype": args.dtype,
            "load_format": "dummy" if args.dummy else "auto",
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "seed": 0,
        }
        for option in args.set:
            name, _, value = option.partition("=")
            settings[name] = json.loads(value)
        self._llm = vllm.LLM(**settings)

    def reset(self) -> None:
        # it refuses while the last requests are still being let go
        for _ in range(_RESET_TRIES):
            self._reset = bool(self._llm.reset_prefix_cache())
            if self._reset:
                return
            time.sleep(0.01)

    def generate(self, requests: Sequence[Request], run: int) -> list[list[int]]:  # noqa: ARG002
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            self._params(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stats(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        return {
            "prefix_cache_reset": self._reset,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "prefix_caching": config.cache_config.enable_prefix_caching,
        }

    def close(self) -> None:
        # its engine process holds the GPU's memory until it is gone
        self._llm.llm_engine.engine_core.shutdown()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="an argument of vllm.LLM")
    args = parser.parse_args(argv)
    return serve(lambda: Vllm(args))


if __name__ == "__main__":
    raise SystemExit(main())
