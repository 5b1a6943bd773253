"""Settings: precedence, and names that nothing knows."""

from pathlib import Path

import pytest

from pagemill.errors import SettingsError
from pagemill.settings import ClientSettings, Settings


class OtherSettings(Settings):
    lease_s: float = 30.0


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_arguments_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Each setting comes from the first place that has it.
    """
    (tmp_path / "pagemill.toml").write_text('redis_url = "redis://file"\nqueue = "file"\nobject_store = "file:///f"\n')
    monkeypatch.setenv("PAGEMILL_QUEUE", "environment")
    monkeypatch.setenv("PAGEMILL_REDIS_URL", "redis://environment")

    settings = ClientSettings.load(redis_url="redis://argument", queue=None)

    assert ("redis://argument", "environment", "file:///f") == (
        settings.redis_url,
        settings.queue,
        settings.object_store,
    )


def test_the_file_can_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    PAGEMILL_CONFIG names the file; one that is not there is said.
    """
    path = tmp_path / "other.toml"
    path.write_text('queue = "other"')
    monkeypatch.setenv("PAGEMILL_CONFIG", str(path))
    assert "other" == ClientSettings.load().queue

    path.unlink()
    with pytest.raises(SettingsError, match=r"other\.toml"):
        ClientSettings.load()


def test_an_unknown_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A misspelt variable is named with the nearest known one.
    """
    monkeypatch.setenv("PAGEMILL_REDIS_ULR", "x")

    for strict in (True, False):
        with pytest.raises(SettingsError, match=r"unknown setting PAGEMILL_REDIS_ULR: did you mean PAGEMILL_REDIS_URL"):
            ClientSettings.load(strict=strict)


def test_an_unknown_name_in_the_file(tmp_path: Path) -> None:
    """
    A misspelt line of the file is named with the file.
    """
    (tmp_path / "pagemill.toml").write_text("quue = 1")

    with pytest.raises(SettingsError, match=r"pagemill\.toml: quue: did you mean .*queue"):
        ClientSettings.load()


def test_names_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A worker's setting is no fault in a client's environment, where it is known or not strict.
    """
    monkeypatch.setenv("PAGEMILL_LEASE_S", "5")

    with pytest.raises(SettingsError, match="PAGEMILL_LEASE_S"):
        ClientSettings.load()
    assert "default" == ClientSettings.load(also=[OtherSettings]).queue == ClientSettings.load(strict=False).queue


def test_a_value_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A wrong value is shown with the setting's name.
    """
    monkeypatch.setenv("PAGEMILL_MAX_QUEUED_TOKENS", "-1")

    with pytest.raises(SettingsError, match=r"PAGEMILL_MAX_QUEUED_TOKENS .* '-1'"):
        ClientSettings.load()


def test_a_broken_file(tmp_path: Path) -> None:
    """
    A file that is no TOML is named.
    """
    (tmp_path / "pagemill.toml").write_text("queue = ")

    with pytest.raises(SettingsError, match=r"pagemill\.toml is not TOML"):
        ClientSettings.load()
