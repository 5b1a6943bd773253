"""What an earlier version of the wire format wrote, and what it can read."""

import json
from pathlib import Path
from typing import Any

# Recorded from the release that spoke version 1 alone, byte for byte: jobs, the results of its workers and
# scripts, and the names that its readers knew. Never to be changed: that release does not change either.
RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("wire_1.json").read_text(encoding="utf-8"))

JOBS_OF_1 = [text.encode() for text in RECORD["jobs"]]
RESULTS_OF_1 = [text.encode() for text in RECORD["results"]]
FIELDS_OF_1: dict[str, set[str]] = {model: set(names) for model, names in RECORD["fields"].items()}


def unknown_to_1(record: bytes) -> list[str]:
    """What a reader of version 1 would refuse in a result."""
    result = json.loads(record)
    parts = [
        ("Result", [result]),
        ("Usage", [result.get("usage") or {}]),
        ("Completion", result.get("completions") or []),
        ("Failure", [result.get("failure") or {}]),
    ]
    unknown = [f"{model}.{name}" for model, ones in parts for one in ones for name in one.keys() - FIELDS_OF_1[model]]
    code = (result.get("failure") or {}).get("code")
    if code is not None and code not in RECORD["codes"]:
        unknown.append(f"code {code}")
    if result["version"] != 1:
        unknown.append(f"version {result['version']}")
    return unknown
