"""Bulk work that could start waits for steps that would be small otherwise."""

import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from engine.entries import Entry, Queue
from engine.model.config import ModelConfig
from engine.pacing import Pacing, is_worthwhile
from engine.request import BULK, Request, Sequence
from engine.running import Running
from engine.sampling_params import SamplingParams

SIZE = 4


class Bench:
    """Sequences that run and wait, by the tokens that each will still get."""

    def __init__(self, *, running: list[int], waiting: list[int], num_slots: int = 64, free: int = 10_000) -> None:
        self.running, self.queue = Running(num_slots, SIZE), Queue()
        self.num_free_blocks = free
        self.pacing = Pacing(least=1, spread=1.0, margin=0.0, slack=2)
        self._arrivals = 0
        for left in running:
            self.running.join(self.entry(left))
        for left in waiting:
            self.wait(left)

    def entry(self, left: int, num_tokens: int = 10) -> Entry:
        self._arrivals += 1
        prompt = np.arange(num_tokens, dtype=np.int32)
        sequence = Sequence(Request("r", prompt, SamplingParams(), priority=BULK), 0)
        limit = num_tokens + left
        return Entry(sequence, (BULK, self._arrivals), limit=limit, expected=limit)

    def wait(self, left: int, num_tokens: int = 10) -> None:
        self.queue.insert_sorted(self.entry(left, num_tokens))

    def num_starting(self, budget: int = 8192) -> int:
        """How many of those that wait the next step lets in."""
        self.pacing.plan(self.queue, self.running, num_free_blocks=self.num_free_blocks, budget=budget)
        count = 0
        while count < len(self.queue) and self.pacing.is_open:
            self.pacing.started()
            count += 1
        return count


def test_as_many_run_as_would_if_all_steps_were_of_one_size() -> None:
    """
    100 steps are taken anyway; 300 tokens in all are three a step, of which one runs already.
    """
    assert 2 == Bench(running=[100], waiting=[20] * 10).num_starting()


def test_nobody_starts_while_enough_run() -> None:
    """
    Those that wait would only make these steps larger, and the later ones smaller.
    """
    assert 0 == Bench(running=[100, 50, 50, 50], waiting=[10] * 5).num_starting()


def test_who_would_end_last_starts_at_once() -> None:
    """
    An answer as long as the longest that runs would make the whole longer.
    """
    assert 2 == Bench(running=[100, 50, 50], waiting=[99, 98]).num_starting()


def test_the_latest_start_comes_nearer_with_every_step() -> None:
    """
    One that need not start now is started when the steps that are left are as many as its tokens and the slack.
    """
    bench = Bench(running=[30, 10, 10], waiting=[20])
    seen = [bench.num_starting() for _ in range(9)]

    assert [0] * 8 + [1] == seen


def test_prompts_that_take_many_steps_start_so_much_earlier() -> None:
    """
    Eleven prompts of more than a step each need that many steps before the last of them has its first token.
    """
    bench = Bench(running=[40] + [10] * 10, waiting=[])
    for _ in range(10):
        bench.wait(25, num_tokens=1000)

    assert 0 == bench.num_starting(budget=8192)
    bench.wait(25, num_tokens=1000)
    assert 11 == bench.num_starting(budget=800)


def test_nothing_waits_beside_an_idle_engine() -> None:
    """
    Where nobody runs all may start.
    """
    assert 5 == Bench(running=[], waiting=[10] * 5).num_starting()


def test_nothing_waits_where_not_all_find_a_seat_or_blocks() -> None:
    """
    There is work for many steps then, and every step is large.
    """
    crowd = {"running": [100, 50, 50, 50], "waiting": [10] * 5}

    assert 5 == Bench(**crowd, num_slots=8).num_starting()  # type: ignore[arg-type]
    assert 5 == Bench(**crowd, free=20).num_starting()  # type: ignore[arg-type]


def test_prompts_start_together() -> None:
    """
    With a margin nobody starts until a part of those that should run is missing, and then all of that part.
    """
    bench = Bench(running=[100] + [50] * 7, waiting=[30] * 30)
    bench.pacing = Pacing(least=1, spread=1.0, margin=0.5, slack=2)
    assert 0 == bench.num_starting()

    bench = Bench(running=[100] + [50] * 3, waiting=[30] * 30)
    bench.pacing = Pacing(least=1, spread=1.0, margin=0.5, slack=2)
    assert 8 == bench.num_starting()


def test_few_are_never_held_back() -> None:
    """
    Beside one long answer others start at once, as many as cost a step next to nothing.
    """
    bench = Bench(running=[30_000], waiting=[200] * 30)
    bench.pacing = Pacing()
    assert 30 == bench.num_starting()


def test_one_that_waits_and_of_which_nothing_is_known_may_end_last() -> None:
    """
    Neither is it held back, nor is one that has outgrown what was expected of it.
    """
    for expected in (0, 15):
        bench = Bench(running=[100] * 6, waiting=[])
        entry = bench.entry(150, num_tokens=20)
        entry.expected = expected
        bench.queue.insert_sorted(entry)
        assert 1 == bench.num_starting()


def test_lengths_that_nobody_knows_are_not_waited_for() -> None:
    """
    Where nothing is known of those that run, one that waits may well end last.
    """
    bench = Bench(running=[100] * 6, waiting=[10])
    for entry in list(bench.running.entries):
        bench.running.leave(entry, 0)
        entry.expected = 0
        bench.running.join(entry)

    assert 1 == bench.num_starting()


@pytest.mark.parametrize(
    ("model", "paced"),
    [
        ("qwen2.5-0.5b", False),
        ("llama-3.2-1b", False),
        ("llama-3.2-3b", False),
        ("qwen2.5-7b", True),
        ("llama-3.1-8b", True),
        ("llama-3.1-70b", True),
    ],
)
def test_models_whose_weights_take_longer_than_launches_are_paced(model: str, paced: bool) -> None:
    """
    In bf16, on a GPU that reads 4.3 TB/s; a 3B model gains and loses as much.
    """
    assert paced == is_worthwhile(2 * ModelConfig.parse(SHAPES[model]).step_weights / 4.3e12)


def test_on_a_cpu_the_smallest_models_are_paced_too() -> None:
    """
    Memory that is read at 12 GB/s is what a step waits for.
    """
    assert is_worthwhile(4 * ModelConfig.parse(SHAPES["smollm2-135m"]).step_weights / 12e9)
