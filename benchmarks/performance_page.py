"""
Writes the tables of docs/performance.md from the lines in benchmarks/results.

    python -m benchmarks.performance_page

Each table stands behind a comment that names it; all else of the page is left as it is. `--check` writes nothing
and ends with 1 where the page is not what the lines say.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_table import table as gpu_table

Line = dict[str, Any]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
RESULTS = Path(__file__).with_name("results")

_PLACE = re.compile(r"(?<=^<!-- table: )(?P<name>[\w-]+)(?P<end> -->\n)(?:\|.*\n)*", re.MULTILINE)


def lines(name: str) -> list[Line]:
    """The JSON lines of a file of results; programs may have said other things between them."""
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def with_tables(page: str) -> str:
    """
    The page with its tables as the lines have them.

    Raises:
        ValueError: it has no place for a table, or one for a table that there is not.
    """
    places = [match["name"] for match in _PLACE.finditer(page)]
    if sorted(places) != sorted(TABLES):
        raise ValueError(f"the page has the tables {', '.join(places)}: want each of {', '.join(TABLES)} once")
    return _PLACE.sub(lambda match: f"{match['name']}{match['end']}{_join(TABLES[match['name']]())}", page)


def _join(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [_row(head), "|" + "---|" * len(head), *map(_row, rows)]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _gpu() -> list[str]:
    return gpu_table(lines("h200-offline"))


def _gpu_start() -> list[str]:
    return _table(
        ("model", "cache of compiled kernels", "until the first token", "of that, recording graphs"),
        (
            (one["start_up"], one["triton_cache"], f"{one['first_token']:.1f} s", f"{one['capture_s']:.1f} s")
            for one in lines("h200-start-up")
        ),
    )


def _gpu_gap() -> list[str]:
    return _table(
        ("model", "sequences", "a step", "of that, the GPU waits", "processor time of a step"),
        (
            (
                one["step_gap"],
                f"{one['batch']:,}",
                f"{one['step_ms']:.1f} ms",
                f"{1000 * one['gap_ms']:.0f} us, {100 * one['gap_share']:.2f} %",
                f"{one['cpu_ms']:.2f} ms",
            )
            for one in lines("h200-step-gap")
        ),
    )


def _through_queue(found: Iterable[Line]) -> list[str]:
    return _table(
        ("model", "device", "requests", "engine alone", "through Redis and a worker", "ratio"),
        (
            (
                one["model"],
                one.get("device", "cpu"),
                f"{one['requests']:,}",
                f"{one['output_tok_s']['engine']:,.0f} tokens/s",
                f"{one['output_tok_s']['queue']:,.0f} tokens/s",
                f"{one['queue_over_engine']:.2f}",
            )
            for one in found
            if one.get("queue") == "engine"
        ),
    )


def _queue_engine() -> list[str]:
    return _through_queue([*lines("h200-queue"), *lines("cpu")])


def _cpu() -> list[str]:
    found = lines("cpu")
    [summary] = [one["workloads"]["sharegpt"] for one in found if "summary" in one]
    over = summary["pagemill_over"]

    def row(one: Line) -> Sequence[object]:
        name = next((peer for peer in over if peer.split() == _without_version(one["engine"])), None)
        ratio = f"{over[name]:.2f}" if name else ""
        equal = summary["equal_outputs"][name].replace("/", " of ") if name else ""
        return one["engine"], f"{one['output_tok_s']:.1f}", ratio, equal

    return _table(
        ("engine", "output tokens/s", "ours over it", "equal answers"), (row(one) for one in found if "engine" in one)
    )


def _without_version(engine: str) -> list[str]:
    return [word for word in engine.split() if not word[0].isdigit()]


def _policies() -> list[str]:
    cells: dict[tuple[str, str, int], dict[str, Line]] = {}
    for one in lines("h200-simulated"):
        cells.setdefault((one["model"], one["workload"], one["kv_tokens"]), {})[one["policy"]] = one

    def row(cell: tuple[str, str, int], found: Mapping[str, Line]) -> Sequence[object]:
        model, workload, pool = cell
        plain, ordered = found["fcfs"]["wall_s"], found["throughput"]["wall_s"]
        return model, workload, f"{pool:,}", f"{plain:.2f}", f"{ordered:.2f}", f"{plain / ordered:.2f}"

    return _table(
        ("model", "workload", "KV cache, tokens", "`fcfs`, s", "`throughput`, s", "gain"),
        (row(cell, found) for cell, found in cells.items() if {"fcfs", "throughput"} <= found.keys()),
    )


def _kv_use() -> list[str]:
    return _table(
        ("KV cache, tokens", "blocks in use", "slots without a token", "preemptions", "computed / needed"),
        (
            (
                f"{one['pool_tokens']:,}",
                f"{100 * one['use']:.1f} %",
                f"{100 * one['waste']:.1f} %",
                f"{sum(one['preemptions'].values())}",
                f"{one['computed_over_needed']:.3f}",
            )
            for one in lines("cpu")
            if "kv_use" in one
        ),
    )


def _fp8() -> list[str]:
    found = lines("kv-perplexity")
    plain = {(one["computed"], one["prompts"]): one["perplexity"] for one in found if one["kv_cache"] != "fp8"}
    return _table(
        ("computed in", "prompts", "perplexity", "with fp8", "same likeliest token"),
        (
            (
                one["computed"],
                one["prompts"],
                f"{plain[one['computed'], one['prompts']]:.2f}",
                f"{one['perplexity']:.2f}",
                f"{100 * one['same_likeliest']:.1f} %",
            )
            for one in found
            if one["kv_cache"] == "fp8"
        ),
    )


def _queue_costs() -> list[str]:
    found = lines("queue")
    worker = [one for one in found if one.get("queue") == "worker"]
    [submit] = [one["jobs_s"] for one in found if one.get("queue") == "submit"]
    [scripts] = [one for one in found if one.get("queue") == "scripts"]
    backlog, times = f"{scripts['backlog']:,}", scripts["ms"]
    return _table(
        ("what", "measured"),
        (
            ("jobs a second that `submit_many` sends", f"{submit['submit_many']:,}"),
            (
                f"a pull of {scripts['pull_of']} jobs out of {backlog} that wait",
                f"{times['pull']['p50']:.1f} ms (p99 {times['pull']['p99']:.1f})",
            ),
            (
                f"writing {scripts['finish_of']} results",
                f"{times['finish']['p50']:.1f} ms (p99 {times['finish']['p99']:.1f})",
            ),
            (
                f"a worker's processor time a job, median of {len(worker)} runs",
                f"{median(one['cpu_us_per_job'] for one in worker):.0f} us",
            ),
        ),
    )


def _faults() -> list[str]:
    return _table(
        ("jobs", "kills", "pauses", "server restarts", "missing", "double", "longest wait after a kill"),
        (
            (
                f"{one['jobs']:,}",
                one["kills"] + one["worker_kills"],
                one["pauses"],
                one["server_restarts"],
                one["missing"],
                one["duplicated"],
                f"{one['longest_resume_s']['killed']:.2f} s (leases of {one['lease_s']:g} s)",
            )
            for one in lines("queue")
            if "server_restarts" in one
        ),
    )


def _bulk() -> list[str]:
    newest = {one["bulk_memory"]: one for one in lines("bulk") if "bulk_memory" in one}
    return _table(
        ("input", "rows", "planned, rows/s", "read, rows/s", "peak of memory"),
        (
            (
                f"`{kind}`",
                f"{one['rows']:,}",
                f"{one['planned_rows_s']:,}",
                f"{one['read_rows_s']:,}",
                f"{one['peak_mib']:.0f} MiB",
            )
            for kind, one in newest.items()
        ),
    )


def _bulk_run() -> list[str]:
    return _table(
        ("rows", "documents/s", "runner's peak of memory", "server's peak of memory"),
        (
            (
                f"{one['rows']:,}",
                f"{one['documents_s']:,}",
                f"{one['peak_mib']:.0f} MiB",
                f"{one['server_peak_mib']:.0f} MiB",
            )
            for one in lines("bulk")
            if "bulk_run" in one
        ),
    )


_CASES = {
    "engine": "fake engine alone",
    "hub": "through the queue, with the Python client",
    "gateway": "as HTTP streams of the gateway",
}


def _gateway() -> list[str]:
    found = lines("gateway")

    def spread(case: str, field: str) -> str:
        values = sorted(one[field] for one in found if one["case"] == case)
        first, last = f"{values[0]:.2f}", f"{values[-1]:.2f}"
        return f"{first} s" if first == last else f"{first} to {last} s"

    return _table(
        ("1,000 streams at once", "first text, median", "first text, p99", "all done"),
        (
            (text, spread(case, "first_median_s"), spread(case, "first_p99_s"), spread(case, "all_s"))
            for case, text in _CASES.items()
        ),
    )


TABLES: dict[str, Callable[[], list[str]]] = {
    "gpu": _gpu,
    "gpu-start": _gpu_start,
    "gpu-gap": _gpu_gap,
    "queue-engine": _queue_engine,
    "cpu": _cpu,
    "policies": _policies,
    "kv-use": _kv_use,
    "fp8": _fp8,
    "queue-costs": _queue_costs,
    "faults": _faults,
    "bulk": _bulk,
    "bulk-run": _bulk_run,
    "gateway": _gateway,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is not current")
    args = parser.parse_args(argv)
    page = PAGE.read_text(encoding="utf-8")
    current = with_tables(page)
    if args.check:
        return 0 if page == current else 1
    PAGE.write_text(current, encoding="utf-8")
    print(f"{PAGE.name}: {'as it was' if page == current else 'written anew'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
