"""
Writes the dashboards: rows of panels become the JSON that Grafana loads.

    python deploy/grafana/make_dashboards.py

The files in dashboards/ are made by this and nothing else; with --check it says which are not.
"""

import json
import sys
from pathlib import Path

import capacity
import root_cause
import war_room
from layout import dashboard

FOLDER = Path(__file__).parent / "dashboards"

DASHBOARDS = {
    "war-room": ("Pagemill · war room", "Does it work now?", war_room.ROWS, "now-3h"),
    "capacity": ("Pagemill · capacity planning", "How many workers will be needed?", capacity.ROWS, "now-7d"),
    "root-cause": ("Pagemill · root cause", "Why is it slow, or wrong?", root_cause.ROWS, "now-3h"),
}


def main(arguments: list[str]) -> int:
    made = {
        FOLDER / f"{uid}.json": json.dumps(dashboard(uid, *rest), indent=1, ensure_ascii=False) + "\n"
        for uid, rest in DASHBOARDS.items()
    }
    if arguments == ["--check"]:
        others = [path.name for path in FOLDER.iterdir() if path not in made]
        changed = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
        print(*changed, *others)
        return bool(changed or others)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
