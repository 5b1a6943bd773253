"""docs/tuning.md names settings, metrics and commands that exist; so do the other pages with metrics."""

import re

import pytest

from tests.support.metric_table import rows
from tests.support.pages import ROOT, pages, prose, text_of
from tests.support.scrapes import gateway_scrape
from worker.settings import WorkerSettings

PAGE = ROOT / "docs/tuning.md"
PARTS = ("**What it does.**", "**When.**", "**See it.**", "**Measure it.**")


def entries() -> dict[str, str]:
    """By heading, those that are of a setting."""
    found = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)+)", prose(PAGE), re.MULTILINE))
    return {heading: text for heading, text in found.items() if heading != "More workers"}


def test_each_entry_has_its_four_parts() -> None:
    """
    What it does, when to change it, the metrics that show it, the command that measures it.
    """
    assert len(entries()) > 12
    for heading, text in entries().items():
        places = [text.find(part) for part in PARTS]
        assert -1 not in places, heading
        assert sorted(places) == places, heading


def test_settings_exist() -> None:
    """
    What a page gives a value, or an entry speaks of at its beginning.
    """
    named = set(re.findall(r"`([a-z][a-z_]+)=[^`]*`", text_of(PAGE)))
    for text in entries().values():
        named |= set(re.findall(r"`([a-z]+_[a-z_]+)`", text.partition(PARTS[1])[0]))

    assert len(named) > 15
    assert set() == named - set(WorkerSettings.model_fields)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_exist(page: object) -> None:
    """
    Each that a page names is exported by a worker, an exporter or a gateway.
    """
    known = {name for name, *_ in rows()} | gateway_scrape().names
    parts = {f"{name}{end}" for name in known for end in ("_bucket", "_count", "_sum")}
    named = set(re.findall(r"\bpagemill_[a-z_]+[a-z]\b(?!\()", text_of(page)))  # type: ignore[arg-type]

    # the names of a dashboard's file, a store's folder and a program's module are none
    assert set() == {name for name in named if name.count("_") > 1} - known - parts
