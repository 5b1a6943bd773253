"""What the Dockerfile says: stages that exist, users that are not root, no torch where none is wanted."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pathspec
import pytest
from packaging.requirements import Requirement

from tests.support import compose, dockerfile, server_box
from tests.support.deploy import ROOT

IMAGES = ("client", "gateway", "worker-cpu", "worker-gpu")
# what each of our top folders needs beside it
NEEDS = {"producers": {"pagemill"}, "worker": {"pagemill"}, "engine": {"kernels"}}


def extras() -> dict[str, list[str]]:
    """Of pyproject.toml."""
    found: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return found


def extras_of(image: str) -> set[str]:
    """Those that are installed into an image."""
    (arguments,) = dockerfile.pip_installs(image)
    found = re.fullmatch(r"\.(?:\[(.*)\])?", arguments[-1])
    assert found is not None, arguments
    return set(filter(None, (found[1] or "").split(",")))


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps it from the builder; for our patterns Docker's rules are those of .gitignore."""
    spec = pathspec.PathSpec.from_lines("gitignore", (ROOT / ".dockerignore").read_text().splitlines())
    return spec.match_file(path)


def test_the_stages_are_those_that_compose_builds_and_docs_name() -> None:
    """
    Four images, which stand on each other or on one pinned image of Python.
    """
    stages = dockerfile.stages()
    built = {service.target for service in compose.load("*").values() if service.target}

    assert set(IMAGES) <= stages.keys()
    assert built == set(IMAGES) - {"client"}
    assert {"${PYTHON_IMAGE}"} == {stage.base for stage in stages.values()} - stages.keys()
    text = dockerfile.FILE.read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)


def test_hadolint_finds_nothing() -> None:
    """
    What it is told to pass over is so in the file, with the reason.
    """
    program = server_box.find("hadolint")
    if program is None:
        pytest.skip("there is no hadolint here: `python -m tests.support.server_box` fetches it")

    done = subprocess.run([program, dockerfile.FILE], capture_output=True, text=True, check=False)

    assert (0, "") == (done.returncode, done.stdout)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_does_not_run_as_root(image: str) -> None:
    """
    By number, which is what Kubernetes can check.
    """
    user = dockerfile.last(image, "USER")

    assert user is not None
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("image", IMAGES)
def test_all_that_is_copied_is_there_and_not_ignored(image: str) -> None:
    """
    What comes from the checkout exists and reaches the builder; what comes from a stage, the stage.
    """
    known = dockerfile.stages()
    for copy in [*dockerfile.copies(image), *dockerfile.copies(f"build-{image}")]:
        if copy.stage:
            assert copy.stage in known
            continue
        for source in copy.sources:
            assert (ROOT / source).exists(), source
            assert not is_ignored(source), source


@pytest.mark.parametrize("path", [".git", ".env", ".venv", "tests", "docs", "pagemill/__pycache__", "worker/a.pyc"])
def test_what_no_image_needs_does_not_reach_the_builder(path: str) -> None:
    """
    No secrets, no history, nothing that would change a layer for nothing.
    """
    assert is_ignored(path)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_extras_that_exist_with_the_versions_that_were_tested(image: str) -> None:
    """
    Each `pip install` has the constraints.
    """
    (arguments,) = dockerfile.pip_installs(image)

    assert extras_of(image) <= extras().keys()
    assert "--constraint" in arguments


def test_the_client_brings_nothing_but_itself() -> None:
    """
    No extra, and none of the programs.
    """
    assert set() == extras_of("client")
    assert {"/opt/venv"} == {source for copy in dockerfile.copies("client") for source in copy.sources}


def test_the_gateway_has_its_programs_and_no_torch() -> None:
    """
    Neither directly, nor as what an extra of its names.
    """
    wanted = {"gateway", "bulk", "celery", "otel"}
    names = {Requirement(line).name for extra in wanted for line in extras()[extra]}

    assert wanted == extras_of("gateway")
    assert {"torch", "transformers", "xgrammar", "triton"}.isdisjoint(names)
    assert {"engine", "kernels"}.isdisjoint(source for copy in dockerfile.copies("gateway") for source in copy.sources)


