"""What deploy/grafana says: dashboards that fit their pages, of metrics that exist."""

import re
import subprocess
import sys

import pytest

from tests.support.deploy import GRAFANA, dashboards, panels, queries, read_yaml, recorded
from tests.support.promql import metrics_in
from tests.support.scrapes import Watched, gateway_scrape

WIDTH = 24
KINDS = {"timeseries", "stat", "table", "heatmap"}


def test_the_files_are_those_that_are_made() -> None:
    """
    Who edits a dashboard edits its rows, and makes the files anew.
    """
    command = [sys.executable, str(GRAFANA / "make_dashboards.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (0, "", "") == (done.returncode, done.stdout.strip(), done.stderr)


def test_there_are_three_dashboards() -> None:
    """
    With ids that stay, and a choice of queues.
    """
    uids = {dashboard["uid"] for dashboard in dashboards().values()}

    assert {"pagemill-war-room", "pagemill-capacity", "pagemill-root-cause"} == uids
    for dashboard in dashboards().values():
        assert ["queue"] == [variable["name"] for variable in dashboard["templating"]["list"]]


def test_each_metric_of_a_panel_exists(watched: Watched) -> None:
    """
    A worker or a gateway exports it, or a rule records it.
    """
    known = watched.scrape.names | gateway_scrape().names | recorded() | {"ALERTS"}

    assert {} == {place: missing for place, expr in queries() if (missing := metrics_in(expr) - known)}


def test_each_metric_of_a_worker_is_shown_somewhere(watched: Watched) -> None:
    """
    A metric that no dashboard has is one that nobody will look at, a gateway's too; those of the process are for
    other dashboards.
    """
    shown = {name for _, expr in queries() for name in metrics_in(expr)}
    bare = {name.removesuffix(suffix) for name in shown for suffix in ("", "_bucket", "_sum", "_count")}
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in (*watched.scrape.families, *gateway_scrape().families)
    }

    assert set() == {name for name in exported - bare if not name.startswith("process_")}


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_panels_have_ids_places_and_sources(name: str) -> None:
    """
    No two have one id, none lies over another or beyond the edge, and each asks the source that is provisioned.
    """
    (source,) = read_yaml(GRAFANA / "provisioning" / "datasources" / "prometheus.yml")["datasources"]
    found = dashboards()[name]["panels"]

    assert len(found) == len({panel["id"] for panel in found})
    taken: set[tuple[int, int]] = set()
    for panel in found:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < WIDTH
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
    for of, panel in panels():
        if of == name:
            assert panel["type"] in KINDS
            assert panel["description"].endswith((".", "?"))
            sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert {(source["type"], source["uid"])} == {(one["type"], one["uid"]) for one in sources}
            assert len(panel["targets"]) == len({target["refId"] for target in panel["targets"]}) > 0


def test_titles_of_a_dashboard_are_its_own() -> None:
    """
    The runbook names panels by them.
    """
    for name in dashboards():
        titles = [panel["title"] for of, panel in panels() if of == name]
        assert sorted(set(titles)) == sorted(titles)


def test_panels_that_the_runbook_names_exist() -> None:
    """
    What stands in quotes behind the name of a dashboard is a panel of it.
    """
    text = " ".join((GRAFANA.parents[1] / "docs" / "runbook.md").read_text().split())
    names = {"War room": "war-room.json", "Capacity": "capacity.json", "Root cause": "root-cause.json"}
    titles = {name: {panel["title"] for of, panel in panels() if of == file} for name, file in names.items()}
    named = re.findall(rf'({"|".join(names)})[,:][^".]*?"([^"]+)"', text)

    assert len(named) > 15
    assert [] == [(dashboard, title) for dashboard, title in named if title not in titles[dashboard]]
