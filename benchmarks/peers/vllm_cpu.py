"""
vLLM's CPU build on the cases of a comparison, in the interpreter that has it installed.

Its pins differ from ours, so it lives in an environment of its own (benchmarks/README.md says
how to make one); `python -m benchmarks.offline --peer vllm --peer-python PATH` starts this there.
"""

import argparse
from pathlib import Path

from benchmarks.contender import serve
from benchmarks.peers.vllm import Vllm

# one process; two threads that are not tied to cores; 2 GiB of KV cache, as ours
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
}


def start(args: argparse.Namespace) -> Vllm:
    return Vllm(
        "vllm-cpu",
        _ENVIRONMENT,
        model=str(args.model),
        dtype="float32",
        load_format="dummy" if args.dummy else "auto",
        max_model_len=args.max_model_len,
        enforce_eager=not args.compile,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager")
    args = parser.parse_args(argv)
    return serve(lambda: start(args))


if __name__ == "__main__":
    raise SystemExit(main())
