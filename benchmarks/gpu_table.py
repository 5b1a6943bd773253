"""
The Markdown table of lines that `benchmarks.gpu` wrote.

    python -m benchmarks.gpu_table benchmarks/results/h200-offline.jsonl

Of lines of the same engine, model and workload the last one counts.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_HEAD = (
    "| model | workload | ours | vLLM | ours over it | limit | ours / limit | vLLM / limit |",
    "|---|---|---|---|---|---|---|---|",
)
_NONE = "–"


def table(lines: Iterable[dict[str, Any]]) -> list[str]:
    """The table's rows: output tokens/s, in the order in which the cells first come."""
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in lines:
        if "output_tok_s" in line:
            engine = line["engine"].partition(" ")[0]
            cells.setdefault((line["model"], line["workload"]), {})[engine] = line
    return [*_HEAD, *(_row(*cell, engines) for cell, engines in cells.items())]


def _row(model: str, workload: str, engines: dict[str, dict[str, Any]]) -> str:
    ours, vllm = engines.get("pagemill"), engines.get("vllm")
    if ours and vllm and ours["digest"] != vllm["digest"]:
        raise ValueError(f"{model} {workload}: the engines ran other requests, {ours['digest']} and {vllm['digest']}")
    limit = next(iter(engines.values()))["limit_tok_s"]
    ratio = f"{ours['output_tok_s'] / vllm['output_tok_s']:.2f}" if ours and vllm else _NONE
    cells = [model, workload, _rate(ours), _rate(vllm), ratio, f"{limit:,.0f}", _share(ours), _share(vllm)]
    return f"| {' | '.join(cells)} |"


def _rate(line: dict[str, Any] | None) -> str:
    if line is None:
        return _NONE
    repeats = f" (median of {line['repeats']})" if line["repeats"] > 1 else ""
    return f"{line['output_tok_s']:,.0f}{repeats}"


def _share(line: dict[str, Any] | None) -> str:
    return _NONE if line is None else f"{100 * line['of_limit']:.0f} %"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args(argv)
    lines = [json.loads(text) for file in args.files for text in file.read_text().splitlines()]
    print("\n".join(table(lines)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
