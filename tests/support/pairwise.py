"""Few cases in which every two values of different parameters meet."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(parameters: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """
    Cases that cover every pair of values, each chosen greedily to meet the most that are left.

    Args:
        parameters: The values of each, hashable.
    """
    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(parameters, 2)
        for x, y in itertools.product(parameters[a], parameters[b])
    }
    cases = []
    while left:
        # in a fixed order, for cases must not change from run to run
        case = dict(min(left, key=repr))
        for name in parameters:
            if name not in case:
                trials = [case | {name: value} for value in parameters[name]]
                case = max(trials, key=lambda trial: len(left.intersection(_pairs(parameters, trial))))
        left.difference_update(_pairs(parameters, case))
        cases.append({name: case[name] for name in parameters})
    return cases


def _pairs(names: Iterable[str], case: Mapping[str, Any]) -> list[Pair]:
    return [((a, case[a]), (b, case[b])) for a, b in itertools.combinations(names, 2) if a in case and b in case]
