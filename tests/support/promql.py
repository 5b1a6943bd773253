"""Names of metrics in PromQL; Prometheus itself says in other tests whether an expression is right."""

import re

# in this order: what is within quotes may look like anything
_NO_NAMES = (
    r'"(?:\\.|[^"\\])*"',
    r"\{[^}]*\}",
    r"\[[^\]]*\]",
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)",
    r"\b(?:and|or|unless|bool|offset|by|without|group_left|group_right)\b",
    # functions
    r"\b[a-z_0-9]+\s*(?=\()",
)
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")


def metrics_in(expr: str) -> set[str]:
    """The metrics that an expression reads."""
    for pattern in _NO_NAMES:
        expr = re.sub(pattern, " ", expr)
    # durations and numbers
    expr = re.sub(r"\b\d[\w.]*", " ", expr)
    return set(_NAME.findall(expr))
