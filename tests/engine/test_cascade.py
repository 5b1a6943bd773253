"""Who shares a prefix as sequences come and go, and that answers do not depend on it."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.cuda import model_runner
from engine.cuda.cascade import CascadeGate, SharedPrefixes
from engine.cuda.graphs import DecodeGraphs, Sampling, cascade_sizes, graph_sizes
from engine.cuda.model_runner import CudaModelRunner
from engine.errors import StartupError
from engine.llm_engine import LLMEngine
from engine.request import Request
from engine.sampling_params import SamplingParams
from kernels import cascade_attention
from tests.support.answers import assert_same_answers, run_all
from tests.support.cuda_engine import make_engine
from tests.support.tiny_models import VOCAB, save_tiny_model

GATE = CascadeGate(min_seqs=2, min_tokens=16)


@pytest.fixture(scope="module", params=["llama with biases", "qwen2 with windows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(request.param, path)
    return path


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short prefixes have several."""
    monkeypatch.setattr(cascade_attention, "MIN_CHUNK", 16)


@pytest.fixture
def prefixes() -> SharedPrefixes:
    return SharedPrefixes(min_seqs=3, min_blocks=2, block_size=16)


def rows_by_blocks(prefixes: SharedPrefixes, slots: list[int]) -> list[tuple[int, list[int]]]:
    found = prefixes.among(np.array(slots))
    for prefix in found:
        assert prefix.slot in [slots[row] for row in prefix.rows]
    return [(prefix.num_tokens // 16, sorted(prefix.rows.tolist())) for prefix in found]


def test_a_prefix_is_as_long_as_all_share(prefixes: SharedPrefixes) -> None:
    """
    Rows are places in the batch, and blocks count to the last that all have in common.
    """
    for slot, table in enumerate(([5, 6, 7, 8, 9], [5, 6, 7, 8, 1], [5, 6, 7, 2], [5, 6, 7, 8, 3])):
        prefixes.join(slot, table)

    assert [(3, [0, 1, 2, 3])] == rows_by_blocks(prefixes, [2, 3, 0, 1])


def test_few_or_short_ones_do_not_count(prefixes: SharedPrefixes) -> None:
    """
    Two sequences are too few, and one block is too short.
    """
    for slot, table in enumerate(([5, 6, 7], [5, 6, 8], [4, 1], [4, 2], [4, 3], [9])):
        prefixes.join(slot, table)

    assert not prefixes
    assert [] == rows_by_blocks(prefixes, [0, 1, 2, 3, 4, 5])


def test_those_who_do_not_decode_do_not_count(prefixes: SharedPrefixes) -> None:
    """
    A sequence may be in its prefill, or wait for a block, while others go on.
    """
    for slot in range(4):
        prefixes.join(slot, [5, 6, 10 + slot])

    assert [(2, [0, 1, 2])] == rows_by_blocks(prefixes, [3, 1, 0])
    assert [] == rows_by_blocks(prefixes, [3, 1])


def test_the_first_may_leave_first(prefixes: SharedPrefixes) -> None:
    """
    Any member's table will do; when too few are left the prefix counts no longer, and is forgotten with the last.
    """
    for slot in range(4):
        prefixes.join(slot, [5, 6, 10 + slot])
    prefixes.leave(0)
    assert [(2, [0, 1, 2])] == rows_by_blocks(prefixes, [1, 2, 3])

    prefixes.leave(2)
    assert not prefixes
    prefixes.leave(1)
    prefixes.leave(3)

    # the same blocks, with other content
    prefixes.join(0, [5, 6, 7, 8])
    prefixes.join(1, [5, 6, 7, 8])
    prefixes.join(2, [5, 6, 7, 8])
    assert [(4, [0, 1, 2])] == rows_by_blocks(prefixes, [0, 1, 2])


def test_a_slot_is_taken_over(prefixes: SharedPrefixes) -> None:
    """
    Who joins is the only one there, and leaving an empty slot is nothing.
    """
    for slot in range(3):
        prefixes.join(slot, [5, 6, 10 + slot])
    prefixes.join(1, [1, 2, 3])
    prefixes.leave(7)

    assert [] == rows_by_blocks(prefixes, [0, 1, 2])
    prefixes.check({0: [5, 6, 10], 1: [1, 2, 3], 2: [5, 6, 12]})


def test_longer_prefixes_come_first(prefixes: SharedPrefixes) -> None:
    """
    Of nested ones each sequence has what saves most; the rest share what is left.
    """
    for slot in range(4):
        prefixes.join(2 * slot, [5, 6, 7, 8, 20 + slot])
        prefixes.join(2 * slot + 1, [5, 6, 9, 30 + slot])

    assert [(4, [0, 2, 4, 6]), (2, [1, 3, 5, 7])] == rows_by_blocks(prefixes, list(range(8)))


def test_the_same_tokens_in_other_blocks_are_not_shared(prefixes: SharedPrefixes) -> None:
    """
    A block in common behind one that is not makes no prefix.
    """
    for slot, first in enumerate((5, 5, 4, 5)):
        prefixes.join(slot, [first, 6, 10 + slot])

    assert [(2, [0, 1, 3])] == rows_by_blocks(prefixes, [0, 1, 2, 3])


@pytest.mark.parametrize("seed", range(20))
def test_the_books_stand_whoever_comes_and_goes(seed: int) -> None:
    """
    Tables with common heads at random; the prefixes found are true, disjoint, large enough and not less than there are.
    """
    rng = random.Random(seed)
    prefixes = SharedPrefixes(min_seqs=rng.choice((2, 3)), min_blocks=rng.choice((1, 2, 3)), block_size=16)
    heads = [[100 * head + place for place in range(40)] for head in range(3)]
    # a branch of the first
    heads.append(heads[0][:6] + heads[2][6:])
    tables: dict[int, list[int]] = {}
    for turn in range(300):
        slot = rng.randrange(24)
        if rng.random() < 0.4:
            tables.pop(slot, None)
            prefixes.leave(slot)
        else:
            tables[slot] = [*rng.choice(heads)[: rng.choice((0, 1, 2, 5, 9, 30))], 1000 + turn]
            prefixes.join(slot, tables[slot])
            # a table grows in place
            tables[slot].append(5000 + turn)
        prefixes.check(tables)
        slots = [slot for slot in tables if rng.random() < 0.8]
        rng.shuffle(slots)
        taken: set[int] = set()
        for prefix in prefixes.among(np.array(slots, dtype=np.int64)):
            rows = prefix.rows.tolist()
            assert len(rows) >= prefixes.min_seqs
            assert not taken & set(rows)
            taken |= set(rows)
            count = prefix.num_tokens // 16
            assert count >= prefixes.min_blocks
            assert {tuple(tables[slots[row]][:count]) for row in rows} == {tuple(tables[prefix.slot][:count])}
        left = [tuple(tables[slot][: prefixes.min_blocks]) for row, slot in enumerate(slots) if row not in taken]
        assert all(
            left.count(one) < prefixes.min_seqs for one in left if len(one) == prefixes.min_blocks and one[-1] < 1000
        )


def steps_of(engine: LLMEngine) -> int:
    """Steps in which a prefix was read for several."""
    assert isinstance(engine._runner, CudaModelRunner)
    return engine._runner.cascade.num_steps


def requests_with_a_head(lengths: list[int], *, common: int = 37, **params: object) -> list[Request]:
    """Prompts of so many tokens in common and more."""
    rng = np.random.default_rng(1)
    head = rng.integers(4, VOCAB, common)
    options = SamplingParams(**({"max_tokens": 9, "ignore_eos": True} | params))  # type: ignore[arg-type]
    prompts = [np.concatenate([head, rng.integers(4, VOCAB, length)]).astype(np.int32) for length in lengths]
    return [Request(str(index), prompt, options) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}, {"logprobs": 2}], ids=str)
