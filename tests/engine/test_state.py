"""A slot holds what its sequence needs for sampling, rebuilt at every join."""

import numpy as np
import pytest
import torch

from engine.sampling_params import Feature, SamplingParams
from engine.state import SamplingState

VOCAB = 32


@pytest.fixture
def state() -> SamplingState:
    return SamplingState(max_num_seqs=4, vocab_size=VOCAB, eos_token_ids=[1, 2])


def _prompt(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def _advance(state: SamplingState, slots: list[int], tokens: list[int]) -> None:
    state.advance(slots, torch.tensor(slots), torch.tensor(tokens))


def _picture(state: SamplingState, slot: int) -> dict[str, object]:
    """All that sampling reads of a slot."""
    ends = state.masked_ends.get(slot)
    return {
        "last": int(state.last_token[slot]),
        "position": int(state.positions[slot]),
        "stream": state.streams[slot].tolist(),
        "knobs": state.knobs[slot].tolist(),
        "top_k": int(state.top_k[slot]),
        "features": state.features[slot],
        "ends": ends and (ends[0].tolist(), ends[1]),
        "prompt": state.in_prompt[slot].nonzero()[:, 0].tolist(),
        "counts": state.output_counts[slot].tolist(),
    }


def _num_table_bytes(state: SamplingState) -> int:
    """Memory of all that is as wide as the vocabulary."""
    tensors = (value for value in vars(state).values() if isinstance(value, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if VOCAB in tensor.shape)


def test_coming_back_equals_never_having_left(state: SamplingState) -> None:
    """
    After preemption, in another slot that others used, everything is as if it had gone on.
    """
    params = SamplingParams(
        temperature=0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=9, max_tokens=20
    )
    prompt = _prompt(5, 6, 6)
    state.join(0, params, 1, prompt, [])
    for token in (7, 6, 7, 9):
        _advance(state, [0], [token])

    other = SamplingParams(presence_penalty=1.0, logit_bias={3: 1.0}, min_tokens=5, stop_token_ids=(4,))
    state.join(2, other, 0, _prompt(30, 31), [29, 28])
    state.leave(2)
    state.join(2, params, 1, prompt, [7, 6, 7, 9])

    assert _picture(state, 0) == _picture(state, 2)
    assert {} == state.bias


def test_generated_tokens_never_count_as_prompt(state: SamplingState) -> None:
    """
    A join keeps the split: presence and frequency see the output alone.
    """
    state.join(1, SamplingParams(presence_penalty=1.0), 0, _prompt(5, 6), [8, 8])

    assert [5, 6] == state.in_prompt[1].nonzero()[:, 0].tolist()
    assert {8: 2} == {
        int(token): int(state.output_counts[1, token]) for token in state.output_counts[1].nonzero()[:, 0]
    }


def test_counts_take_no_memory_until_a_penalty_comes(state: SamplingState) -> None:
    """
    The tables over the vocabulary are made for the first request with a penalty, not before.
    """
    state.join(0, SamplingParams(temperature=1.0, min_tokens=1, logit_bias={1: 2.0}), 0, _prompt(5), [])
    _advance(state, [0], [4])
    assert 0 == _num_table_bytes(state)

    state.join(1, SamplingParams(frequency_penalty=1.0), 0, _prompt(5), [])
    assert 4 * VOCAB * 5 == _num_table_bytes(state)


def test_ends_are_masked_for_min_tokens_then_free(state: SamplingState) -> None:
    """
    EOS and stop ids are masked until the answer has min_tokens, counted over resumed tokens too.
    """
    state.join(0, SamplingParams(min_tokens=3, stop_token_ids=(9, 99)), 0, _prompt(5), [])
    state.join(1, SamplingParams(min_tokens=3, stop_token_ids=(9,), ignore_eos=True), 0, _prompt(5), [6, 7])
    state.join(2, SamplingParams(min_tokens=3), 0, _prompt(5), [6, 7, 8])

    assert ([1, 2, 9], 3) == (state.masked_ends[0][0].tolist(), state.masked_ends[0][1])
    assert ([9], 1) == (state.masked_ends[1][0].tolist(), state.masked_ends[1][1])
    assert {0, 1} == set(state.masked_ends)

    _advance(state, [1, 0], [6, 6])
    assert {0: 2} == {slot: times for slot, (_, times) in state.masked_ends.items()}
    _advance(state, [0], [6])
    _advance(state, [0], [6])
    assert {} == state.masked_ends


def test_a_failed_row_leaves_a_token_that_can_be_embedded(state: SamplingState) -> None:
    """
    Where -1 was sampled, the last token reads 0: the step after may be running already.
    """
    state.join(3, SamplingParams(), 0, _prompt(5), [])
    _advance(state, [3], [-1])

    assert 0 == int(state.last_token[3])


def test_tokens_outside_the_vocabulary_are_passed_over(state: SamplingState) -> None:
    """
    Biases, stop ids and prompt tokens past the vocabulary change nothing and break nothing.
    """
    params = SamplingParams(logit_bias={-1: 1.0, VOCAB: 2.0, 3: 4.0}, presence_penalty=1.0, min_tokens=1)
    state.join(0, params, 0, _prompt(VOCAB, 5), [VOCAB + 7])

    assert [[3], [4.0]] == [part.tolist() for part in state.bias[0]]
    assert [5] == state.in_prompt[0].nonzero()[:, 0].tolist()
    assert 0 == int(state.output_counts[0].sum())


def test_a_left_slot_asks_for_nothing(state: SamplingState) -> None:
    """
    After leave, a slot has no features, bias or masks.
    """
    state.join(0, SamplingParams(temperature=1.0, logit_bias={3: 1.0}, min_tokens=2), 0, _prompt(5), [])
    state.leave(0)

    assert (Feature.GREEDY, {}, {}) == (state.features[0], state.bias, state.masked_ends)
