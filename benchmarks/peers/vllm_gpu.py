"""
vLLM's CUDA build on the cases of a comparison.

Where it is no part of the environment, `--peer-path` of `benchmarks.gpu` names a folder that
holds it; the folder is on the path of this process alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.contender import serve
from benchmarks.peers.vllm import Vllm

_ENVIRONMENT = {
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


class VllmOnGpu(Vllm):
    """With the engine in a process of its own, as it is by default."""

    def stats(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        return super().stats() | {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "prefix_caching": config.cache_config.enable_prefix_caching,
        }

    def close(self) -> None:
        # that process holds the GPU's memory until it is gone
        self.llm.llm_engine.engine_core.shutdown()


def start(args: argparse.Namespace) -> VllmOnGpu:
    settings: dict[str, Any] = {
        "model": str(args.model),
        "dtype": args.dtype,
        "load_format": "dummy" if args.dummy else "auto",
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    for option in args.set:
        name, _, value = option.partition("=")
        settings[name] = json.loads(value)
    return VllmOnGpu("vllm", _ENVIRONMENT, **settings)


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
    return serve(lambda: start(args))


if __name__ == "__main__":
    raise SystemExit(main())
