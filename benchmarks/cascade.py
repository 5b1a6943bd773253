"""
What decode attention gains by reading a shared prefix once.

    python -m benchmarks.cascade
    python -m benchmarks.cascade --shapes 2x64x7 --groups 200 --prefixes 2048
    python -m benchmarks.cascade --sweep --shapes 8x128x4 --groups 32,200 --prefixes 2048

One JSON line a case: a batch whose sequences all share a prefix and have `--suffix` tokens behind it, in
a replayed graph over the caches of different layers, so that none is left in the L2 cache from before.
`plain_us` is a layer's attention as if nothing were shared: even so, most reads of the prefix are served
by that cache. `cascade_us` is with the pass over the prefix, of which `pass_us` is the pass alone. Shapes
are KV heads x head size x query heads of a KV head, in bf16. `--sweep` tries tiles on all cases of a
shape and prints the best, as rules for kernels/tuned/cascade_attention.json.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.compiling import faults_of
from benchmarks.decode_attention import BLOCK_SIZE, COLD_BYTES, Config, Shape, config_of, numbers
from benchmarks.device_time import replayed_s
from kernels.cascade_attention import (
    CascadeLayout,
    SharedPrefix,
    cascade_config,
    cascade_workspace,
    pack_prefixes,
    plan_cascade,
)
from kernels.cuda import cascade_attention, decode_attention
from kernels.decode_attention import PagedDecode
from kernels.decode_parts import cut_sequences, make_parts

MAX_LAYERS = 64
MAX_MODEL_LEN = 8192
# of an H200; a multiprocessor's shared memory, of which each thread block takes 1 KiB more than it asks for
MULTIPROCESSORS = 132
SHARED_BYTES = 228 << 10


@dataclass(frozen=True, slots=True)
class Case:
    """
    Sequences that all share their leading blocks.

    Args:
        plan: Without the pass.
        caches: One a layer.
    """

    shape: Shape
    prefix: int
    query: Tensor
    plan: PagedDecode
    caches: list[Tensor]

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def with_pass(self, config: Config) -> PagedDecode:
        """The same with the pass, cut as a configuration says."""
        batch, shape = len(self.query), self.shape
        layout = CascadeLayout(
            batch,
            shape.num_kv_heads,
            config["rows"],
            config["rows"] // shape.group_size,
            config["tile"],
            config["programs"],
        )
        packed = np.zeros(layout.num_numbers, dtype=np.int32)
        pack_prefixes(layout, [SharedPrefix(0, self.prefix, np.arange(batch))], batch, packed)
        workspace = cascade_workspace(layout, shape.head_dim, torch.float32, torch.device("cuda"))
        sent = torch.from_numpy(packed).cuda()
        cascade = plan_cascade(layout, sent, workspace, batch, shape.head_dim)
        parts = make_parts(batch, shape.programs, shape.num_heads, shape.head_dim, torch.device("cuda"))
        cut_sequences(parts, self.plan.seq_lens, None, shape.programs, cascade)
        return replace(self.plan, parts=parts, cascade=cascade)

    def seconds(self, work: Callable[[Tensor], object], repeats: int) -> float:
        """Of one layer."""
        calls = max(8, len(self.caches))

        def layers() -> None:
            for cache in itertools.islice(itertools.cycle(self.caches), calls):
                work(cache)

        return replayed_s(layers, repeats) / calls

    def decode(self, plan: PagedDecode, cache: Tensor) -> Tensor:
        return decode_attention.launch(self.query, cache, plan, self.scale, 0.0, None, config_of(self.shape))

    def pass_over(self, plan: PagedDecode, config: Config, cache: Tensor) -> None:
        assert plan.cascade is not None
        tables = plan.block_tables
        cascade_attention.launch(self.query, cache, tables, plan.cascade, self.scale, 0.0, None, config)

    def cascade_s(self, config: Config, repeats: int) -> tuple[float, float]:
        """Seconds of a layer with the pass, and of the pass."""
        plan = self.with_pass(config)

        def both(cache: Tensor) -> None:
            self.pass_over(plan, config, cache)
            self.decode(plan, cache)

        return self.seconds(both, repeats), self.seconds(lambda cache: self.pass_over(plan, config, cache), repeats)


def make_case(shape: Shape, batch: int, prefix: int, suffix: int, num_layers: int | None = None) -> Case:
    """Blocks in random order, values of ordinary size."""
    torch.cuda.empty_cache()
    shared, own = prefix // BLOCK_SIZE, -(-suffix // BLOCK_SIZE)
    num_blocks = shared + batch * own
    layers = num_layers or min(MAX_LAYERS, 1 + -(-COLD_BYTES // (num_blocks * BLOCK_SIZE * shape.token_bytes)))
    cache_shape = (2, num_blocks + 1, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    caches = [torch.empty(cache_shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(layers)]
    order = torch.randperm(num_blocks, device="cuda", dtype=torch.int32) + 1
    tables = torch.cat([order[:shared].expand(batch, -1), order[shared:].view(batch, own)], dim=1).contiguous()
    parts = make_parts(batch, shape.programs, shape.num_heads, shape.head_dim, torch.device("cuda"))
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((batch,), prefix + suffix, dtype=torch.int32, device="cuda")
    cut_sequences(parts, seq_lens, None, shape.programs)
    plan = PagedDecode(tables, slots, seq_lens, None, parts)
    query = torch.randn(batch, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    return Case(shape, prefix, query, plan, caches)


def usual_config(shape: Shape) -> Config:
    return cascade_config(shape.head_dim, shape.group_size, torch.bfloat16)


def candidates(shape: Shape) -> Iterator[Config]:
    """Tiles that fit, with as many programs as run together, by their shared memory and usual registers."""
    for rows, tile, stages in itertools.product((32, 64, 128), (32, 64, 128), (1, 3, 5)):
        for warps in (4, 8):
            # block numbers are fetched a stage ahead of keys and values
            held = 2 * shape.head_dim * (rows + 2 * tile * ((stages + 1) // 2))
            together = min(SHARED_BYTES // (held + 1024), 16 // warps - (warps == 8 and rows == 128), 3)
            # four warps have 64 rows of a large product
            if together > 0 and rows >= shape.group_size and 16 * warps // 2 <= rows <= 16 * warps:
                programs = together * MULTIPROCESSORS
                yield {"rows": rows, "tile": tile, "warps": warps, "stages": stages, "programs": programs}


def attempt(shape: Shape, config: Config) -> None:
    """Compile a configuration into the cache on disk, and see that it attends as the plain kernel does."""
    case = make_case(shape, 16, 512, 32, num_layers=1)
    plan = case.with_pass(config)
    case.pass_over(plan, config, case.caches[0])
    expected, actual = (case.decode(one, case.caches[0]).float() for one in (case.plan, plan))
    error = float((actual - expected).abs().max() / expected.abs().max())
    if not error < 2e-2:
        raise ValueError(f"wrong by {error:.3g}")


def sweep(shape: Shape, cases: list[tuple[int, int]], suffix: int, patience_s: float) -> None:
    configs = list(candidates(shape))
    faults = faults_of(attempt, [(shape, config) for config in configs], patience_s)
    for config, fault in zip(configs, faults, strict=True):
        if fault is not None:
            print(json.dumps({"skipped": config, "because": fault}), flush=True)
    configs = [config for config, fault in zip(configs, faults, strict=True) if fault is None]
    scores = [0.0] * len(configs)
    for batch, prefix in cases:
        case = make_case(shape, batch, prefix, suffix)
        for index, config in enumerate(configs):
            scores[index] += math.log(case.cascade_s(config, 3)[0])
        del case
    ranked = sorted(range(len(configs)), key=scores.__getitem__)
    for index in ranked[:8]:
        mean = math.exp(scores[index] / len(cases))
        when = {"gpu": torch.cuda.get_device_name(), "head_dim": shape.head_dim, "group_size": shape.group_size}
        rule = {"when": when | {"dtype": "bfloat16"}, "use": configs[index]}
        print(json.dumps({"cascade_us": round(mean * 1e6, 1), "rule": rule}), flush=True)


def table(shape: Shape, cases: list[tuple[int, int]], suffix: int) -> None:
    for batch, prefix in cases:
        case = make_case(shape, batch, prefix, suffix)
        plain = case.seconds(lambda cache, case=case: case.decode(case.plan, cache), 10)  # type: ignore[misc]
        cascade, alone = case.cascade_s(usual_config(shape), 10)
        line = {
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "group_size": shape.group_size,
            "batch": batch,
            "prefix": prefix,
            "suffix": suffix,
            "plain_us": round(plain * 1e6, 1),
            "cascade_us": round(cascade * 1e6, 1),
            "pass_us": round(alone * 1e6, 1),
            "gain": round(plain / cascade, 2),
        }
        print(json.dumps(line), flush=True)
        del case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8x128x4,2x64x7")
    parser.add_argument("--groups", type=numbers, default=[8, 32, 128, 256], help="sequences that share the prefix")
    parser.add_argument("--prefixes", type=numbers, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--suffix", type=int, default=192)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--patience-s", type=float, default=90.0, help="what has not compiled by then is left out")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps({"gpu": torch.cuda.get_device_name()}), flush=True)
    cases = list(itertools.product(args.groups, args.prefixes))
    for text in args.shapes.split(","):
        kv_heads, head_dim, group_size = map(int, text.split("x"))
        shape = Shape(kv_heads, head_dim, group_size, "bf16")
        if args.sweep:
            sweep(shape, cases, args.suffix, args.patience_s)
        else:
            table(shape, cases, args.suffix)


if __name__ == "__main__":
    main()
