"""
A headless Chromium for tests of pages: one on the PATH, or Debian's own, unpacked into the box of servers.

    python -m tests.support.chromium

fills the box: the browser, what the system lacks of its libraries, and a font. Nothing of the system is changed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.support.server_box import BOX

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PACKAGES = ("chromium-headless-shell", "fonts-inter")

_FOLDER = BOX / "chromium"
_BINARY = _FOLDER / "usr/lib/chromium/chromium-headless-shell"
_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{folder}/fonts</cachedir></fontconfig>
"""


def find() -> Path | None:
    """The browser, or None where it is not here."""
    if _BINARY.exists():
        return _BINARY
    found = (shutil.which(name) for name in NAMES)
    return next((Path(path) for path in found if path), None)


def fill() -> Path:
    """
    Fetch it, unless it is here.

    Raises:
        OSError: it cannot be had.
    """
    here = find()
    if here is not None:
        return here
    BOX.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BOX) as scratch:
        # apt gives its rights up to download, and then may not write into a folder of ours
        folder = Path(scratch)
        folder.chmod(0o755)
        own = ["-o", f"Dir::State::lists={scratch}/lists", "-o", f"Dir::Cache={scratch}/cache"]
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        _run("apt-get", *own, "update")
        told = _run("apt-get", *own, "install", "--simulate", "--no-install-recommends", *PACKAGES)
        lacking = [line.split()[1] for line in told.splitlines() if line.startswith("Inst ")]
        _run("apt-get", *own, "download", *lacking, folder=folder)
        unpacked = folder / "unpacked"
        for deb in folder.glob("*.deb"):
            _run("dpkg-deb", "--extract", str(deb), str(unpacked))
        shutil.rmtree(_FOLDER, ignore_errors=True)
        unpacked.rename(_FOLDER)
    return _BINARY


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """
    A browser that runs until the context is left.

    Raises:
        OSError: there is none: see `fill`.
    """
    program = find()
    if program is None:
        raise OSError("there is no Chromium here: python -m tests.support.chromium fetches it")
    libraries = [str(path) for path in (_FOLDER / "usr/lib").glob("*-linux-gnu*")]
    # one of them keeps its own in a folder
    libraries += [f"{path}/pulseaudio" for path in libraries]
    fonts = _FOLDER / "fonts.conf"
    environment = dict(os.environ) | {"LD_LIBRARY_PATH": ":".join(libraries)}
    if program == _BINARY:
        fonts.write_text(_FONTS.format(folder=_FOLDER))
        environment["FONTCONFIG_FILE"] = str(fonts)
    with sync_playwright() as playwright:
        # its sandbox needs rights that containers seldom have; it opens pages of this machine alone
        browser = playwright.chromium.launch(executable_path=program, env=environment, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def _run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=600, env=os.environ | {"LC_ALL": "C"}
    )
    if done.returncode != 0:
        raise OSError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(fill())
    except OSError as error:
        print(f"Chromium cannot be fetched: {error}", file=sys.stderr)
        sys.exit(1)
