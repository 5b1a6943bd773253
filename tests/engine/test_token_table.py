"""Tokens that come by step are read by slot."""

import random

import numpy as np

from engine.token_table import TokenTable


def test_the_table_agrees_with_plain_lists() -> None:
    """
    Whoever is read when, sits a step out, or comes to a slot that another had: each has its own tokens, in order.
    """
    rng = random.Random(0)
    num_known = np.zeros(7, dtype=np.int32)
    table, model = TokenTable(num_known), [list[int]() for _ in range(7)]
    for token in range(3_000):
        slots = sorted(rng.sample(range(7), rng.randint(0, 7)))
        table.learn(np.array(slots, dtype=np.int64), np.array([7 * token + slot for slot in slots], dtype=np.int64))
        for slot in slots:
            model[slot].append(7 * token + slot)
        slot = rng.randrange(7)
        if rng.random() < 0.1:
            assert model[slot] == table.known(slot).tolist()
        if rng.random() < 0.01:
            # the last owner leaves with what it has, and the next brings a prompt
            table.known(slot)
            model[slot] = list(range(rng.choice([1, 300, 900])))
            table.put(slot, np.array(model[slot], dtype=np.int32))
            num_known[slot] = len(model[slot])

    assert model == [table.known(slot).tolist() for slot in range(7)]
    assert [len(tokens) for tokens in model] == num_known.tolist()
