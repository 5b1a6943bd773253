"""What lies between two steps is told apart from the steps."""

import json
from typing import NamedTuple

import pytest

from benchmarks import start_up, step_gap

_CPU = ["--device", "cpu", "--model", "tiny-llama", "--max-model-len", "512"]


class _At(NamedTuple):
    """
    An event that came at a time.
    """

    ms: float

    def elapsed_time(self, end: "_At") -> float:
        """
        As a CUDA event's.
        """
        return end.ms - self.ms


def test_gaps_are_between_an_end_and_the_next_begin() -> None:
    """
    Steps of 10 ms with gaps of 1, 2 and 1 ms: the median gap is a tenth of a step.
    """
    begins = [0.0, 11.0, 23.0, 34.0]

    found = step_gap.gaps([(_At(begin), _At(begin + 10)) for begin in begins])

    assert (10, 1, 0.1) == (found["step_ms"], found["gap_ms"], found["gap_share"])
    assert found["gap_share_of_all"] == pytest.approx(4 / 30, abs=1e-5)


def test_a_steps_time_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    """
    On a CPU there are no gaps, and the parts add up to the engine's time.
    """
    assert 0 == step_gap.main([*_CPU, "--batch", "4", "--steps", "3", "--prompt", "16"])

    line = json.loads(capsys.readouterr().out)
    assert {"schedule", "launch", "handle", "wait"} == line["parts_ms"].keys()
    assert line["parts_ms"]["launch"] > line["parts_ms"]["schedule"] > 0
    assert line["cpu_ms"] > 0
    assert "gap_ms" not in line


def test_a_start_comes_to_its_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    """
    Times count from the start of the process, in the order in which things happen.
    """
    assert 0 == start_up.main([*_CPU, "--runs", "warm"])

    line = json.loads(capsys.readouterr().out)
    assert 0 < line["imported"] < line["loaded"] < line["first_token"]


def test_a_start_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """
    The last lines of the process are told.
    """
    assert 1 == start_up.main([*_CPU, "--runs", "warm", "--set", "block_size=0"])

    assert "block_size is 0" in capsys.readouterr().err
