"""
Writes the alerts of deploy/prometheus as the Prometheus operator takes them.

    python deploy/k8s/make_rules.py

components/monitoring/rules.yaml is made by this and nothing else; with --check it says whether it is not.
"""

import sys
from pathlib import Path
from textwrap import indent

HERE = Path(__file__).parent
RULES = HERE.parent / "prometheus" / "rules" / "pagemill.yml"
MADE = HERE / "components" / "monitoring" / "rules.yaml"

HEAD = """\
# Made by deploy/k8s/make_rules.py of deploy/prometheus/rules/pagemill.yml: change that.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: pagemill
spec:
"""


def main(arguments: list[str]) -> int:
    text = RULES.read_text(encoding="utf-8")
    made = HEAD + indent(text[text.index("groups:\n") :], "  ")
    if arguments == ["--check"]:
        changed = not MADE.exists() or MADE.read_text(encoding="utf-8") != made
        print(*[MADE.name] * changed)
        return int(changed)
    MADE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
