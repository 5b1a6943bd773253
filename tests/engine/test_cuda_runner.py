"""
The CUDA runner's plan, state and overlap, on a CPU: each kernel's reference stands in for its twin.

What is compared are whole answers of tiny float32 models, with the CPU runner's.
"""

from pathlib import Path

import numpy as np
import pytest

from engine.cuda.plan import StepPacker
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


@pytest.fixture
def packer() -> StepPacker:
    return StepPacker(max_num_seqs=MAX_NUM_SEQS, max_blocks=32, block_size=BLOCK_SIZE, vocab_size=VOCAB)


def test_a_decode_in_the_middle_of_a_block_sends_its_slot_alone(packer: StepPacker) -> None:
    """
    Tokens, positions and tables are on the device: only what differs travels.
    """
    sequence = Sequence(Request("r", np.arange(4, 9, dtype=np.int32), SamplingParams()), 0)
    sequence.slot, sequence.block_table = 2, [7, 9]
    packer.pack(Step(1, (Chunk(sequence, 0, 5, samples=True, join=True),)))

    packed = packer.pack(Step(2, (Chunk(sequence, 5, 1, samples=True),)))

    assert [2, 0, 0, 0] == packed.numbers.tolist()


def test_a_decode_that_enters_a_block_sends_it(packer: StepPacker) -> None:
    """
    The new block's place in the table, and its id.
    """
    sequence = Sequence(Request("r", np.arange(4, 12, dtype=np.int32), SamplingParams()), 0)
    sequence.slot, sequence.block_table = 2, [7, 9]
    packer.pack(Step(1, (Chunk(sequence, 0, 8, samples=True, join=True),)))
    sequence.block_table.append(11)

    packed = packer.pack(Step(2, (Chunk(sequence, 8, 1, samples=True),)))

    assert ([2], [2 * 32 + 2], [11]) == tuple(
        packed.numbers[section.place].tolist() for section in (packed.slots, packed.places, packed.blocks)
    )
