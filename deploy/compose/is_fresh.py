"""
Whether a program has written its file lately: `is_fresh.py PATH SECONDS`; the health check of the beat.

What the file is called may end in .db or the like, as the system's database has it.
"""

import sys
import time
from pathlib import Path


def main() -> int:
    path, most = Path(sys.argv[1]), float(sys.argv[2])
    ages = [time.time() - found.stat().st_mtime for found in path.parent.glob(f"{path.name}*")]
    if not ages:
        print(f"there is no {path} yet")
        return 1
    print(f"{path} was written {min(ages):.0f} s ago")
    return 0 if min(ages) <= most else 1


if __name__ == "__main__":
    sys.exit(main())
