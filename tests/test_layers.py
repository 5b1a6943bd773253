import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pagemill", "kernels", "engine", "worker", "producers")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = {"kernels": 80}

SOURCES = sorted(path for package in (*PACKAGES, "benchmarks") for path in (ROOT / package).rglob("*.py"))


def run_elsewhere(code: str, folder: Path) -> str:
    """Run code in a fresh interpreter that does not stand in the checkout."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_imports_go_one_way() -> None:
    """
    The contracts of pyproject.toml hold: kernels, engine, worker, pagemill, producers.
    """
    command = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (0, "") == (done.returncode, "" if done.returncode == 0 else done.stdout)


@pytest.mark.parametrize("package", ["pagemill", "producers"])
def test_public_packages_leave_torch_alone(tmp_path: Path, package: str) -> None:
    """
    Importing every module of a package loads neither torch nor what stands on it.
    """
    code = f"""
import importlib, pkgutil, sys
import {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    importlib.import_module(module.name)
print([name for name in ("torch", "transformers", "tokenizers", "engine", "worker") if name in sys.modules])
"""

    assert "[]" == run_elsewhere(code, tmp_path).strip()


def test_top_level_names_are_ours(tmp_path: Path) -> None:
    """
    No installed package shadows one of our five; the Hub's `kernels` would be the likely one.
    """
    code = f"""
import importlib.util, json
print(json.dumps({{name: importlib.util.find_spec(name).origin for name in {PACKAGES!r}}}))
"""

    found = json.loads(run_elsewhere(code, tmp_path))

    assert {name: str(ROOT / name / "__init__.py") for name in PACKAGES} == found


def test_kernels_has_the_version_that_others_look_for() -> None:
    """
    Libraries that know the Hub's package of that name read a version, and take 0 for "too old".
    """
    spec = importlib.util.spec_from_file_location("ours", ROOT / "kernels" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert "0" == module.__version__


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    """
    A file that outgrows the limit is split by noun, a function by what it does.
    """
    text = path.read_text(encoding="utf-8")
    limit = MAX_FUNCTION_LINES.get(path.relative_to(ROOT).parts[0], 40)
    long = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # a docstring explains, and may take the room that it needs
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > limit:
                long[node.name] = lines

    assert {} == long
    assert len(text.splitlines()) <= MAX_FILE_LINES


def test_packages_export_nothing() -> None:
    """
    An `__init__` holds a docstring, and a version at most, so that imports say where things live.
    """
    for path in SOURCES:
        if path.name == "__init__.py":
            allowed = (ast.Expr, ast.Assign)
            assert all(isinstance(node, allowed) for node in ast.parse(path.read_text()).body), path


def test_tests_are_no_packages() -> None:
    """
    No folder of tests is a package: they mirror the rooms, whose names they must not take.
    """
    assert [] == [str(path) for path in (ROOT / "tests").rglob("__init__.py")]
