"""
Pictures of the gateway's status page, idle and under load, checked by axe-core.

    python -m tests.screens --out screens --minutes 2

Ends with 1 where axe-core objects to anything, or the page is wider than its window.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from producers.local_redis import local_redis
from tests.screens.load import Load, fleet
from tests.screens.shots import shoot
from tests.support.chromium import chromium
from tests.support.gateways import running_gateway


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.screens", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("screens"), help="folder of the pictures")
    parser.add_argument("--minutes", type=float, default=1.0, help="of load, before it is looked at")
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    faults = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        local_redis() as url,
        running_gateway(url, "chat") as gateway,
        chromium() as browser,
    ):
        faults += told(shoot(browser, gateway.url, given.out, "empty"))
        with fleet(url, Path(folder)):
            time.sleep(3)
            faults += told(shoot(browser, gateway.url, given.out, "idle"))
            with Load(url):
                time.sleep(60 * given.minutes)
                faults += told(shoot(browser, gateway.url, given.out, "load"))
    return 1 if faults else 0


def told(shots: Iterator[tuple[str, list[str], int]]) -> int:
    faults = 0
    for name, objections, overflow in shots:
        print(f"{name}: {len(objections)} violations, {overflow} px too wide", flush=True)
        for one in objections:
            print(f"    {one}", flush=True)
        faults += len(objections) + max(0, overflow)
    return faults


if __name__ == "__main__":
    sys.exit(main())
