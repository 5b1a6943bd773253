"""
Steps of short prompts as CUDA graphs.

The kernels of such a step take longer to launch one by one than to run: some ten milliseconds where a small
model computes for two. A step that starts prompts and does nothing else runs in the next larger graph, its
missing tokens and prompts filled with padding that nothing attends to or stores.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.cuda.graphs import garbage_kept
from engine.cuda.plan import PackedPrefill
from engine.model.config import ModelConfig
from kernels.prefill_attention import VarlenPart, VarlenPrefill
from kernels.step_state import DecodeInputs

# steps of so many tokens have a graph; closer together where a model may be large, whose padding takes its time
_TOKENS = (32, 64, 128, 256, 384, 512, 1024, 2048, 4096)
# what a processor took to launch a layer of a step with prompts, before `kernels.cuda.launching`, and what products
# reach on a GPU of the H200's kind, of 16 bits and of 32
_LAUNCH_S = 400e-6
_FLOPS, _FLOPS_OF_FLOAT32 = 600e12, 50e12
# a graph of one token would have room for more prompts than tokens
_LEAST_TOKENS = 8

# attention is launched for as many prompts of the longest length as a graph has room for, whether they are there or
# not: 64 of 512 tokens are 7,000 programs of 14 heads, and an empty one takes some 2 ns. So there are many or long ones
_FEW_PROMPTS = 8
_TOKENS_PER_PROMPT = 64
_SHORT_PROMPT = 512

# rows of a batch to what the network makes of them, before the last norm
Forward = Callable[[ForwardBatch], Tensor]


class PrefillShape(NamedTuple):
    """
    What a graph has room for.

    Args:
        tokens: Of all prompts.
        longest: Tokens of one prompt.
        prompts: How many at most.
    """

    tokens: int
    longest: int
    prompts: int


def prefill_shapes(
    config: ModelConfig, dtype: torch.dtype, *, max_num_batched_tokens: int, max_num_seqs: int
) -> list[PrefillShape]:
    """Graphs for a model, ascending: those that compute for no longer than their kernels are launched."""
    affordable = affordable_tokens(config.num_layers, config.layer_weights, dtype)
    return shapes_within(affordable, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)


def affordable_tokens(num_layers: int, layer_weights: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """
    Tokens that a model computes in the time in which the kernels of its layers are launched one by one.

    Args:
        layer_weights: Numbers that tokens are multiplied with, in all layers together.
    """
    flops = _FLOPS_OF_FLOAT32 if dtype.itemsize > 2 else _FLOPS
    return num_layers * _LAUNCH_S * flops / (2 * layer_weights)


def shapes_within(affordable: float, *, max_num_batched_tokens: int, max_num_seqs: int) -> list[PrefillShape]:
    """
    Graphs of no more tokens than are affordable, ascending.

    Up to 512 tokens are up to 8 prompts of any length; more are many short prompts, or 8 of any length.
    """
    shapes = set()
    for size in _TOKENS:
        tokens = min(size, max_num_batched_tokens)
        if not _LEAST_TOKENS <= tokens <= affordable:
            break
        shapes.add(PrefillShape(tokens, tokens, _FEW_PROMPTS))
        if max_num_seqs > _FEW_PROMPTS:
            many = max(_FEW_PROMPTS, tokens // _TOKENS_PER_PROMPT)
            shapes.add(PrefillShape(tokens, min(tokens, _SHORT_PROMPT), many))
    return sorted(shapes)


def smallest(shapes: Sequence[PrefillShape], *, tokens: int, longest: int, prompts: int) -> PrefillShape | None:
    """The first that has room, of ascending ones."""
    for shape in shapes:
        if prompts <= shape.prompts and longest <= shape.longest and tokens <= shape.tokens:
            return shape
    return None


class PrefillGraphs:
    """
    A graph for every shape, all in one memory pool.

    Args:
        forward: The network, with the caches that it is to write to.
        inputs: The buffers that every step's tokens go to, long enough for each shape.
        windows: Of the network's layers.
        shapes: Ascending.
    """

    def __init__(
        self, forward: Forward, inputs: DecodeInputs, windows: Collection[int | None], shapes: Sequence[PrefillShape]
    ) -> None:
        self._forward = forward
        self._inputs = inputs
        self._windows = windows
        self._shapes = shapes
        most = max((shape.prompts for shape in shapes), default=0)
        # prompts that are not there begin and end where the last one ends
        self._query_start = torch.zeros(most + 1, dtype=torch.int32, device=inputs.input_ids.device)
        self._graphs: dict[PrefillShape, torch.cuda.CUDAGraph] = {}
        self._hidden: Tensor | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self) -> None:
        """Capture them all, the largest first: the smaller ones fit into its memory, as nothing in it is kept."""
        pool = torch.cuda.graph_pool_handle()
        self._inputs.slot_mapping.fill_(-1)
        with garbage_kept():
            for shape in reversed(self._shapes):
                # libraries load their kernels for a shape at its first call, which a capture may not contain
                self._run(shape)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._run(shape)
                self._graphs[shape] = graph
        torch.cuda.synchronize()

    def shape_for(self, prefill: PackedPrefill) -> PrefillShape | None:
        """The smallest graph that has room for these prompts; None where none has, as with chunks behind a prefix."""
        fresh = prefill.fresh
        if fresh is None or prefill.behind:
            return None
        return smallest(self._shapes, tokens=prefill.num_tokens, longest=fresh.max_query, prompts=fresh.slots.count)

    def replay(self, shape: PrefillShape, prefill: PackedPrefill, sent: Tensor) -> Tensor:
        """
        Run the prompts of a step for which `shape_for` gave a shape.

        Args:
            sent: The step's numbers, on the device.

        Returns:
            [num_tokens, hidden_size], until the next replay.
        """
        assert prefill.fresh is not None
        count, starts = prefill.num_tokens, sent[prefill.fresh.query_start.place]
        inputs = self._inputs.rows(shape.tokens)
        inputs.input_ids[:count].copy_(sent[prefill.input_ids.place])
        inputs.positions[:count].copy_(sent[prefill.positions.place])
        inputs.slot_mapping[:count].copy_(sent[prefill.slot_mapping.place])
        inputs.slot_mapping[count:].fill_(-1)
        self._query_start.fill_(count)
        self._query_start[: len(starts)].copy_(starts)
        self._replay(shape)
        assert self._hidden is not None
        return self._hidden[:count]

    def _replay(self, shape: PrefillShape) -> None:
        self._graphs[shape].replay()

    def _run(self, shape: PrefillShape) -> None:
        """The network over the static buffers: what a graph holds."""
        inputs, starts = self._inputs.rows(shape.tokens), self._query_start[: shape.prompts + 1]
        part = VarlenPart(
            num_tokens=shape.tokens,
            query_start=starts,
            key_start=starts,
            max_query=shape.longest,
            max_key=shape.longest,
            num_keys=shape.tokens,
        )
        hidden = self._forward(
            ForwardBatch(
                input_ids=inputs.input_ids,
                positions=inputs.positions,
                slot_mapping=inputs.slot_mapping,
                num_decodes=0,
                decode={},
                prefill={window: VarlenPrefill(window=window, fresh=part, behind=()) for window in self._windows},
            )
        )
        if self._hidden is None:
            # at the first run, which is none of a capture: outside of the pool, where it is for all graphs
            self._hidden = hidden.new_empty(self._shapes[-1].tokens, hidden.shape[1])
        self._hidden[: shape.tokens].copy_(hidden)
