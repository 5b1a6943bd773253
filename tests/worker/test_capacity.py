"""What an engine says of its room: the puller relies on the same words from both engines."""

import numpy as np
import pytest

from engine.block_manager import BlockManager
from engine.llm_engine import LLMEngine
from engine.output import OutputProcessor
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner
from worker.engine_port import Engine
from worker.fake_engine import FakeEngine

MAX_MODEL_LEN = 64


def fake_engine() -> Engine:
    return FakeEngine(
        max_num_seqs=3, max_model_len=MAX_MODEL_LEN, kv_tokens=512, tokens_per_s=1.0, sleep=lambda _: None
    )


def paged_engine() -> Engine:
    blocks = BlockManager(num_blocks=129, block_size=4)
    return LLMEngine(
        scheduler=Scheduler(blocks, max_num_seqs=3, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN),
        runner=FakeRunner(num_blocks=129, block_size=4),
        outputs=OutputProcessor(None, set(), MAX_MODEL_LEN),
        tokenizer=None,
        vocab_size=1000,
        model_name="paged",
        fingerprint="paged",
    )


def request(name: str, n: int = 1) -> Request:
    # less than a block: nobody waits for a shared one
    return Request(name, np.arange(3, dtype=np.int32), SamplingParams(max_tokens=20, n=n))


@pytest.fixture(params=[fake_engine, paged_engine])
def engine(request: pytest.FixtureRequest) -> Engine:
    made: Engine = request.param()
    return made


def seats(engine: Engine) -> tuple[int, int]:
    capacity = engine.capacity()
    return capacity.free_seqs, capacity.waiting_seqs


def test_free_places_and_waiting_sequences_are_told_apart(engine: Engine) -> None:
    """
    A place is taken by what runs and by nothing else; what waits is counted beside, an answer at a time.
    """
    told = [seats(engine)]
    engine.add(request("a", n=2))
    told.append(seats(engine))
    engine.step()
    told.append(seats(engine))
    engine.add(request("b"))
    engine.step()
    engine.add(request("c", n=2))
    engine.step()
    told.append(seats(engine))
    engine.abort("b")
    told.append(seats(engine))

    assert [(3, 0), (3, 2), (1, 0), (0, 2), (1, 2)] == told


def test_free_tokens_know_of_what_waits(engine: Engine) -> None:
    """
    The tokens that waiting prompts need are not offered again, and come back when they are gone.
    """
    free = [engine.capacity().free_tokens]
    engine.add(request("a"))
    free.append(engine.capacity().free_tokens)
    engine.abort("a")
    free.append(engine.capacity().free_tokens)

    assert (512, 512) == (free[0], free[2])
    assert free[1] <= 512 - 3
