"""Answers of a tiny float32 model, with bulk that gives way to urgent requests all the time."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.llm_engine import LLMEngine
from engine.request import Request, RequestOutput
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.cuda_engine import make_engine
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model("qwen3", path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, RequestOutput]:
    """What each request is answered when no other runs."""
    engine = make_engine(folder, cuda=False)
    answers: dict[str, RequestOutput] = {}
    for request in make_requests(seed=8):
        answers |= run_all(engine, [request])
    return answers


def run_flooded(engine: LLMEngine, requests: list[Request]) -> dict[str, RequestOutput]:
    """Nine of bulk at once, and then an urgent one every third turn, standard and interactive by turns."""
    for request in requests[:9]:
        engine.add(replace(request, priority=2))
    urgent = [replace(request, priority=index % 2) for index, request in enumerate(requests[9:])]
    outputs: dict[str, RequestOutput] = {}
    for turn in range(10_000):
        if turn % 3 == 2 and urgent:
            engine.add(urgent.pop(0))
        if not engine.has_work and not urgent:
            return outputs
        outputs |= {output.request_id: output for output in engine.step().finished}
        engine._scheduler.check()
    raise AssertionError("they do not end")


@pytest.mark.parametrize(
    ("cuda", "depth", "mode"),
    [(False, 1, "swap"), (False, 1, "recompute"), (True, 2, "recompute"), (True, 3, "recompute")],
)
@pytest.mark.parametrize("num_blocks", [60, 400])
def test_who_gave_way_is_answered_as_if_undisturbed(
    folder: Path, alone: dict[str, RequestOutput], cuda: bool, depth: int, mode: str, num_blocks: int
) -> None:
    """
    Greedy and sampled, with penalties, log-probabilities and several answers; for blocks, and for slots alone.
    """
    engine = make_engine(folder, cuda=cuda, depth=depth, mode=mode, num_blocks=num_blocks, max_num_seqs=4)

    answers = run_flooded(engine, make_requests(seed=8))

    assert_same_answers(alone, answers)
    kinds = {kind.value: count for kind, count in engine._scheduler.num_preemptions.items()}
    assert kinds[mode] >= 4
    # each of them is known to the request that it befell
    assert sum(kinds.values()) == sum(answer.num_preemptions for answer in answers.values())