@pytest.mark.parametrize("image", ["worker-cpu", "worker-gpu"])
def test_a_worker_has_the_engine_and_can_follow_schemas(image: str) -> None:
    """
    And keeps models where a volume is, and computes on its own device or not at all.
    """
    assert {"worker-cpu": "cpu", "worker-gpu": "cuda"}[image] == dockerfile.environ(image)["PAGEMILL_DEVICE"]
    assert {"worker", "structured", "otel"} == extras_of(image)
    assert {"pagemill", "worker", "engine", "kernels"} <= {
        one for copy in dockerfile.copies(image) for one in copy.sources
    }
    assert dockerfile.environ(image)["PAGEMILL_CACHE"] == dockerfile.last(image, "VOLUME") == "/cache"


@pytest.mark.parametrize("image", ["gateway", "worker-cpu", "worker-gpu"])
def test_an_image_has_all_folders_that_its_code_imports(image: str) -> None:
    """
    As the layers of the project say.
    """
    copied = {source for copy in dockerfile.copies(image) for source in copy.sources}

    for folder in copied & NEEDS.keys():
        assert NEEDS[folder] <= copied
    assert "pyproject.toml" in copied, "an editable install is of the project"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_that_serves_says_how_it_is(image: str) -> None:
    """
    Those with a port have a health check, of that port.
    """
    port, check = dockerfile.last(image, "EXPOSE"), dockerfile.last(image, "HEALTHCHECK")

    assert (image == "client") == (port is None) == (check is None)
    assert port is None or check is None or f"127.0.0.1:{port}/" in check


def test_the_gpu_image_differs_in_three_packages() -> None:
    """
    torch, its Triton, and what that torch forbids; each is one that the others pin too.
    """
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line)
    gpu = dict(line.split("==") for line in (ROOT / "deploy/docker/constraints-gpu.txt").read_text().split())

    assert {"torch", "triton", "setuptools"} == gpu.keys()
    assert gpu.keys() <= pinned.keys()


def play_copies(stage: str, app: Path) -> None:
    """What the COPYs of a stage bring from the checkout into its folder."""
    for copy in (copy for copy in dockerfile.copies(stage) if copy.stage is None):
        for source in copy.sources:
            place = app / copy.target / Path(source).name if copy.target.endswith("/") else app / copy.target
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "modules", "commands"),
    [
        ("client", ["pagemill.cli", "pagemill.client"], ["pagemill --version"]),
        (
            "gateway",
            [
                "producers.gateway.app",
                "producers.celery_app",
                "producers.tasks.completer",
                "worker.exporter",
                "pagemill.trace_export",
            ],
            ["pagemill gateway --help", "pagemill bulk --help", "celery -A producers.celery_app report"],
        ),
    ],
)
def test_an_image_that_is_put_together_by_hand_works(
    image: str, modules: list[str], commands: list[str], tmp_path: Path
) -> None:
    """
    The Dockerfile's steps in an environment and a folder of their own: pip resolves, all packages agree, the programs
    start, and torch does not come.
    """
    app, python = tmp_path / "app", tmp_path / "venv" / "bin" / "python"
    venv.create(tmp_path / "venv", with_pip=True)
    play_copies(f"build-{image}", app)
    (arguments,) = dockerfile.pip_installs(image)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def does(*command: object, folder: Path = tmp_path) -> str:
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr
        return done.stdout

    does(python, "-m", "pip", "install", "--quiet", *arguments, folder=app)
    does(python, "-m", "pip", "check")
    if image == "client":
        shutil.rmtree(app)
    else:
        play_copies(image, app)
    does(python, "-P", "-c", f"import importlib; [importlib.import_module(name) for name in {modules!r}]")
    for command in commands:
        does(python.parent / command.split()[0], *command.split()[1:])
    listed = does(python, "-m", "pip", "freeze")
    assert {"torch", "triton", "transformers"}.isdisjoint(line.split("==")[0] for line in listed.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("image", ["worker-cpu", "worker-gpu"])
def test_what_a_worker_installs_can_be_resolved(image: str, tmp_path: Path) -> None:
    """
    As far as a dry run goes, from the indexes that this machine has.
    """
    shared, own = (ROOT / name for name in ("constraints.txt", "deploy/docker/constraints-gpu.txt"))
    gpu = own.read_text().split()
    names = tuple(f"{line.split('==')[0]}==" for line in gpu)
    lines = shared.read_text().splitlines()
    if image == "worker-gpu":
        lines = [line for line in lines if not line.startswith(names)] + gpu
    (tmp_path / "constraints.txt").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]

    done = subprocess.run(
        [*command, "--constraint", str(tmp_path / "constraints.txt"), dockerfile.pip_installs(image)[0][-1]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stderr
