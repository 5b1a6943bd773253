"""What a bulk job is, and where it is written down."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from pagemill.settings import ClientSettings
from producers.bulk.errors import SpecError
from producers.bulk.spec import BulkSpec, assign, merge, read_file, read_section

FIELDS: dict[str, Any] = {"input": "in.jsonl", "output": "file:///out"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "input: Field required"),
        ({"inptu": "x"}, "inptu: unknown field"),
        ({"options": {"n": 2}}, "a row has one answer"),
        ({"options": {"max_token": 2}}, r"options\.max_token: unknown field"),
        ({"lane": "slow"}, "lane: "),
        ({"deadline": "2026-12-01T06:00:00"}, "timezone"),
        ({"max_jobs": 0}, "max_jobs: "),
        ({"prompt_price": -1}, "prompt_price: "),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    """
    A misspelt or impossible setting stops the job, with its place.
    """
    with pytest.raises(SpecError, match=message):
        BulkSpec.build(FIELDS | fields if fields else {})


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"max_jobs": 1}, True),
        ({"prompt_price": 1.0}, True),
        ({"deadline": "2026-12-01T06:00:00Z"}, True),
        ({"output": "file:///other"}, True),
        ({"template": "translate"}, False),
        ({"options": {"max_tokens": 7}}, False),
        ({"params": {"words": 3}}, False),
        ({"rows_per_chunk": 3}, False),
        ({"output_format": "parquet"}, False),
    ],
)
def test_the_fingerprint_is_of_what_comes_out(fields: dict[str, Any], same: bool) -> None:
    """
    How fast and at what price does not make another job, what is asked does.
    """
    assert same == (BulkSpec.build(FIELDS).fingerprint() == BulkSpec.build(FIELDS | fields).fingerprint())


def test_only_what_makes_no_other_job_can_change() -> None:
    """
    A resumed job may get other limits, not another prompt.
    """
    spec = BulkSpec.build(FIELDS)

    assert 5 == spec.changed({"max_jobs": 5}).max_jobs
    with pytest.raises(SpecError, match="model of a job that has begun"):
        spec.changed({"model": "x"})
    with pytest.raises(SpecError, match="max_jobs"):
        spec.changed({"max_jobs": -5})


def test_a_day_is_put_into_both_urls() -> None:
    """
    {date} stands for the day, as 2026-12-01.
    """
    spec = BulkSpec.build({"input": "s3://b/{date}/in/", "output": "s3://b/{date}/out/"})

    on = spec.on(date(2026, 12, 1))

    assert ("s3://b/2026-12-01/in/", "s3://b/2026-12-01/out/") == (on.input, on.output)
    assert (True, False) == (spec.has_date, on.has_date)


def test_named_jobs_stand_in_the_settings(tmp_path: Path) -> None:
    """
    A section is read by its name; one that is not there is told with those that are.
    """
    path = tmp_path / "pagemill.toml"
    path.write_text('queue = "q"\n[bulk.nightly]\ninput = "i"\noutput = "o"\n[bulk.nightly.options]\nmax_tokens = 3\n')
    environment = {"PAGEMILL_CONFIG": str(path)}

    fields = read_section("nightly", environment)

    assert {"name": "nightly", "input": "i", "output": "o", "options": {"max_tokens": 3}} == fields
    with pytest.raises(SpecError, match=r"no \[bulk\.weekly\]; it has nightly"):
        read_section("weekly", environment)


def test_other_programs_do_not_mind_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A client that reads the same file takes its settings and leaves the jobs alone.
    """
    (tmp_path / "pagemill.toml").write_text('queue = "q"\n[bulk.nightly]\ninput = "i"\n')
    monkeypatch.chdir(tmp_path)

    assert "q" == ClientSettings.load().queue


def test_files_are_toml_or_json(tmp_path: Path) -> None:
    """
    Either says the same; what is neither is refused with its name.
    """
    (tmp_path / "a.toml").write_text('input = "i"')
    (tmp_path / "a.json").write_text('{"input": "i"}')
    (tmp_path / "b.toml").write_text("input: i")
    (tmp_path / "b.json").write_text("[]")

    assert {"input": "i"} == read_file(tmp_path / "a.toml") == read_file(tmp_path / "a.json")
    for name in ("b.toml", "b.json", "none.toml"):
        with pytest.raises(SpecError, match=name):
            read_file(tmp_path / name)


def test_assignments_are_json_or_text() -> None:
    """
    Numbers and lists are what they look like; later ones go over earlier ones, table by table.
    """
    assert {"n": 3, "labels": ["a"], "word": "yes"} == assign(["n=3", 'labels=["a"]', "word=yes"], "-o")
    assert {"options": {"a": 1, "b": 2}, "x": 1} == merge({"options": {"a": 1}, "x": 1}, {"options": {"b": 2}})
    with pytest.raises(SpecError, match="--param words: want NAME=VALUE"):
        assign(["words"], "--param")
