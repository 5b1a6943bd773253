"""An engine with the CUDA runner whose device is the CPU: references, or the interpreter, stand in for kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.block_manager import BlockManager
from engine.config import PolicyName
from engine.cuda.cascade import CascadeGate
from engine.cuda.kv_cache import CudaKVCache
from engine.cuda.model_runner import CudaModelRunner
from engine.cuda.prefill_graphs import PrefillGraphs, PrefillShape
from engine.kv_cache import CacheShape, KVCache
from engine.llm_engine import LLMEngine
from engine.model.loader import load_model
from engine.model_runner import ModelRunner
from engine.output import OutputProcessor
from engine.policy import PreemptionPolicy
from engine.queue_policy import queue_policy
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.state import SamplingState
from tests.support import grammars
from tests.support.tiny_models import VOCAB

MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 128
BLOCK_SIZE = 4
CPU = torch.device("cpu")


class Passed:
    """An event on a device that has always done everything."""

    def record(self) -> None:
        """It has come already."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class RunAnew(PrefillGraphs):
    """
    What graphs hold, without a device that records: over the same buffers, run again for each step.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replayed: list[PrefillShape] = []

    def _replay(self, shape: PrefillShape) -> None:
        self.replayed.append(shape)
        self._run(shape)


def make_engine(
    folder: Path,
    *,
    cuda: bool,
    num_blocks: int = 200,
    budget: int = 40,
    mode: str = "auto",
    depth: int = 2,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_model_len: int = MAX_MODEL_LEN,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
    policy: PolicyName = "throughput",
    cascade: CascadeGate | None = None,
    fp8: bool = False,
    prefix_caching: bool = True,
    prefill_shapes: Sequence[PrefillShape] = (),
) -> LLMEngine:
    model, config = load_model(folder, dtype=dtype, max_model_len=max_model_len)
    shape = CacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        dtype=torch.float8_e4m3fn if fp8 else dtype,
    )
    state = SamplingState(max_num_seqs=max_num_seqs + cuda, vocab_size=VOCAB, eos_token_ids=[3])
    sampler = Sampler(state, VOCAB)
    runner: CudaModelRunner | ModelRunner
    if cuda:
        runner = CudaModelRunner(
            model,
            CudaKVCache(shape, CPU),
            sampler,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            cascade=cascade,
            make_event=Passed,
        )
        if prefill_shapes:
            # as `prefill_shapes` has them: none is larger than a step may be
            shapes = [shape for shape in prefill_shapes if shape.tokens <= budget]
            runner.prefill_graphs = RunAnew(runner._forward, runner.state.inputs, runner.windows, shapes)
    else:
        runner = ModelRunner(model, KVCache(shape), sampler, state)
    return LLMEngine(
        scheduler=Scheduler(
            BlockManager(
                num_blocks=num_blocks,
                block_size=block_size,
                num_host_blocks=num_blocks,
                prefix_caching=prefix_caching,
            ),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            preemption=PreemptionPolicy(mode),
            policy=queue_policy(policy),
        ),
        runner=runner,
        outputs=OutputProcessor(None, [3], max_model_len),
        tokenizer=None,
        vocab_size=VOCAB,
        model_name="tiny",
        fingerprint="",
        depth=depth if cuda else 1,
        grammars=grammars.compiler(),
    )