def test_answers_are_those_without_it(folder: Path, params: dict[str, object]) -> None:
    """
    Greedy, drawn, and sampled by the host; in layers with windows nothing changes.
    """
    requests = requests_with_a_head([3, 8, 1, 20, 5, 9, 2, 4], **params)
    options = {"dtype": torch.float64, "budget": 80}
    expected = run_all(make_engine(folder, cuda=True, **options), requests)  # type: ignore[arg-type]
    engine = make_engine(folder, cuda=True, cascade=GATE, **options)  # type: ignore[arg-type]

    actual = run_all(engine, requests)

    assert steps_of(engine) > 9
    assert_same_answers(expected, actual)


def test_keys_and_values_of_eight_bits_are_shared_too(folder: Path) -> None:
    """
    With the scales of each token and head.
    """
    requests = requests_with_a_head([3, 8, 1, 20, 5, 9, 2, 4], common=70)
    options = {"dtype": torch.float64, "budget": 80, "fp8": True}
    expected = run_all(make_engine(folder, cuda=True, **options), requests)  # type: ignore[arg-type]
    engine = make_engine(folder, cuda=True, cascade=GATE, **options)  # type: ignore[arg-type]

    actual = run_all(engine, requests)

    assert steps_of(engine) > 9
    assert_same_answers(expected, actual)


def test_whoever_comes_back_shares_again(folder: Path) -> None:
    """
    With too few blocks for all, and a budget that cuts prompts in pieces.
    """
    requests = requests_with_a_head([3, 8, 1, 20, 5, 9, 2, 4], max_tokens=40)
    expected = run_all(make_engine(folder, cuda=False, dtype=torch.float64), requests)
    engine = make_engine(
        folder, cuda=True, cascade=GATE, dtype=torch.float64, mode="recompute", num_blocks=44, budget=24
    )

    actual = run_all(engine, requests)

    assert engine.stats().num_preemptions
    assert steps_of(engine)
    assert_same_answers(expected, actual)


