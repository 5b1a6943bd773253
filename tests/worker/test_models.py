from pathlib import Path

import pytest

from engine.errors import ModelNotFound
from worker.models import CATALOGUE, main, models_root, pull, resolve_model


def test_cache_follows_the_environment(tmp_path: Path) -> None:
    """
    PAGEMILL_CACHE moves the models; without it they lie in the home folder.
    """
    assert tmp_path / "models" == models_root({"PAGEMILL_CACHE": str(tmp_path)})
    assert Path.home() / ".cache" / "pagemill" / "models" == models_root({})


def test_folder_and_pulled_names_resolve(tmp_path: Path) -> None:
    """
    A folder stands for itself, a name or a hub id for its folder below the root.
    """
    packaged = tmp_path / CATALOGUE["smollm2"].folder
    from_hub = tmp_path / "acme--tiny"
    packaged.mkdir()
    from_hub.mkdir()

    assert tmp_path == resolve_model(tmp_path, tmp_path)
    assert packaged == resolve_model("smollm2", tmp_path)
    assert from_hub == resolve_model("acme/tiny", tmp_path)
    assert packaged == pull("smollm2", tmp_path)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("smollm2", "pagemill models pull smollm2"),
        ("acme/tiny", "pagemill models pull acme/tiny"),
        ("/no/such/folder", "there is no model folder"),
        ("/no/such/file.gguf", "there is no file"),
    ],
)
def test_missing_models_say_how_to_get_them(tmp_path: Path, name: str, remedy: str) -> None:
    """
    Every way to be missing has a message that names the next step.
    """
    with pytest.raises(ModelNotFound, match=remedy):
        resolve_model(name, tmp_path)


def test_pulling_an_unknown_name_lists_the_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    The command ends with code 1 and one line that lists what there is.
    """
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path))

    assert 1 == main(["pull", "smollm3"])
    assert "smollm2" in capsys.readouterr().err


def test_list_shows_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    The catalogue and the folders that are there, unfinished ones left out.
    """
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path))
    for name in ("acme--tiny", ".fetch-unfinished"):
        (tmp_path / "models" / name).mkdir(parents=True)

    assert 0 == main(["list"])

    lines = capsys.readouterr().out.splitlines()
    assert ["smollm2", "acme/tiny"] == [line.split()[0] for line in lines]
    assert "not pulled" in lines[0]


def test_of_two_pulls_at_once_both_have_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    As of two machines that share the folder: who comes second takes the first one's, and leaves nothing behind.
    """
    others = tmp_path / "owner--name"

    def download(hub_id: str, *, local_dir: Path, **_: object) -> None:
        (local_dir / "config.json").write_text(f'"{hub_id}"')
        # the other one is done in this moment
        others.mkdir()
        (others / "config.json").write_text('"of the other"')

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = pull("owner/name", tmp_path)

    assert (others, '"of the other"') == (found, (found / "config.json").read_text())
    assert [others] == list(tmp_path.iterdir())
