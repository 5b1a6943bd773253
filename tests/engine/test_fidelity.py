"""
The engine's greedy tokens are those of transformers, whatever happens on the way.

The default run takes 6 prompts; `make test-slow` takes 40 of 1 to 1,500 tokens and prints
how many answers were equal only because the reference itself was at a near tie.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.load import load_engine
from engine.model_runner import ModelRunner
from engine.request import Step, Ticket
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.support.models import real_model
from tests.support.reference import Reference, compare, generate_reference, load_reference

DOCUMENTS = sorted((Path(__file__).parents[2] / "examples" / "documents").glob("*.txt"))

# what each way of running does to the same prompts
MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "as they come": {"policy": "fcfs"},
    # the other policy lets nobody in who would have to go again
    "swapped": {"policy": "fcfs", "preemption": "swap", "prefix_caching": False},
    "recomputed": {"policy": "fcfs", "preemption": "recompute", "prefix_caching": False},
}


# keys and values of 30 layers, 3 heads of 64, in float32
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4


def make_prompts(lengths: list[int]) -> list[np.ndarray]:
    """Prompts of real text, each from another place of it."""
    text = "\n\n".join(path.read_text() for path in DOCUMENTS)
    tokens = Tokenizer(real_model()).encode(text)
    starts = np.random.default_rng(5).integers(0, len(tokens) - max(lengths), len(lengths))
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def start(references: list[Reference], num_tokens: int, **settings: Any) -> LLMEngine:
    longest = max(len(reference.prompt) for reference in references) + num_tokens
    return load_engine(
        EngineConfig(model=real_model(), device="cpu", dtype="float32", max_model_len=longest, **settings)
    )


def answer(engine: LLMEngine, references: list[Reference], num_tokens: int) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    outputs = engine.generate([reference.prompt for reference in references], params)
    return [output.completions[0].token_ids for output in outputs]


def check(name: str, references: list[Reference], answers: list[tuple[int, ...]]) -> None:
    verdict = compare(references, answers)
    print(f"\n{name}: {verdict.equal} equal, {verdict.excused} after a near tie, {len(verdict.different)} different")
    assert () == verdict.different


def small_pool(references: list[Reference], num_tokens: int) -> int:
    """Bytes of a pool that all prompts fit with little room to grow, so that preemption must happen."""
    lengths = [len(reference.prompt) for reference in references]
    blocks = sum(length // 16 + 2 for length in lengths)
    longest = (max(lengths) + num_tokens) // 16 + 1
    return (max(blocks, longest) + 1) * 16 * BYTES_PER_TOKEN


def reference_answers(lengths: list[int], num_tokens: int) -> list[Reference]:
    return generate_reference(load_reference(real_model(), torch.float32), make_prompts(lengths), num_tokens)


@pytest.fixture(scope="module")
def few() -> list[Reference]:
    return reference_answers([1, 15, 16, 17, 40, 130], 40)


def run_all_modes(references: list[Reference], num_tokens: int) -> None:
    engine = start(references, num_tokens)
    check("alone", references, [answer(engine, [reference], num_tokens)[0] for reference in references])
    check("prefix cache warm", references, answer(engine, references, num_tokens))
    assert engine.stats().prefix_hit_tokens > 0
    for name, settings in MODES.items():
        pressed = "preemption" in settings
        if pressed:
            settings = settings | {"kv_cache_bytes": small_pool(references, num_tokens)}
        engine = start(references, num_tokens, **settings)
        check(name, references, answer(engine, references, num_tokens))
        if pressed:
            assert engine.stats().num_preemptions > 0


@pytest.mark.timeout(400)
def test_greedy_tokens_equal_transformers(few: list[Reference]) -> None:
    """
    Alone, batched, chunked, from a warm cache, swapped and recomputed: the same tokens.
    """
    run_all_modes(few, 40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_tokens_equal_transformers_on_40_prompts() -> None:
    """
    The same for 40 prompts of 1 to 1,500 tokens.
    """
    lengths = sorted({1, *np.geomspace(2, 1500, 39).astype(int).tolist()})
    lengths += [int(n) for n in np.random.default_rng(6).integers(1, 600, 40 - len(lengths))]
    run_all_modes(reference_answers(lengths, 40), 40)


def seeded_answer(prompts: list[np.ndarray], **settings: Any) -> tuple[int, ...]:
    """The last prompt's seeded draws, with the others running beside it."""
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True)
    engine = load_engine(EngineConfig(model=real_model(), device="cpu", dtype="float32", max_model_len=256, **settings))
    return engine.generate(prompts, params)[-1].completions[0].token_ids


@pytest.mark.timeout(400)
def test_seeded_draws_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A seeded sampled request gives the same tokens alone, among 31 others, and after preemption.
    """
    prompts = make_prompts([9 + 2 * i for i in range(31)] + [37])
    starts: Counter[str] = Counter()
    launch = ModelRunner.launch

    def count_starts(runner: ModelRunner, step: Step) -> Ticket:
        starts.update(chunk.sequence.request.request_id for chunk in step.chunks if chunk.join)
        return launch(runner, step)

    monkeypatch.setattr(ModelRunner, "launch", count_starts)
    alone = seeded_answer(prompts[-1:])
    assert alone == seeded_answer(prompts)

    # all prompts fit with little room to grow: the last to come gives way
    blocks = sum(len(prompt) // 16 + 2 for prompt in prompts) + 12
    for kind in ("swap", "recompute"):
        starts.clear()
        pressed = {"policy": "fcfs", "preemption": kind, "kv_cache_bytes": blocks * 16 * BYTES_PER_TOKEN}
        assert alone == seeded_answer(prompts, **pressed)
        assert starts["generate-31"] > 1