def test_an_abort_of_the_first_changes_nothing_for_the_others(folder: Path) -> None:
    """
    Whose table named the prefix's blocks is gone while they are in use.
    """
    requests = requests_with_a_head([3, 8, 1, 20], max_tokens=30)
    expected = run_all(make_engine(folder, cuda=False, dtype=torch.float64), requests)
    engine = make_engine(folder, cuda=True, cascade=GATE, dtype=torch.float64)
    for request in requests:
        engine.add(request)
    outputs = {}
    for turn in range(60):
        if turn in (12, 16):
            engine.abort("0" if turn == 12 else "1")
        outputs |= {output.request_id: output for output in engine.step().finished}

    assert {"2", "3"} == outputs.keys()
    assert_same_answers({name: expected[name] for name in outputs}, outputs)
    assert steps_of(engine) > 20


def counts_sent(runner: CudaModelRunner) -> list[int]:
    """How many numbers are copied to the device from now on, one entry a copy."""
    sent = []
    send = runner._transfers.send
    runner._transfers.send = lambda count: sent.append(count) or send(count)  # type: ignore[method-assign,func-returns-value]
    return sent


def test_who_shares_nothing_sends_nothing(folder: Path) -> None:
    """
    Steps of decodes are read where they are, and no pass is made.
    """
    engine = make_engine(folder, cuda=True, cascade=GATE)
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    sent = counts_sent(runner)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(4, VOCAB, 40).astype(np.int32) for _ in range(3)]
    engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))

    assert 0 == steps_of(engine)
    # prompts of 120 tokens in steps of 40
    assert 3 <= len(sent) <= 4
    assert runner._packer.head_count < min(sent)


def test_what_is_shared_is_sent_when_it_changes(folder: Path) -> None:
    """
    When the three have come, and when the first of them ends.
    """
    engine = make_engine(folder, cuda=True, cascade=GATE, budget=200)
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    sent = counts_sent(runner)

    run_all(engine, requests_with_a_head([3, 8, 1], max_tokens=20))

    head = runner._packer.head_count
    assert steps_of(engine) >= 15
    assert 4 >= sum(count == head + runner.cascade.num_numbers for count in sent) > 0
    assert 6 >= len(sent)


class ReplayedByHand(DecodeGraphs):
    """Graphs where there are none: what would be captured is run, and noted."""

    def __init__(self, runner: CudaModelRunner) -> None:
        super().__init__(runner._decode_rows, graph_sizes(runner.max_num_seqs), cascade_sizes(runner.max_num_seqs))
        self.replayed: list[tuple[int, bool]] = []

    def replay(self, size: int, sampling: Sampling, cascade: bool) -> None:
        self.replayed.append((size, cascade))
        self._run(size, sampling, cascade)


@pytest.mark.parametrize("row_of_padding", [0, 1000])
def test_a_graph_with_the_pass_may_be_larger_if_that_pays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, row_of_padding: int
) -> None:
    """
    Four sequences in a graph of six, or in their own without the pass where rows are dear.
    """
    monkeypatch.setattr(model_runner, "PADDING_TOKENS", row_of_padding)
    requests = requests_with_a_head([3, 8, 1, 20])
    expected = run_all(make_engine(folder, cuda=False, dtype=torch.float64), requests)
    engine = make_engine(folder, cuda=True, cascade=GATE, dtype=torch.float64, budget=200)
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    graphs = runner.graphs = ReplayedByHand(runner)

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert [1, 2, 4, 6] == graph_sizes(6)
    assert ((6, True) in graphs.replayed) == (row_of_padding == 0)
    assert ((4, False) in graphs.replayed) == (row_of_padding > 0)
    assert 2 == graphs.more_padding(4)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 15, 16, 40, 100, 300, 1000, 1024])
def test_graphs_with_the_pass_are_few_and_end_with_the_largest_batch(max_num_seqs: int) -> None:
    """
    Of sizes that have graphs without it too: their shapes are known when these are captured.
    """
    sizes = cascade_sizes(max_num_seqs)

    assert max_num_seqs == sizes[-1]
    assert sizes == sorted(set(sizes))
    assert set(sizes) <= set(graph_sizes(max_num_seqs))
    assert len(sizes) <= 19


@pytest.mark.parametrize("setting", [{"cascade_min_seqs": 1}, {"cascade_min_tokens": 0}], ids=str)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, int]) -> None:
    """
    One sequence shares with nobody.
    """
    with pytest.raises(StartupError, match=next(iter(setting))):
        EngineConfig(model=Path(), **setting)  # type: ignore[arg-type]
