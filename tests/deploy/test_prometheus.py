"""What deploy/prometheus says: rules that Prometheus accepts, alerts that fire, metrics that exist."""

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from producers.child import Child
from tests.support import server_box
from tests.support.deploy import PROMETHEUS, ROOT, RULE_TESTS, RULES, alerts, queries, read_yaml, recorded, rules
from tests.support.promql import metrics_in
from tests.support.scrapes import Watched, gateway_scrape, get
from tests.support.servers import wait_for

# made by Prometheus itself
BUILT_IN = {"ALERTS", "up"}


@pytest.fixture(scope="module")
def prometheus() -> Path:
    """Prometheus's program; promtool lies beside it."""
    found = server_box.find("prometheus")
    if found is None:
        pytest.skip("there is no Prometheus here: `python -m tests.support.server_box` fetches it where apt can")
    return found


def promtool(prometheus: Path, *arguments: str, stdin: str | None = None) -> tuple[int, str]:
    """Exit code, and what it said."""
    done = subprocess.run(
        [prometheus.with_name("promtool"), *arguments],
        input=stdin,
        cwd=PROMETHEUS / "tests",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_prometheus_takes_the_rules_and_the_configuration(prometheus: Path) -> None:
    """
    All expressions and templates are right, by promtool.
    """
    assert 0 == (found := promtool(prometheus, "check", "rules", *map(str, RULES)))[0], found[1]
    assert 0 == (found := promtool(prometheus, "check", "config", str(PROMETHEUS / "prometheus.yml")))[0], found[1]


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.name)
def test_alerts_fire_when_they_should(prometheus: Path, path: Path) -> None:
    """
    The stories of each alert, by promtool.
    """
    code, said = promtool(prometheus, "test", "rules", path.name)

    assert 0 == code, said


def test_each_alert_has_a_story_in_which_it_fires() -> None:
    """
    And those with a threshold that may be wrong have one in which they do not.
    """
    fires: dict[str, set[bool]] = {}
    for path in RULE_TESTS:
        for story in read_yaml(path)["tests"]:
            for case in story["promql_expr_test"]:
                name = re.search(r'alertname="(\w+)"', case["expr"])
                assert name is not None
                fires.setdefault(name.group(1), set()).add(bool(case["exp_samples"]))

    assert alerts().keys() == fires.keys()
    assert {True} == {True in outcomes for outcomes in fires.values()}
    assert sum(False in outcomes for outcomes in fires.values()) > len(fires) / 2


def test_each_alert_leads_to_its_entry_in_the_runbook() -> None:
    """
    The link is to a heading with the alert's name, and no entry is without an alert.
    """
    headings = re.findall(r"^### (.+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)

    assert sorted(alerts()) == sorted(headings)
    for name, alert in alerts().items():
        assert f"docs/runbook.md#{name.lower()}" == alert["annotations"]["runbook_url"]
        assert alert["labels"]["severity"] in ("page", "warning", "info")


def test_an_entry_of_the_runbook_says_what_to_look_at_and_what_to_do() -> None:
    """
    With the severity that the alert has.
    """
    text = (ROOT / "docs" / "runbook.md").read_text()
    entries = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))

    for name, entry in entries.items():
        assert entry.startswith(f"**{alerts()[name]['labels']['severity']}** · "), name
        assert "- *Look:*" in entry, name
        assert "- *Do:*" in entry, name


def test_each_metric_of_a_rule_exists(watched: Watched) -> None:
    """
    A worker or a gateway exports it, or another rule records it.
    """
    known = watched.scrape.names | gateway_scrape().names | recorded() | BUILT_IN
    unknown = {
        rule.get("alert") or rule["record"]: missing
        for rule in rules()
        if (missing := metrics_in(rule["expr"]) - known)
    }

    assert {} == unknown


def test_the_names_of_metrics_are_found_in_expressions() -> None:
    """
    Neither labels nor functions nor numbers are metrics; names with colons are.
    """
    expr = """
        sum by (queue, le) (rate(a_bucket{lane="b_total", x=~"c(d)"}[5m] offset 1h))
        / on (queue) group_left (e) f:g:rate5m > 1.5e3 and absent(vllm:h)
        or 7 * 86400 * predict_linear((i)[2d:1h], 10) unless histogram_quantile(0.9, j_bucket)
    """

    assert {"a_bucket", "f:g:rate5m", "vllm:h", "i", "j_bucket"} == metrics_in(expr)


def test_a_scrape_is_as_prometheus_wants_it(prometheus: Path, watched: Watched) -> None:
    """
    Names, help and types, by promtool's linter.
    """
    code, said = promtool(prometheus, "check", "metrics", stdin=watched.scrape.text)

    assert (0, "") == (code, said)


class Server:
    """A Prometheus that scrapes one worker each second."""

    def __init__(self, program: Path, folder: Path, target: str) -> None:
        config = deepcopy(read_yaml(PROMETHEUS / "prometheus.yml"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / "rules" / "*.yml")]
        for job in config["scrape_configs"]:
            # names of compose mean nothing here
            job.pop("dns_sd_configs", None)
            job["static_configs"] = [{"targets": [target] if job["job_name"] == "pagemill-worker" else []}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "log"
        command = [
            *(str(program), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
            "--web.listen-address=127.0.0.1:0",
        ]
        self.child = Child(command, log=self._log)

    @property
    def port(self) -> int:
        found = wait_for(lambda: re.search(r"Listening on.*?address=127\.0\.0\.1:(\d+)", self._log.read_text()), 30)
        return int(found.group(1))

    @property
    def ready(self) -> bool:
        return get(self.port, "/-/ready")[0] == 200

    def query(self, expr: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                return dict(json.load(error))

    def has(self, expr: str) -> bool:
        found = self.query(expr)
        return found["status"] == "success" and bool(found["data"]["result"])


def test_a_prometheus_scrapes_a_worker_and_answers_the_dashboards(
    prometheus: Path, watched: Watched, tmp_path: Path
) -> None:
    """
    The target is up, sums are recorded, and all expressions of the dashboards are right; most have a value.
    """
    server = Server(prometheus, tmp_path, f"127.0.0.1:{watched.port}")
    with server.child:
        wait_for(lambda: server.ready, 30)
        wait_for(lambda: server.has('rate(pagemill_pull_empty_total{job="pagemill-worker"}[1m])'), 40)
        wait_for(lambda: server.has("pagemill:waiting_jobs") and server.has("pagemill:workers == 1"), 20)
        answers = {place: server.query(expr) for place, expr in queries()}

    wrong = {place: answer for place, answer in answers.items() if answer["status"] != "success"}
    assert {} == wrong
    filled = [place for place, answer in answers.items() if answer["data"]["result"]]
    assert len(filled) > len(answers) / 2, sorted(answers.keys() - set(filled))
