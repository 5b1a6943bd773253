"""
Engines whose keys and values have eight bits: the same answer whatever happens on the way to it.

In float64 to the last token. In float32 the cut of a prompt decides last bits, and one of these may move a
number to the next of float8's steps, which are coarse.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import load
from engine.config import EngineConfig
from engine.cuda.model_runner import CudaModelRunner
from engine.errors import NotEnoughMemory
from engine.kv_cache import KVCache
from engine.load import load_engine
from engine.model_runner import ModelRunner
from engine.policy import PreemptionPolicy
from engine.request import RequestOutput
from tests.support.answers import (
    answer_differences,
    assert_same_answers,
    make_greedy_requests,
    make_requests,
    run_all,
)
from tests.support.cuda_engine import make_engine
from tests.support.tiny_models import save_calm_model, save_tiny_model, save_tiny_writer

# what each way of running does to the same requests
MODES: dict[str, dict[str, Any]] = {
    "batched": {"cuda": False},
    "chunks of 3": {"cuda": False, "budget": 3, "prefix_caching": False},
    "swapped": {"cuda": False, "mode": "swap", "num_blocks": 36},
    "recomputed": {"cuda": False, "mode": "recompute", "num_blocks": 36},
    "overlapped": {"cuda": True, "depth": 2},
    "overlapped, chunks of 3": {"cuda": True, "depth": 3, "budget": 3, "prefix_caching": False},
    "overlapped, recomputed": {"cuda": True, "depth": 2, "mode": "recompute", "num_blocks": 36},
}
REQUESTS = make_requests(seed=3, longest=40)
FP8: dict[str, Any] = {"fp8": True, "dtype": torch.float64}
LARGE: dict[str, Any] = {"cuda": False, "num_blocks": 800, "budget": 400}


@pytest.fixture(scope="module", params=["mistral", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(request.param, path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, RequestOutput]:
    """Each request by itself, its prompt in one piece."""
    engine = make_engine(folder, **LARGE, **FP8)
    answers = {}
    for request in REQUESTS:
        engine.reset_prefix_cache()
        answers |= run_all(engine, [request])
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_same(folder: Path, alone: dict[str, RequestOutput], mode: str) -> None:
    """
    In company, cut anywhere, swapped or computed again, on either runner: the rounded numbers are attended always.
    """
    settings = MODES[mode]
    engine = make_engine(folder, **settings, **FP8)

    assert_same_answers(alone, run_all(engine, REQUESTS))
    assert "num_blocks" not in settings or engine.stats().num_preemptions


def test_a_warm_prefix_cache_changes_nothing(folder: Path, alone: dict[str, RequestOutput]) -> None:
    """
    What another request left in the cache is what this one would have computed.
    """
    engine = make_engine(folder, **LARGE, **FP8)
    run_all(engine, REQUESTS)
    before = engine.stats().prefix_hit_tokens

    assert_same_answers(alone, run_all(engine, REQUESTS))
    assert engine.stats().prefix_hit_tokens > before


def test_company_changes_nothing_in_float32(folder: Path) -> None:
    """
    Where it leaves a prompt in one piece, log-probabilities are equal to the last bit.
    """
    whole: dict[str, Any] = {"cuda": False, "num_blocks": 800, "budget": 1000, "prefix_caching": False, "fp8": True}
    together = run_all(make_engine(folder, **whole), REQUESTS)

    for request in REQUESTS[::3]:
        answer = run_all(make_engine(folder, **whole), [request])[request.request_id]

        assert replace(together[request.request_id], gpu_ms=0) == replace(answer, gpu_ms=0)


def test_float32_gives_nearly_the_same(tmp_path: Path) -> None:
    """
    Log-probabilities of prompts and answers, far nearer than those without the rounding are.
    """
    save_calm_model("qwen3", tmp_path)
    requests = make_greedy_requests(seed=1)
    expected = run_all(make_engine(tmp_path, fp8=True, **LARGE), requests)
    plain = answer_differences(expected, run_all(make_engine(tmp_path, **LARGE), requests))
    assert min(plain) > 0.01

    for mode in ("chunks of 3", "recomputed", "overlapped"):
        actual = run_all(make_engine(tmp_path, fp8=True, **MODES[mode]), requests)

        assert max(answer_differences(expected, actual)) < 0.002, mode


def test_eight_bits_are_seen_in_the_answers(folder: Path, alone: dict[str, RequestOutput]) -> None:
    """
    Random models are sensitive: had the cache not been read, answers would be those without it.
    """
    plain = run_all(make_engine(folder, dtype=torch.float64, **LARGE), REQUESTS)

    assert any(
        plain[name].completions[0].token_ids != output.completions[0].token_ids for name, output in alone.items()
    )


def test_steps_on_trial_leave_nothing_behind(folder: Path) -> None:
    """
    The steps that measure a GPU's memory run over the null block, whose scales are zero.
    """
    requests = [request for request in REQUESTS if len(request.prompt) < 40][:6]
    expected = run_all(make_engine(folder, **LARGE, **FP8), requests)
    engine = make_engine(folder, cuda=True, **FP8)
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    runner.try_decode(4)
    runner.try_largest_step(40)

    assert_same_answers(expected, run_all(engine, requests))
    assert runner.kv_cache.scales is not None
    assert all(0.0 == float(scales[:, 0].abs().max()) for scales in runner.kv_cache.scales)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tmp_path_factory.mktemp("writer")
    save_tiny_writer(path, max_model_len=256)
    return EngineConfig(
        model=path, device="cpu", dtype="float32", kv_cache_bytes=4 << 20, swap_space_bytes=1 << 20, num_threads=1
    )


def test_the_setting_gives_more_blocks_of_the_same_memory(config: EngineConfig) -> None:
    """
    Blocks of heads of 16 have 16 + 4 bytes in place of 64, on the device and on the host.
    """
    plain, fp8 = (load_engine(replace(config, kv_cache_dtype=dtype)) for dtype in ("auto", "fp8"))

    shapes = []
    for engine in (plain, fp8):
        assert isinstance(engine._runner, ModelRunner)
        assert isinstance(engine._runner.kv_cache, KVCache)
        shapes.append(engine._runner.kv_cache.shape)
    assert (torch.float32, torch.float8_e4m3fn) == (shapes[0].dtype, shapes[1].dtype)
    for wide, narrow in (
        (shapes[0].num_blocks, shapes[1].num_blocks),
        (shapes[0].num_host_blocks, shapes[1].num_host_blocks),
    ):
        assert narrow == pytest.approx(wide * 64 / 20, rel=0.01)
    assert fp8.kv_tokens == (shapes[1].num_blocks - 1) * 16
    # work that one has begun is not gone on with by the other
    assert plain.fingerprint != fp8.fingerprint


def test_too_little_memory_is_told_in_true_sizes(config: EngineConfig) -> None:
    """
    What one sequence needs is that of eight bits.
    """
    block_bytes = 3 * 2 * 2 * 16 * (16 + 4)
    settings = replace(config, kv_cache_dtype="fp8", kv_cache_bytes=17 * block_bytes)
    load_engine(settings)

    with pytest.raises(NotEnoughMemory, match="holds 240 tokens"):
        load_engine(replace(settings, kv_cache_bytes=17 * block_bytes - 1))


def test_a_swap_is_weighed_by_true_sizes(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The choice between swap and recompute counts the bytes that a swap would copy.
    """
    weighed = []

    def remember(mode: str, *, bytes_per_token: int, **speeds: float) -> PreemptionPolicy:
        weighed.append(bytes_per_token)
        return PreemptionPolicy(mode, bytes_per_token=bytes_per_token, **speeds)

    monkeypatch.setattr(load, "PreemptionPolicy", remember)
    for dtype in ("auto", "fp8"):
        load_engine(replace(config, kv_cache_dtype=dtype))

    assert [3 * 2 * 2 * 64, 3 * 2 * 2 * 20] == weighed
