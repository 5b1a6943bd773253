import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.errors import SettingsError
from pagemill.settings import ClientSettings
from producers.gateway.__main__ import _parser, main
from producers.gateway.settings import GatewaySettings
from producers.openai_api.jobs import Terms, normalised
from worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_flags_go_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """
    The file's table [gateway], PAGEMILL_GATEWAY_*, flags; lists with commas between.
    """
    (tmp_path / "pagemill.toml").write_text(
        '[gateway]\nport = 1\nhost = "::1"\ncors_origins = ["a"]\ntimeout_s = 7\nmax_file_bytes = "3MiB"\n'
    )
    monkeypatch.setenv("PAGEMILL_GATEWAY_PORT", "2")
    monkeypatch.setenv("PAGEMILL_GATEWAY_HOST", "::2")
    monkeypatch.setenv("PAGEMILL_GATEWAY_CORS_ORIGINS", "https://a.example, https://b.example")

    made = GatewaySettings.load(port=3)

    assert (3, "::2", 7.0, 3 * 1024**2) == (made.port, made.host, made.timeout_s, made.max_file_bytes)
    assert ["https://a.example", "https://b.example"] == made.cors_origins


def test_other_programs_pass_the_gateways_settings_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    A worker and a client may share file and environment with it.
    """
    (tmp_path / "pagemill.toml").write_text('queue = "q"\n[gateway]\nport = 1\n')
    monkeypatch.setenv("PAGEMILL_GATEWAY_NO_AUTH", "true")

    assert "q" == ClientSettings.load().queue
    assert "q" == WorkerSettings.load().queue


@pytest.mark.parametrize("name", ["PAGEMILL_GATEWAY_PROT", "PAGEMILL_GATEWAY_XYZZY"])
def test_unknown_names_are_errors(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """
    A misspelt setting would leave the default in silence.
    """
    monkeypatch.setenv(name, "1")

    with pytest.raises(SettingsError, match=name.rpartition("_")[2].lower()):
        GatewaySettings.load()


def test_wrong_values_are_errors() -> None:
    """
    With the name and what was given.
    """
    with pytest.raises(SettingsError, match="drop_system_lines"):
        GatewaySettings.load(drop_system_lines=["("])
    with pytest.raises(SettingsError, match="port"):
        GatewaySettings.load(port="many")


def test_a_port_in_use_is_named() -> None:
    """
    The address that is taken, and what to change.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-P", "-m", "producers.gateway", "--no-auth", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert 2 == done.returncode
    assert f"cannot listen at 127.0.0.1:{port}: choose another" in done.stderr


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """
    The extra that brings it is named, without a traceback.
    """
    monkeypatch.setattr("producers.extras.find_spec", lambda _: None)

    assert 2 == main(["--no-auth"])

    assert "'.[gateway]'" in capsys.readouterr().err


def test_the_help_shows_defaults() -> None:
    """
    Of each setting that has one; a list that is empty has none.
    """
    told = " ".join(_parser().format_help().split())

    assert "(default: 127.0.0.1)" in told
    assert "(default: 8000)" in told
    assert "Undefined" not in told


def test_each_setting_is_a_flag() -> None:
    """
    A switch is on where it is given, also one that begins with "no".
    """
    given = vars(_parser().parse_args(["--no-auth", "--port", "5", "--cors-origins", "a", "--cors-origins", "b"]))

    assert set(GatewaySettings.model_fields) <= set(given)
    assert (True, "5", ["a", "b"], None) == (
        given["no_auth"],
        given["port"],
        given["cors_origins"],
        given["normalise_system_prompts"],
    )


def test_system_prompts_become_one_where_they_mean_the_same() -> None:
    """
    White space and lines that the operator names are evened out; a user's text is never touched.
    """
    terms = Terms(normalise=True, drop_lines=GatewaySettings.load(drop_system_lines=["^Today is "]).patterns)
    texts = ("Be kind.\r\nToday is Monday.\r\n\r\n\r\n\r\nBe  brief. ", " Be kind. \nToday is Friday.\n\n\nBe\tbrief.")

    assert {"Be kind.\n\nBe brief."} == {normalised(text, terms) for text in texts}
    assert texts[0] == normalised(texts[0], Terms())
