"""
The CUDA runner's plan, state and overlap, on a CPU: each kernel's reference stands in for its twin.

What is compared are whole answers of tiny float32 models, with the CPU runner's.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.cuda.graphs import graph_sizes
from engine.cuda.model_runner import CudaModelRunner
from engine.cuda.plan import StepPacker
from engine.cuda.ticket import CudaTicket
from engine.request import Chunk, Request, Sequence, Step
from engine.sampling_params import SamplingParams
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.cuda_engine import BLOCK_SIZE, MAX_NUM_SEQS, make_engine
from tests.support.tiny_models import VOCAB, save_tiny_model


@pytest.fixture(scope="module", params=["mistral", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(request.param, path)
    return path


@pytest.mark.parametrize(("depth", "mode", "num_blocks"), [(1, "auto", 200), (2, "auto", 200), (2, "recompute", 40)])
def test_answers_are_those_of_the_cpu(folder: Path, depth: int, mode: str, num_blocks: int) -> None:
    """
    Decodes, chunks, cached prefixes, swaps and recomputes, with a step's tokens unknown to the next.
    """
    requests = make_requests(seed=3)
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True, depth=depth, mode=mode, num_blocks=num_blocks)

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert mode == "auto" or engine.stats().num_preemptions


def test_an_id_used_again_gets_no_prompt_logprobs_of_the_aborted_request(folder: Path) -> None:
    """
    A step of the first is in flight when the second comes.
    """
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    first, second = (Request("a", np.arange(4, 4 + length, dtype=np.int32), params) for length in (30, 5))
    expected = run_all(make_engine(folder, cuda=False), [second])
    engine = make_engine(folder, cuda=True)
    engine.add(first)
    engine.step()
    engine.abort("a")

    actual = run_all(engine, [second])

    assert 5 == len(actual["a"].prompt_logprobs or ())
    assert_same_answers(expected, actual)


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 5), (3, 2), (6, 200)])
def test_steps_on_trial_leave_nothing_behind(folder: Path, max_num_seqs: int, budget: int) -> None:
    """
    Whatever the limits are: all kinds of sampling are tried, and requests get their answers afterwards.
    """
    requests = make_requests(seed=4, longest=8)[:8]
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True, max_num_seqs=max_num_seqs, budget=budget, mode="recompute")
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    for size in graph_sizes(max_num_seqs):
        runner.try_decode(size)
    runner.try_largest_step(budget)

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)


class Broken(Exception):
    """A step that came to nothing on its way to the device."""


@pytest.mark.parametrize("seed", [5, 6])
def test_launches_that_fail_and_trials_leave_the_ring_right(folder: Path, seed: int) -> None:
    """
    Decodes of each kind of sampling among chunks of prompts, for many turns of the ring. Now and then a decode fails
    before its launch, with the device's place in the ring anywhere, and is launched again; or a trial runs between.
    """
    requests, rng = make_requests(seed), np.random.default_rng(seed)
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True)
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    launch, decode_rows = runner.launch, runner._decode_rows
    counts = {"failed": 0, "trials": 0}

    def fail(*_: object) -> None:
        counts["failed"] += 1
        runner._transfers.ring.places[:] = torch.from_numpy(rng.integers(0, 4, 2))
        raise Broken

    def launch_in_peril(step: Step) -> CudaTicket:
        event = rng.random()
        if event < 0.1 and not step.prefill_chunks:
            runner._decode_rows = fail  # type: ignore[method-assign]
            with pytest.raises(Broken):
                launch(step)
            runner._decode_rows = decode_rows  # type: ignore[method-assign]
        elif event < 0.2:
            counts["trials"] += 1
            runner.try_decode(int(rng.integers(1, MAX_NUM_SEQS + 1)))
        return launch(step)

    runner.launch = launch_in_peril  # type: ignore[method-assign]

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert min(counts.values()) >= 4


def test_decodes_are_neither_copied_nor_told_their_place(folder: Path) -> None:
    """
    Once the first of them has been.
    """
    engine = make_engine(folder, cuda=True)
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    engine.add(Request("a", np.arange(4, 14, dtype=np.int32), SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    transfers = runner._transfers
    before = transfers.numbers.clone(), transfers.token_ids.clone()
    transfers.numbers[1:].fill_(-7)
    transfers.token_ids.fill_(-7)
    del transfers._place_of_next

    for _ in range(20):
        engine.step()

    assert int(before[0][0]) == int(transfers.numbers[0])
    assert {-7} == set(transfers.numbers[1:].tolist()) | set(transfers.token_ids.tolist())


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 5, 100, 300, 1000])
def test_the_largest_graph_is_of_the_largest_batch(max_num_seqs: int) -> None:
    """
    A larger one would not fit the buffers, and a smaller one would leave batches without a graph.
    """
    sizes = graph_sizes(max_num_seqs)

    assert sizes == sorted(set(sizes))
    assert max_num_seqs == sizes[-1]


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_the_shortest_tables_leave_room_for_what_else_is_sent(folder: Path, budget: int, max_num_seqs: int) -> None:
    """
    Sequences of one block, whose numbers are mostly gaps between sections.
    """
    prompts = [np.arange(4, 4 + length, dtype=np.int32) for length in range(1, 8)]
    options = {"max_num_seqs": max_num_seqs, "max_model_len": 8, "block_size": 8}
    engine = make_engine(folder, cuda=True, budget=budget, **options)

    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))

    assert [8 - len(prompt) for prompt in prompts] == [len(output.completions[0].token_ids) for output in outputs]


@pytest.fixture
def packer() -> StepPacker:
    return StepPacker(max_num_seqs=MAX_NUM_SEQS, max_blocks=32, block_size=BLOCK_SIZE, vocab_size=VOCAB)


@pytest.fixture
def numbers(packer: StepPacker) -> NDArray[np.int32]:
    return np.full(packer.most_numbers(40), -9, dtype=np.int32)


def decoding(slot: int, length: int, table: list[int]) -> Chunk:
    """
    A chunk whose one token has been sampled already.
    """
    sequence = Sequence(Request("r", np.arange(4, 4 + length, dtype=np.int32), SamplingParams()), 0)
    sequence.slot, sequence.block_table = slot, table
    return Chunk(sequence, length, 1, samples=True)


def test_decodes_send_a_head_of_fixed_places(packer: StepPacker, numbers: NDArray[np.int32]) -> None:
    """
    Tokens, positions and tables are on the device: slots travel, and the newest blocks for those who enter them.
    """
    packed = packer.pack(Step(1, (decoding(2, 5, [7, 9]), decoding(4, 8, [1, 3, 11]))), numbers)

    assert (2, None, packer.head_count) == (packed.num_decodes, packed.prefill, packed.count)
    assert [2, 4] == packed.slots.tolist()
    assert [2, 4] + [MAX_NUM_SEQS] * (packer.fresh_start - 2) == numbers[: packer.fresh_start].tolist()
    assert [9, 11] == numbers[packer.fresh_start : packer.fresh_start + 2].tolist()
    assert [-9] == np.unique(numbers[packer.head_count :]).tolist()


@pytest.mark.parametrize(("num_fresh", "fresh", "runs"), [(1, False, [2]), (7, False, [8]), (8, True, [1])])
def test_few_chunks_are_attended_together(
    packer: StepPacker, numbers: NDArray[np.int32], num_fresh: int, fresh: bool, runs: list[int]
) -> None:
    """
    Those that start a sequence beside one behind a prefix, as if they had an empty one; many have their own launch.
    """
    chunks = [Chunk(decoding(0, 8, [1, 2, 3]).sequence, 4, 4, samples=True)]
    chunks += [Chunk(decoding(slot, 4, [4]).sequence, 0, 4, samples=True) for slot in range(1, num_fresh + 1)]

    prefill = packer.pack(Step(0, tuple(chunks)), numbers).prefill

    assert prefill is not None
    assert (fresh, runs) == (prefill.fresh is not None, [run.slots.count for run in prefill.behind])
    assert 4 * len(chunks) == prefill.num_tokens
    last = prefill.behind[-1]
    assert [0, *range(4, 4 * last.slots.count, 4), last.num_tokens] == numbers[last.query_start.place].tolist()
    assert last.num_keys == last.num_tokens + 4 == numbers[last.key_start.place][-1]
    assert [4 * num_fresh, *range(0, 4 * num_fresh, 4)] == list(prefill.first_rows)


def test_who_joins_sends_its_whole_table(packer: StepPacker, numbers: NDArray[np.int32]) -> None:
    """
    Behind the head, and once: the chunks that follow find it on the device.
    """
    sequence = decoding(3, 10, [5, 6, 8]).sequence
    joins, follows = Chunk(sequence, 0, 6, samples=False, join=True), Chunk(sequence, 6, 4, samples=True)

    first, second = (
        packer.pack(Step(1, (decoding(2, 5, [7]), chunk)), numbers.copy()).prefill for chunk in (joins, follows)
    )
    packed = packer.pack(Step(1, (decoding(2, 5, [7]), joins)), numbers)

    assert first is not None
    assert second is not None
    assert (0, 0) == (second.joins.count, second.places.count)
    assert ([96, 97, 98], [5, 6, 8]) == tuple(numbers[part.place].tolist() for part in (first.places, first.blocks))
    assert [2] == packed.slots.tolist()
