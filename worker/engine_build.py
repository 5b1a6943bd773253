"""Builds the engine that a worker was told to run; torch is loaded for the real one alone, and here alone."""

import sys
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ModelNotFound
from worker.engine_port import Engine, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """The settings of a fake engine, as `FakeEngine` names them."""

    model_name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int
    tokens_per_s: float | None
    poison: bool


EnginePlan = EngineConfig | FakeConfig


def build_engine(plan: EnginePlan) -> tuple[Engine, Tokenizer]:
    """
    Raises:
        StartupError: the device cannot be used, or the model is not there or does not fit.
    """
    if isinstance(plan, FakeConfig):
        from worker.fake_engine import FakeEngine

        fake = FakeEngine(
            model_name=plan.model_name,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            kv_tokens=plan.kv_tokens,
            tokens_per_s=plan.tokens_per_s,
            poison=plan.poison,
        )
        return fake, fake.tokenizer

    # torch takes seconds to import, and the fake engine does not need it
    from engine.load import load_engine

    engine = load_engine(plan)
    if engine.tokenizer is None:
        raise ModelNotFound(f"{plan.model} has no tokenizer.json: the worker cannot read text without it")
    return engine, engine.tokenizer


def gpu_in_use() -> str:
    """The GPU that this process computes on, as the driver names it; empty where it uses none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    # torch leaves out what stands before it
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def load_tokenizer(plan: EnginePlan) -> Tokenizer:
    """
    The same tokenizer without its engine.

    Raises:
        ModelNotFound: as `build_engine`.
    """
    if isinstance(plan, FakeConfig):
        from worker.fake_engine import ByteTokenizer

        return ByteTokenizer()
    from engine.tokenizer import Tokenizer as ModelTokenizer

    return ModelTokenizer(plan.model)
