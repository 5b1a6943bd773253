"""Engines in processes of their own: what a comparison believes and what it refuses."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks import offline
from benchmarks.contender import Answer, Case, Contender, ContenderError

_CASE = Case("sharegpt", 3, None, 1024, 0.02, 1)


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """
    An engine of a few lines that a child process can run as `python -m toy_engine BEHAVIOUR`.
    """
    (tmp_path / "toy_engine.py").write_text(
        dedent(
            """
            import sys
            from benchmarks.contender import serve

            class Toy:
                name = "toy 1"

                def __init__(self):
                    if sys.argv[1] == "cannot load":
                        raise ValueError("no such model")

                def reset(self):
                    pass

                def generate(self, requests, run):
                    print("noise on standard output")
                    if sys.argv[1] == "dies":
                        sys.exit("killed by the test")
                    spare = 1 if sys.argv[1] == "too long" else 0
                    return [[7] * (request.max_tokens + spare) for request in requests]

                def stats(self):
                    return {"mood": "good"}

                def close(self):
                    pass

            sys.exit(serve(Toy))
            """
        )
    )
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def test_a_contender_runs_a_case(environment: Mapping[str, str]) -> None:
    """
    The child builds the same requests, and what its libraries print is not taken for an answer.
    """
    with Contender("toy", "toy_engine", ["well"], environment=environment) as toy:
        answer = toy.run(_CASE)

    assert "toy 1" == toy.name
    assert [request.max_tokens for request in _CASE.requests()] == answer.lengths
    assert {"mood": "good"} == answer.stats


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("too long", "3 of 3 answers another length"), ("dies", "killed by the test")],
)
def test_a_wrong_run_is_refused(behaviour: str, message: str, environment: Mapping[str, str]) -> None:
    """
    Answers of another length and a process that ends are errors that say so, not figures.
    """
    with (
        Contender("toy", "toy_engine", [behaviour], environment=environment) as toy,
        pytest.raises(ContenderError, match=message),
    ):
        toy.run(_CASE)


def test_an_engine_that_cannot_load_is_left_out(environment: Mapping[str, str]) -> None:
    """
    A peer that does not run here prints why, and the others are measured.
    """
    lines = []
    with offline.ExitStack() as stack:
        found = [
            Contender("broken", "toy_engine", ["cannot load"], environment=environment),
            Contender("toy", "toy_engine", ["well"], environment=environment),
        ]
        ready = offline.enter_all(found, stack, lines.append)
        measured = offline.measure(ready, _CASE, 2, lines.append)

    assert [{"engine": "broken", "error": "broken: ValueError: no such model"}] == lines
    assert "Traceback" in found[0].log_tail
    assert ["toy"] == list(measured)
    assert 2 == len(measured["toy"])


def test_the_summary_divides_by_the_peers() -> None:
    """
    Medians are compared, and answers with the same tokens counted.
    """

    def answer(wall_s: float, *outputs: str) -> Answer:
        return Answer("d", wall_s, 1.0, [10, 10], list(outputs))

    summary = offline.compare(
        {
            "pagemill": [answer(1.0, "a", "b"), answer(2.0, "a", "b"), answer(9.0, "a", "b")],
            "peer": [answer(5.0, "a", "c")],
        }
    )

    assert {"pagemill": 10.0, "peer": 4.0} == summary["output_tok_s"]
    assert {"peer": 2.5} == summary["pagemill_over"]
    assert {"peer": "1/2"} == summary["equal_outputs"]


def test_what_an_engine_started_ends_with_it(tmp_path: Path) -> None:
    """
    Engine processes of its own do not outlive it: they would keep the memory of a GPU.
    """
    (tmp_path / "toy_parent.py").write_text(
        dedent(
            """
            import subprocess, sys
            from benchmarks.contender import serve

            class Toy:
                def __init__(self):
                    self.name = str(subprocess.Popen(["sleep", "600"]).pid)

            sys.exit(serve(Toy))
            """
        )
    )
    with Contender("toy", "toy_parent", [], environment=os.environ | {"PYTHONPATH": str(tmp_path)}, grace_s=0.2) as toy:
        assert Path(f"/proc/{toy.name}").exists()
        child = int(toy.name)

    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    # one that nobody has waited for is still there, as a zombie
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
