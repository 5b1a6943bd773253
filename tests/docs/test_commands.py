"""The commands that the pages name exist, with the flags that they give them."""

import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import typer

from pagemill.cli import app
from tests.support.pages import ROOT, commands, pages

# what migration.md comes from
OF_OTHERS = ("vllm.",)
# words that stand for one of the reader's own
PLACEHOLDERS = re.compile(r"^(\.\.\.|…|[A-Z_]+\.?\.*)$")


def named(program: str) -> list[tuple[str, list[str]]]:
    """Where a program is named, and the words after its name."""
    found = []
    for page in pages():
        for where, words in commands(page):
            name = words[0].removeprefix(".venv/bin/")
            if name == program:
                found.append((where, words[1:]))
    return found


@cache
def help_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout if done.returncode == 0 else ""


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))


def given_flags(words: list[str]) -> set[str]:
    before = words[: words.index("--")] if "--" in words else words
    return {word.partition("=")[0] for word in before if re.match(r"--?[a-zA-Z]", word)}


def test_make_has_each_target() -> None:
    """
    That a page names.
    """
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = [
        (where, word)
        for where, words in named("make")
        for word in words
        if "=" not in word and not PLACEHOLDERS.match(word)
    ]

    assert len(wanted) > 10
    assert [] == [one for one in wanted if one[1] not in targets]


def modules() -> list[tuple[str, list[str]]]:
    """Where `python -m` stands, the module and what follows."""
    found = []
    for program in ("python", "python3"):
        for where, words in named(program):
            if words[:1] == ["-m"] and words[1:] and re.fullmatch(r"[a-z][\w.]*", words[1]):
                found.append((where, words[1:]))
    return found


def test_python_has_each_module() -> None:
    """
    What stands behind `python -m`, in the checkout or among what the tests install.
    """
    wanted = modules()

    assert len(wanted) > 20
    ours = [(where, words[0]) for where, words in wanted if not words[0].startswith(OF_OTHERS)]
    assert [] == [(where, module) for where, module in ours if find_spec(module) is None]


def test_celery_has_each_app() -> None:
    """
    What stands behind `celery -A`.
    """
    wanted = {words[words.index("-A") + 1] for _, words in named("celery") if "-A" in words}

    assert {"producers.celery_app"} <= wanted
    assert set() == {name for name in wanted if find_spec(name) is None}


# commands that another program performs: what `pagemill NAME` becomes
PASSED_ON = {
    ("worker",): ("worker",),
    ("gateway",): ("producers.gateway",),
    ("demo",): ("producers.demo",),
    ("bulk",): ("producers.bulk",),
    ("models",): ("worker.models",),
    ("batch", "run"): ("producers.batch_file", "run"),
}
# and the commands that these have themselves
VERBS = {
    "bulk": {"run", "plan", "status", "resume", "report"},
    "models": {"pull", "list"},
    "gateway": {"keys"},
    "demo": set[str](),
    "worker": set[str](),
}


def fault_of(words: list[str]) -> str | None:
    """What is wrong with a command line of `pagemill`; None where it could be right."""
    # typer carries a click of its own
    command: Any = typer.main.get_command(app)
    path: list[str] = []
    allowed = {"--help", "-h"}
    rest = list(words)
    while True:
        allowed |= {flag for one in command.params for flag in (*one.opts, *one.secondary_opts) if flag[0] == "-"}
        takes_value = {flag for one in command.params if not getattr(one, "is_flag", False) for flag in one.opts}
        while hasattr(command, "commands") and rest and rest[0].startswith("-"):
            flag = rest.pop(0)
            if flag.partition("=")[0] not in allowed:
                return f"pagemill has no {flag}"
            if flag in takes_value and rest:
                rest.pop(0)
        if not hasattr(command, "commands") or not rest or PLACEHOLDERS.match(rest[0]):
            break
        if rest[0] not in command.commands:
            return f"pagemill {' '.join([*path, rest[0]])}: there is no such command"
        path.append(rest.pop(0))
        command = command.commands[path[-1]]
    if (program := PASSED_ON.get(tuple(path))) is not None:
        return _fault_elsewhere(path, program, rest)
    unknown = given_flags(rest) - allowed
    return f"pagemill {' '.join(path)} has no {', '.join(sorted(unknown))}" if unknown else None


def _fault_elsewhere(path: list[str], program: tuple[str, ...], rest: list[str]) -> str | None:
    verbs = VERBS.get(path[0], set())
    if verbs and rest and not rest[0].startswith("-") and not PLACEHOLDERS.match(rest[0]):
        if rest[0] not in verbs:
            return f"pagemill {path[0]} {rest[0]}: there is no such command"
        # `keys` has one more
        depth = 2 if rest[0] == "keys" and rest[1:] else 1
        program, rest = (*program, *rest[:depth]), rest[depth:]
    if not (wanted := given_flags(rest)):
        return None
    unknown = wanted - flags_of(help_of(*program)) - {"-h"}
    return f"{' '.join(program)} has no {', '.join(sorted(unknown))}" if unknown else None


def test_pagemill_has_each_command_and_flag() -> None:
    """
    Of every command line of a page, by what `--help` shows.
    """
    wanted = named("pagemill")
    faults = [(where, fault) for where, words in wanted if (fault := fault_of(words)) is not None]

    assert len(wanted) > 60
    assert [] == faults


def test_a_wrong_command_line_is_found() -> None:
    """
    A command, a flag or a verb that is not there; also of a program that another performs.
    """
    wrong = [
        "sumbit x",
        "submit x --wiat",
        "bulk runn",
        "bulk run --inputt x",
        "batch run a -o b --eror",
        "--qeue a status",
    ]

    assert [True] * len(wrong) == [fault_of(line.split()) is not None for line in wrong]
    assert None is fault_of(["--queue", "a", "submit", "x", "--wait", "-o", "min_p=0.1"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_module_takes_the_flags_that_a_page_gives_it() -> None:
    """
    By its own `--help`.
    """
    faults = []
    for where, (module, *rest) in modules():
        if module.startswith(OF_OTHERS) or module in ("venv", "pytest") or not given_flags(rest):
            continue
        verbs = [word for word in rest[:1] if re.fullmatch("[a-z]+", word) and help_of(module, word)]
        unknown = given_flags(rest) - flags_of(help_of(module, *verbs) or help_of(module))
        if unknown:
            faults.append((where, module, sorted(unknown)))

    assert [] == faults
