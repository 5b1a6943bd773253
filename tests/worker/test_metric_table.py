"""docs/metrics.md names what there is."""

from pagemill.settings import LogSettings
from tests.support.metric_table import PAGE, SECTIONS, rows, with_tables
from worker.settings import MetricsSettings


def test_the_page_lists_each_metric_as_the_code_has_it() -> None:
    """
    Name, kind, labels and meaning; `python -m tests.support.metric_table` writes them anew.
    """
    page = PAGE.read_text()

    assert with_tables(page) == page
    assert all(f"<!-- {section} -->\n|" in page for section in SECTIONS)
    assert all(f"| `{name}` |" in page for name, *_ in rows())


def test_names_are_in_base_units() -> None:
    """
    Seconds, bytes, joules, watts, ratios of 1; counters end in _total; no job and no tenant is a label.
    """
    for name, kind, labels, text in rows():
        assert (kind == "counter") == name.endswith("_total"), name
        if not name.startswith("vllm:"):
            assert not any(unit in name for unit in ("_ms", "_milli", "_percent", "_kb", "_mb")), name
        assert {"job_id", "job", "worker", "instance"}.isdisjoint(labels), name
        assert text.endswith("."), name
        assert ("tenant" in labels) == (name == "pagemill_tenant_tokens_total")


def test_the_page_has_all_settings_of_metrics() -> None:
    """
    Those that an exporter takes beside the queue's address.
    """
    page = PAGE.read_text()
    for name in MetricsSettings.model_fields:
        elsewhere = name.startswith("autoscale_") or name in ("redis_url", "queue", *LogSettings.model_fields)
        assert elsewhere or f"`{name}`" in page, name
