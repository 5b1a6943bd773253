"""Where settings come from, and what is said of wrong ones."""

from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import EngineConfig
from pagemill.errors import SettingsError
from pagemill.settings import ClientSettings
from worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flags_go_before_the_environment_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Of one setting the flag counts, else the variable, else the line of the file, else the default.
    """
    (tmp_path / "pagemill.toml").write_text("lease_s = 1\ndrain_s = 2\nmax_num_seqs = 3\n")
    monkeypatch.setenv("PAGEMILL_LEASE_S", "10")
    monkeypatch.setenv("PAGEMILL_DRAIN_S", "20")
    settings = WorkerSettings.read(["--lease-s", "100"])

    assert (100, 20, 3, 16) == (settings.lease_s, settings.drain_s, settings.max_num_seqs, settings.block_size)


def test_flags_are_switches_and_sizes_have_units() -> None:
    """
    A yes-or-no setting is a flag and its --no- form; a size takes GiB.
    """
    settings = WorkerSettings.read(["--no-prefix-caching", "--allow-unsafe-redis", "--kv-cache-bytes", "2GiB"])

    assert (False, True, 2 * 1024**3) == (
        settings.prefix_caching,
        settings.allow_unsafe_redis,
        settings.kv_cache_bytes,
    )


def test_the_engine_can_be_set_as_a_whole() -> None:
    """
    Each of its settings is one of the worker's, with the same default; only the model may be missing here.
    """
    for field in fields(EngineConfig):
        setting = WorkerSettings.model_fields[field.name]
        assert field.name == "model" or field.default == setting.default


def test_the_gpu_has_its_flags() -> None:
    """
    The device, its share of memory and its graphs are set by name; what depends on the device is left open.
    """
    settings = WorkerSettings.read(["--device", "cuda", "--gpu-memory-utilization", "0.5", "--no-cuda-graphs"])

    assert ("cuda", 0.5, False) == (settings.device, settings.gpu_memory_utilization, settings.cuda_graphs)
    assert settings.max_num_seqs is None
    assert settings.max_num_batched_tokens is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-num-sequences", "3"], "did you mean --max-num-seqs?"),
        (["--zzz"], "see --help"),
        (["--engine", "real"], "'paged' or 'fake'"),
        (["--block-size", "none"], "block_size"),
        (["--device", "gpu"], "'auto', 'cpu' or 'cuda'"),
        (["--kv-cache-dtype", "int8"], "'auto' or 'fp8'"),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization"),
        (["--gpu-memory-utilization", "0"], "gpu_memory_utilization"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_flag_is_explained(flags: list[str], said: str) -> None:
    """
    The message names the flag and what it could have been.
    """
    with pytest.raises(SettingsError, match=said.replace("?", r"\?")):
        WorkerSettings.read(flags)


def test_an_unknown_line_of_the_file_is_refused(tmp_path: Path) -> None:
    """
    A misspelt name in pagemill.toml is an error that names the right one.
    """
    (tmp_path / "pagemill.toml").write_text("lease = 1\n")

    with pytest.raises(SettingsError, match="lease_s"):
        WorkerSettings.read([])


def test_every_setting_is_described_and_the_client_can_share_the_file() -> None:
    """
    Each flag has its line of help, and the client's settings are among the worker's, with their defaults.
    """
    assert [] == [name for name, field in WorkerSettings.model_fields.items() if not field.description]
    for name, field in ClientSettings.model_fields.items():
        assert field.default == WorkerSettings.model_fields[name].default
