"""What docs/settings.md says: all settings there are, as the programs take them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from docs.make_settings import PAGE
from pagemill.settings import ClientSettings, LogSettings
from producers.bulk.spec import BulkSpec, MapReduce
from producers.gateway.__main__ import main as gateway
from producers.gateway.settings import GatewaySettings
from producers.tasks.settings import CelerySettings, load_settings
from worker.settings import MetricsSettings, WorkerSettings

ROOT = PAGE.parent.parent
MODELS: tuple[type[BaseModel], ...] = (WorkerSettings, GatewaySettings, CelerySettings, BulkSpec, MapReduce)
# what a supervisor tells the worker that it starts
INTERNAL = {"supervised"}


def rows() -> list[list[str]]:
    """Cells of the page's tables of settings: name, flag, variable or default, ..."""
    lines = re.findall(r"^\| (`[a-z_]+` \| .*) \|$", PAGE.read_text(), re.MULTILINE)
    return [[cell.strip().strip("`") for cell in line.split(" | ")] for line in lines]


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_page_is_what_its_command_writes() -> None:
    """
    Who changes a setting runs `python -m docs.make_settings`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "docs.make_settings", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert (0, "", "") == (done.returncode, done.stdout.strip(), done.stderr)


def test_the_page_has_each_setting_once() -> None:
    """
    Of all models that there are; those that programs share stand where they are shared.
    """
    shown = [row[0] for row in rows()]
    fields = [name for model in MODELS for name in model.model_fields if name not in INTERNAL]
    shared = set(ClientSettings.model_fields)

    # the second one is of the worker's and the Celery side's, which have those of clients too
    expected = sorted([*(name for name in fields if name not in shared), *shared])
    assert expected == sorted(shown)


def test_all_models_of_settings_are_in_it() -> None:
    """
    A new class of settings needs a place on the page.
    """
    text = [
        path.read_text()
        for package in ("pagemill", "producers", "worker", "engine", "kernels")
        for path in (ROOT / package).rglob("*.py")
    ]
    found = {name for one in text for name in re.findall(r"^class (\w+)\([^)]*Settings[^)]*\)", one, re.MULTILINE)}

    known = {model.__name__ for model in (*MODELS, ClientSettings, LogSettings, MetricsSettings)}
    # errors, and the base of all
    assert {"Settings", "SettingsError"} >= found - known


def test_each_setting_says_what_it_means() -> None:
    """
    In a sentence of its own.
    """
    thin = [
        f"{model.__name__}.{name}"
        for model in MODELS
        for name, field in model.model_fields.items()
        if len((field.description or "").split()) < 2 or not (field.description or "").endswith(".")
    ]

    assert [] == thin


@pytest.mark.parametrize("title", ["The worker", "Metrics", "The gateway"])
def test_flags_of_the_page_are_in_the_programs_help(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    """
    By the same name.
    """
    with pytest.raises(SystemExit):
        gateway(["--help"]) if title == "The gateway" else WorkerSettings.read(["--help"])
    flags = set(re.findall(r"\| `(--[a-z-]+)` \|", section(title)))

    assert len(flags) > 5
    assert set() == flags - set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def test_variables_of_the_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Each is taken by the program whose setting it is, as strictly as at its start, and has the effect.
    """
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PAGEMILL_", "CELERY_"))]:
        monkeypatch.delenv(name)
    values = {
        "PAGEMILL_LEASE_S": "7.5",
        "PAGEMILL_KV_CACHE_BYTES": "3MiB",
        "PAGEMILL_CUDA_GRAPHS": "false",
        "PAGEMILL_GATEWAY_CORS_ORIGINS": "https://a.example, https://b.example",
        "PAGEMILL_CELERY_BEAT": '[{"name": "nightly", "cron": "0 2 * * *"}]',
    }
    named = {row[2]: row[3] for row in rows() if row[2].startswith("PAGEMILL_")}
    switches = {"on": "true", "off": "false"}
    for variable, default in named.items():
        if default not in ("unset", "none"):
            monkeypatch.setenv(variable, switches.get(default, default.replace(" bytes", "").replace(" ", "")))
    for variable, value in values.items():
        assert variable in named
        monkeypatch.setenv(variable, value)

    worker, served, celery = WorkerSettings.read([]), GatewaySettings.load(), load_settings()

    assert (7.5, 3 * 1024**2, False) == (worker.lease_s, worker.kv_cache_bytes, worker.cuda_graphs)
    assert ["https://a.example", "https://b.example"] == served.cors_origins
    assert "nightly" == celery.celery_beat[0].name
    assert WorkerSettings.model_fields["drain_s"].default == worker.drain_s
    assert GatewaySettings.model_fields["max_file_bytes"].default == served.max_file_bytes


@pytest.mark.parametrize("page", ["README.md", "docs/metrics.md", "docs/gateway.md", "docs/celery.md"])
def test_settings_that_other_pages_have_in_tables_exist(page: str) -> None:
    """
    Their short tables name real ones, and lead to the page that has all.
    """
    text = (ROOT / page).read_text()
    (table,) = re.findall(r"^\| setting \| default \| \|\n(?:\|.*\n)+", text, re.MULTILINE)
    names = {name for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)", cell)}
    known = {name for model in MODELS for name in model.model_fields}

    assert names
    # `autoscale_` stands for all that begin so
    assert set() == {
        name for name in names - known if not (name.endswith("_") and any(k.startswith(name) for k in known))
    }
    assert "settings.md" in text
