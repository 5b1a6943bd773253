"""
Random work for the CUDA runner on a CPU, each kernel's reference in its place.

However deep steps overlap, whoever is aborted, and however small cache, batch and budget are: an
answer is what the CPU runner gives with room and time for everyone. In float64, so that no order of
sums decides; some with keys and values in eight bits.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.cuda.cascade import CascadeGate
from engine.cuda.model_runner import CudaModelRunner
from engine.cuda.prefill_graphs import PrefillShape
from engine.cuda.ticket import CudaTicket
from engine.llm_engine import LLMEngine
from engine.request import Completion, FinishReason, Progress, Request, RequestOutput, Step
from engine.sampling_params import SamplingParams
from tests.support.answers import run_all
from tests.support.cuda_engine import MAX_MODEL_LEN, make_engine
from tests.support.grammars import CHOICE, DIGITS, JSON, LETTERS, follows, spell
from tests.support.tiny_models import VOCAB, save_tiny_model

KINDS = (
    {},
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0.7, "seed": 3},
    {"logprobs": 3},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"min_tokens": 5, "logit_bias": {3: 6.0, 17: 2.0}},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"grammar": JSON, "temperature": 1.0, "seed": 8, "logprobs": 2},
    {"grammar": DIGITS, "min_tokens": 4},
    {"grammar": LETTERS, "n": 2, "temperature": 1.5, "seed": 9, "top_k": 9, "logit_bias": {3: 4.0}},
    {"grammar": LETTERS, "repetition_penalty": 1.5, "ignore_eos": True, "min_tokens": 3},
    {"grammar": CHOICE, "temperature": 1.0, "seed": 4, "top_p": 0.8},
)
# of the steps that have a graph: tokens, the longest prompt and prompts; none, or of some shapes
GRAPHS = (
    (),
    (PrefillShape(4, 4, 2), PrefillShape(12, 12, 2)),
    (PrefillShape(16, 16, 1), PrefillShape(40, 9, 5), PrefillShape(40, 40, 2), PrefillShape(200, 70, 6)),
)
PROMPT_LENGTHS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 70, MAX_MODEL_LEN - 1)


def make_requests(rng: random.Random, *, alike: bool) -> list[Request]:
    """Of all kinds, many with a head in common, nearly all of it where they are alike, and ends that come by chance."""
    head = [rng.randrange(4, VOCAB) for _ in range(MAX_MODEL_LEN)]
    requests = []
    for index in range(rng.randint(3, 12)):
        length = rng.choice((17, 33, 70) if alike else PROMPT_LENGTHS)
        shared = length - rng.randint(0, 12) if alike else rng.randint(0, length)
        prompt = head[:shared] + [rng.randrange(4, VOCAB) for _ in range(length - shared)]
        ends = tuple(rng.sample(range(4, VOCAB), rng.choice((0, 0, 12))))
        params = SamplingParams(max_tokens=rng.randint(5, 30), stop_token_ids=ends, **rng.choice(KINDS))  # type: ignore[arg-type]
        resumed = ()
        # what is resumed here is any tokens, which a grammar would not take
        if rng.random() < 0.2 and params.grammar is None:
            resumed = tuple(
                Progress(tuple(rng.randrange(4, VOCAB) for _ in range(rng.randint(0, 4)))) for _ in range(params.n)
            )
        requests.append(
            Request(str(index), np.array(prompt, np.int32), params, resumed=resumed, priority=rng.choice((0, 1, 2)))
        )
    return requests


def play(engine: LLMEngine, requests: list[Request], rng: random.Random) -> Iterator[tuple[Request, RequestOutput]]:
    """Add them over time, abort some, and some of these come again under the same id."""
    todo, live = list(requests), dict[str, Request]()
    while todo or engine.has_work:
        while todo and (not engine.has_work or rng.random() < 0.4):
            request = todo.pop(0)
            live[request.request_id] = request
            engine.add(request)
        if live and rng.random() < 0.06:
            request = live.pop(rng.choice(sorted(live)))
            output = engine.abort(request.request_id)
            if output is not None:
                yield request, output
            else:
                live[request.request_id] = request
            if output is not None and rng.random() < 0.5:
                live[request.request_id] = request
                engine.add(request)
        for output in engine.step().finished:
            yield live.pop(output.request_id), output
        engine._scheduler.check()


def assert_answer(want: Completion, got: Completion) -> None:
    if got.finish_reason is FinishReason.ABORT:
        assert got.token_ids == want.token_ids[: len(got.token_ids)]
    else:
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
    assert (got.logprobs is None) == (want.logprobs is None)
    for one, other in zip(want.logprobs or (), got.logprobs or (), strict=False):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)


def assert_prompt_logprobs(want: RequestOutput, got: RequestOutput, *, whole: bool) -> None:
    assert (want.prompt_logprobs is None) == (got.prompt_logprobs is None)
    for one, other in zip(want.prompt_logprobs or (), got.prompt_logprobs or (), strict=True):
        if one is None or other is None:
            assert one is other or not whole
        else:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A plain one with biases, and one with windows."""
    paths = []
    for name in ("llama with biases", "qwen2 with windows"):
        paths.append(tmp_path_factory.mktemp("model"))
        save_tiny_model(name, paths[-1])
    return paths


