"""The Dockerfile: its stages, and what an image of each would be."""

import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser

from tests.support.deploy import ROOT

FILE = ROOT / "Dockerfile"


@dataclass(frozen=True, slots=True)
class Stage:
    """
    One stage.

    Args:
        base: The stage that it stands on, or an image.
        steps: Instructions and what follows them, in order, without FROM.
    """

    name: str
    base: str
    steps: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A COPY: what of the checkout, or of another stage, goes where."""

    sources: tuple[str, ...]
    target: str
    stage: str | None


def stages(path: Path = FILE) -> dict[str, Stage]:
    """By name, in order."""
    parser = DockerfileParser(fileobj=io.BytesIO(path.read_bytes()))
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    name = ""
    for step in parser.structure:
        kind, value = step["instruction"], step["value"]
        if kind == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", value)
            assert match is not None, f"{value}: name the stage"
            base, name = match.groups()
            found[name] = (base, [])
        elif kind != "COMMENT" and name:
            found[name][1].append((kind, value))
    return {name: Stage(name, base, tuple(steps)) for name, (base, steps) in found.items()}


def lineage(name: str) -> list[Stage]:
    """A stage and those that it stands on, the lowest first."""
    known = stages()
    line = [known[name]]
    while (base := line[0].base) in known:
        line.insert(0, known[base])
    return line


def steps(name: str, kind: str) -> Iterator[str]:
    """All instructions of one kind that made a stage's image, in order."""
    for stage in lineage(name):
        yield from (value for step, value in stage.steps if step == kind)


def environ(name: str) -> dict[str, str]:
    """What ENV sets in an image; the PATH of the image that all stand on is not known here."""
    pairs = [word.partition("=") for value in steps(name, "ENV") for word in shlex.split(value)]
    return {key: value for key, _, value in pairs}


def copies(name: str) -> list[Copy]:
    made = []
    for value in steps(name, "COPY"):
        words = shlex.split(value)
        flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        made.append(Copy(tuple(sources), target, flags.get("from")))
    return made


def last(name: str, kind: str) -> str | None:
    """The one that holds, of an instruction that each stage may repeat: USER, CMD, ENTRYPOINT, HEALTHCHECK, WORKDIR."""
    found = list(steps(name, kind))
    return found[-1] if found else None


def words(name: str, kind: str) -> list[str]:
    """CMD or ENTRYPOINT as a list; empty where there is none."""
    value = last(name, kind)
    return json.loads(value) if value else []


def pip_installs(name: str) -> list[list[str]]:
    """Each `pip install` whose result is in a stage's image, as its arguments."""
    sources = {copy.stage for copy in copies(name) if copy.stage} | {name}
    found = []
    for source in sorted(sources):
        for value in steps(source, "RUN"):
            for line in re.split(r"&&|;", value):
                arguments = shlex.split(line)
                if "install" in arguments and "pip" in arguments:
                    found.append(arguments[arguments.index("install") + 1 :])
    return found
