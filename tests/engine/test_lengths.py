"""Lengths of answers are learned by template, and from all of them where a template is new."""

import numpy as np
import pytest

from engine.lengths import LearnedLengths, template
from engine.request import Request
from engine.sampling_params import SamplingParams


def taught(**answers: list[int]) -> LearnedLengths:
    lengths = LearnedLengths(least=2, weight=0.1)
    for key, found in answers.items():
        for num_tokens in found:
            lengths.learn(key, num_tokens)
    return lengths


def test_nothing_is_expected_where_nothing_was_learned() -> None:
    """One answer may be anything: as many as `least` are wanted."""
    assert LearnedLengths().expected("a") is None
    assert taught(a=[10]).expected("a") is None


def test_the_first_answers_count_alike() -> None:
    """The mean does not hang on the answer that happened to come first."""
    assert 20 == taught(a=[10, 30]).expected("a")
    assert 20 == pytest.approx(taught(a=[50, 10, 10, 10]).expected("a"))


def test_later_answers_outweigh_old_ones() -> None:
    """A template whose answers grow is followed."""
    expected = taught(a=[10] * 50 + [100] * 50).expected("a")

    assert expected is not None
    assert 95 < expected <= 100


def test_each_key_has_its_own_mean_and_a_new_one_that_of_all() -> None:
    """A template with too few answers is taken for a usual one."""
    lengths = taught(short=[10, 10], long=[90, 90], new=[1])

    assert (10, 90) == (lengths.expected("short"), lengths.expected("long"))
    assert lengths.expected("new") == lengths.expected("never seen")
    assert 10 < (lengths.expected("new") or 0) < 90


def test_the_keys_used_last_are_kept() -> None:
    """Memory is bounded, whatever prompts come."""
    lengths = LearnedLengths(least=1, most=2)
    for key in ("old", "kept", "old", "new"):
        lengths.learn(key, {"kept": 5}.get(key, 50))

    assert 50 == lengths.expected("old")
    assert 50 == lengths.expected("new")
    # the mean of all
    assert 5 != lengths.expected("kept")


def test_a_template_is_the_beginning_of_the_prompt_and_whose_it_is() -> None:
    """Prompts that begin alike are of one template, unless they are of parties that share nothing."""

    def of(prompt: list[int], salt: str | None = None) -> object:
        return template(Request("r", np.array(prompt, dtype=np.int32), SamplingParams(), cache_salt=salt))

    head = list(range(16))

    assert of([*head, 1, 2]) == of([*head, 3])
    assert of([*head[:15], 99, 1]) != of([*head, 1])
    assert of(head, "a") != of(head, "b")