def check_books(engine: LLMEngine) -> None:
    """Whenever a step is launched, what the runner knows of shared prefixes is what the tables say."""
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    launch = runner.launch

    def checked(step: Step) -> CudaTicket:
        ticket = launch(step)
        if runner.cascade:
            running = engine._scheduler.running
            runner.cascade.prefixes.check({sequence.slot: sequence.block_table for sequence in running})
        return ticket

    runner.launch = checked  # type: ignore[method-assign]


def taken_up(request: Request, expected: RequestOutput, rng: random.Random) -> Request:
    """Some of the requests in a grammar with what another engine has made of them before it died."""
    if request.params.grammar is None or rng.random() < 0.5:
        return request
    pieces = []
    for answer in expected.completions:
        stop = rng.randint(0, len(answer.token_ids))
        logprobs = answer.logprobs[:stop] if answer.logprobs is not None else ()
        pieces.append(Progress(answer.token_ids[:stop], logprobs))
    return replace(request, resumed=tuple(pieces))


def assert_follows(request: Request, answer: Completion) -> None:
    """What ended by itself is a text of the grammar."""
    assert answer.finish_reason is not FinishReason.ERROR, answer.error
    if request.params.grammar is not None and answer.finish_reason is FinishReason.STOP:
        ended = answer.token_ids[-1] in request.params.stop_token_ids
        text = spell(answer.token_ids[:-1] if ended else answer.token_ids)
        # a token that the job named as an end may stand inside
        assert ended or follows(request.params.grammar, text), text


def check(folders: list[Path], seed: int) -> None:
    rng = random.Random(seed)
    folder = rng.choice(folders)
    alike = rng.random() < 0.5
    requests = make_requests(rng, alike=alike)
    fp8 = rng.random() < 0.3
    undisturbed = [replace(request, priority=0) for request in requests]
    large = make_engine(folder, cuda=False, num_blocks=800, budget=400, dtype=torch.float64, fp8=fp8)
    expected = run_all(large, undisturbed)
    requests = [taken_up(request, expected[request.request_id], rng) for request in requests]
    block_size = rng.choice((1, 3, 4, 16))
    longest = -(-MAX_MODEL_LEN // block_size)
    engine = make_engine(
        folder,
        cuda=True,
        depth=rng.randint(1, 3),
        mode="recompute",
        num_blocks=1 + longest + rng.choice((longest // 2, 2 * longest) if alike else (0, 3, longest)),
        budget=rng.choice((17, 40, 200) if alike else (1, 2, 5, 17, 40, 200)),
        max_num_seqs=rng.choice((3, 6) if alike else (1, 2, 3, 6)),
        block_size=block_size,
        dtype=torch.float64,
        # as many as there may be, of the shortest prefixes that a pass can have, or none
        cascade=rng.choice((CascadeGate(2, 1), CascadeGate(3, 1), None)),
        fp8=fp8,
        prefill_shapes=rng.choice(GRAPHS),
    )
    check_books(engine)

    finished = 0
    for request, output in play(engine, requests, rng):
        want = expected[request.request_id]
        aborted = any(answer.finish_reason is FinishReason.ABORT for answer in output.completions)
        finished += not aborted
        for one, other in zip(want.completions, output.completions, strict=True):
            assert_answer(one, other)
            assert_follows(request, other)
        assert_prompt_logprobs(want, output, whole=not aborted)
    blocks = engine._scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_usable_blocks


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_random_work_gives_the_answers_of_the_cpu(folders: list[Path], seed: int) -> None:
    """
    Late ends, aborts, slots and ids taken over by others, recomputes, shared prefixes, chunks of one token.
    """
    check(folders, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_much_random_work_gives_the_answers_of_the_cpu(folders: list[Path], seed: int) -> None:
    """
    The same for many more seeds, new ones in every run.
    """
    check(folders, seed)
