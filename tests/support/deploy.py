"""The files of deploy/, read."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
RULES = (PROMETHEUS / "rules" / "pagemill.yml", PROMETHEUS / "nightly.yml")
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*_test.yml"))


@cache
def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    """All rules: alerts, and sums that are recorded."""
    return [rule for path in RULES for group in read_yaml(path)["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded() -> set[str]:
    """Names of recorded sums."""
    return {rule["record"] for rule in rules() if "record" in rule}


def dashboards() -> dict[str, dict[str, Any]]:
    """By file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """All panels but the titles of rows, with their dashboard's file name."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            if panel["type"] != "row":
                yield name, panel


def queries() -> Iterator[tuple[str, str]]:
    """Where each expression of a dashboard stands, and it itself, as Prometheus gets it."""
    for name, panel in panels():
        for target in panel["targets"]:
            expr = target["expr"].replace("$__rate_interval", "1m").replace("$queue", ".*")
            assert not re.search(r"\$\w", expr), f"{expr} has a variable that nothing fills in"
            yield f"{name}: {panel['title']} {target['refId']}", expr
