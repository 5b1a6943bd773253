"""Lengths of answers are learned by template, and from all of them where a template is new."""

from statistics import fmean

import numpy as np

from engine.lengths import LearnedLengths, template
from engine.request import Request
from engine.sampling_params import SamplingParams


def taught(**answers: list[int]) -> LearnedLengths:
    lengths = LearnedLengths(least=2, window=8)
    for key, found in answers.items():
        for num_tokens in found:
            lengths.learn(key, num_tokens)
    return lengths


def test_nothing_is_expected_where_nothing_was_learned() -> None:
    """
    One answer may be anything: as many as `least` are wanted.
    """
    assert LearnedLengths().mean("a") is None
    assert LearnedLengths().draw("a", 0.5) is None
    assert taught(a=[10]).mean("a") is None


def test_the_newest_answers_count() -> None:
    """
    A template whose answers grow is followed.
    """
    assert 20 == taught(a=[10, 30]).mean("a")
    assert 100 == taught(a=[10] * 50 + [100] * 8).mean("a")


def test_a_draw_is_one_of_the_answers() -> None:
    """
    Draws from even places are together as the answers were, which their mean alone is not.
    """
    lengths = taught(a=[80, 10, 20, 10])

    assert [10, 10, 20, 80] == [lengths.draw("a", place) for place in (0.0, 0.25, 0.5, 0.999)]
    assert lengths.mean("a") == fmean(lengths.draw("a", (place + 0.5) / 100) or 0 for place in range(100))


def test_each_key_has_its_own_answers_and_a_new_one_those_of_all() -> None:
    """
    A template with too few answers is taken for a usual one.
    """
    lengths = taught(short=[10, 10], long=[90, 90], new=[1])

    assert (10, 90) == (lengths.mean("short"), lengths.mean("long"))
    assert lengths.mean("new") == lengths.mean("never seen") == fmean([10, 10, 90, 90, 1])


def test_the_keys_learned_of_last_are_kept() -> None:
    """
    Memory is bounded, whatever prompts come.
    """
    lengths = LearnedLengths(least=1, most=2)
    for key, num_tokens in (("old", 50), ("gone", 5), ("old", 50), ("new", 70)):
        lengths.learn(key, num_tokens)

    assert (50, 70) == (lengths.mean("old"), lengths.mean("new"))
    assert lengths.mean("gone") == lengths.mean("never seen")


def test_a_template_is_the_beginning_of_the_prompt_and_whose_it_is() -> None:
    """
    Prompts that begin alike are of one template, unless they are of parties that share nothing.
    """

    def of(prompt: list[int], salt: str | None = None) -> object:
        return template(Request("r", np.array(prompt, dtype=np.int32), SamplingParams(), cache_salt=salt))

    head = list(range(16))

    assert of([*head, 1, 2]) == of([*head, 3])
    assert of([*head[:15], 99, 1]) != of([*head, 1])
    assert of(head, "a") != of(head, "b")
