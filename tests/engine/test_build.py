"""What graphs are counted as before the KV cache is made, with a device that is pretended."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.config import ResolvedConfig
from engine.cuda import build
from engine.cuda.graphs import Sampling, cascade_sizes, graph_sizes
from engine.cuda.model_runner import CudaModelRunner
from engine.cuda.prefill_graphs import PrefillShape, prefill_shapes
from engine.gpu_memory import MemorySnapshot
from engine.model.config import ModelConfig
from tests.support.tiny_models import TINY_CONFIGS

MIB = 2**20
NODES = MIB
MODEL = ModelConfig.parse({**TINY_CONFIGS["qwen3"].to_dict(), "architectures": ["Qwen3ForCausalLM"]})
LIMITS = {"max_num_batched_tokens": 4096, "max_num_seqs": 64}


class FakeRunner:
    """Takes a MiB of nodes for each graph, and for each kind a pool that is as large as its largest graph."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(config=MODEL, dtype=torch.bfloat16)
        self.cascade = True
        self.graphs: range | None = None
        self.prefill_graphs: range | None = None
        self.pools = 0

    def capture_graphs(self, sizes: Sequence[int], more: Sequence[int], prefills: Sequence[PrefillShape]) -> None:
        self.graphs = range((len(sizes) + len(more)) * len(Sampling))
        self.prefill_graphs = range(len(prefills))
        # what attends many prompts takes more than what attends long ones
        self.pools = MIB * (sizes[-1] + max(shape.tokens + shape.prompts for shape in prefills))

    def forget_graphs(self) -> None:
        self.graphs = self.prefill_graphs = None

    @property
    def num_graphs(self) -> int:
        return len(self.graphs or ()) + len(self.prefill_graphs or ())

    def snapshot(self, _device: torch.device) -> MemorySnapshot:
        pools = self.pools if self.num_graphs else 0
        return MemorySnapshot(total=2**36, free=2**36 - pools - NODES * self.num_graphs, reserved=pools)


def test_graphs_on_trial_show_what_all_of_them_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A pool for decodes and one for prefills, each of its largest graph, and the nodes of every graph.
    """
    runner = FakeRunner()
    monkeypatch.setattr(build, "snapshot", runner.snapshot)
    monkeypatch.setattr(build, "reset_peak", lambda _: None)
    config = cast(ResolvedConfig, SimpleNamespace(**LIMITS))

    num_bytes = build._measure_graphs(cast(CudaModelRunner, cast(Any, runner)), config, torch.device("cpu"))

    assert 0 == runner.num_graphs
    runner.capture_graphs(graph_sizes(64), cascade_sizes(64), prefill_shapes(MODEL, torch.bfloat16, **LIMITS))
    assert runner.pools + NODES * runner.num_graphs == num_bytes
