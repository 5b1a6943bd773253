"""Answers of a tiny float32 model, whatever the order in which bulk work is served."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import POLICIES, PolicyName
from engine.pacing import Pacing
from engine.queue_policy import Throughput
from engine.request import BULK, Request, RequestOutput
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.cuda_engine import make_engine
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, RequestOutput]:
    """What each request is answered when no other runs."""
    engine = make_engine(folder, cuda=False)
    answers: dict[str, RequestOutput] = {}
    for request in bulk():
        answers |= run_all(engine, [request])
    return answers


def bulk() -> list[Request]:
    """Every kind of request, half of them of a length that is known."""
    requests = []
    for index, request in enumerate(make_requests(seed=21)):
        params = replace(request.params, ignore_eos=index % 2 == 0)
        requests.append(replace(request, params=params, priority=BULK))
    return requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("cuda", "depth"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("num_blocks", [60, 400])
def test_answers_do_not_depend_on_the_policy(
    folder: Path, alone: dict[str, RequestOutput], policy: PolicyName, cuda: bool, depth: int, num_blocks: int
) -> None:
    """
    Greedy and sampled, with penalties, log-probabilities and several answers, in much memory and in little.
    """
    engine = make_engine(folder, cuda=cuda, depth=depth, num_blocks=num_blocks, max_num_seqs=4, policy=policy)

    assert_same_answers(alone, run_all(engine, bulk()))


def test_answers_do_not_depend_on_groups_and_pace(folder: Path, alone: dict[str, RequestOutput]) -> None:
    """
    The same where prompts of this size are grouped, and all find a seat, so that some wait for smaller steps.
    """
    engine = make_engine(folder, cuda=False, num_blocks=400, max_num_seqs=32)
    engine._scheduler._policy = Throughput(Pacing(least=1), group_tokens=8)

    assert_same_answers(alone, run_all(engine, bulk()))
