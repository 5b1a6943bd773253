"""
What users do, from end to end: real servers, real processes, the real model, at full size.

    python -m tests.e2e
    python -m tests.e2e --only celery,bulk

Each scenario is a module here whose `run(workdir)` raises where anything is wrong and returns what
it counted. Progress goes to standard error; the last line, on standard output, is one line of JSON
with all counts. Exits with 1 where a scenario failed; the others are run nevertheless.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

SCENARIOS = ("gateway", "celery", "bulk", "summaries")


def run_scenario(name: str) -> dict[str, object]:
    """What it counted and the seconds that it took, or its error."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"pagemill-e2e-{name}-") as folder:
        try:
            counts: dict[str, object] = dict(import_module(f"tests.e2e.{name}").run(Path(folder)))
        except Exception as error:
            traceback.print_exc()
            counts = {"error": f"{type(error).__name__}: {error}"}
    return counts | {"seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCENARIOS), help="names of scenarios, with commas between them")
    names = parser.parse_args().only.split(",")
    if unknown := sorted(set(names) - set(SCENARIOS)):
        parser.error(f"no scenario {unknown[0]!r}: there are {', '.join(SCENARIOS)}")
    counts = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        counts[name] = run_scenario(name)
        print(f"{name}: {json.dumps(counts[name])}", file=sys.stderr, flush=True)
    failed = [name for name in names if "error" in counts[name]]
    print(json.dumps({"scenarios": len(names), "failed": failed} | counts))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
