"""
Steps of a few short prompts as CUDA graphs.

The kernels of such a step take longer to launch one by one than to run: some ten milliseconds where a small
model computes for two. A step that starts prompts and does nothing else runs in the graph of the next larger
size, its missing tokens filled with padding that nothing attends to or stores.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.cuda.graphs import garbage_kept
from engine.cuda.plan import PackedPrefill
from kernels.prefill_attention import VarlenPart, VarlenPrefill
from kernels.step_state import DecodeInputs

# tokens of the steps that have a graph: with more, the device works for as long as a launch takes
GRAPH_TOKENS = (32, 64, 128, 256, 512)
# prompts of such a step
GRAPH_CHUNKS = 8

# rows of a batch to what the network makes of them, before the last norm
Forward = Callable[[ForwardBatch], Tensor]


class PrefillGraphs:
    """
    A graph for every size, all in one memory pool.

    Args:
        forward: The network, with the caches that it is to write to.
        inputs: The buffers that every step's tokens go to.
        windows: Of the network's layers.
        sizes: Ascending, in tokens.
    """

    def __init__(
        self,
        forward: Forward,
        inputs: DecodeInputs,
        windows: Collection[int | None],
        sizes: Sequence[int] = GRAPH_TOKENS,
    ) -> None:
        self._forward = forward
        self._inputs = inputs
        self._windows = windows
        self._sizes = [size for size in sizes if size <= len(inputs.input_ids)]
        # of chunks that are not there: all begin and end where the last one ends
        self._query_start = torch.zeros(GRAPH_CHUNKS + 1, dtype=torch.int32, device=inputs.input_ids.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self) -> None:
        """Capture them all, the largest first: the smaller ones fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        self._inputs.slot_mapping.fill_(-1)
        with garbage_kept():
            for size in reversed(self._sizes):
                # libraries load their kernels for a shape at its first call, which a capture may not contain
                self._run(size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._hidden[size] = self._run(size)
                self._graphs[size] = graph
        torch.cuda.synchronize()

    def size_for(self, prefill: PackedPrefill) -> int | None:
        """The size of the graph that runs these prompts; None where none does, as with chunks behind a prefix."""
        fresh, place = prefill.fresh, bisect_left(self._sizes, prefill.num_tokens)
        if fresh is None or prefill.behind or fresh.slots.count > GRAPH_CHUNKS or place == len(self._sizes):
            return None
        return self._sizes[place]

    def replay(self, size: int, prefill: PackedPrefill, sent: Tensor) -> Tensor:
        """
        Run the prompts of a step for which `size_for` gave a size.

        Args:
            sent: The step's numbers, on the device.

        Returns:
            [num_tokens, hidden_size], until the next replay.
        """
        assert prefill.fresh is not None
        count, starts = prefill.num_tokens, sent[prefill.fresh.query_start.place]
        inputs = self._inputs.rows(size)
        inputs.input_ids[:count].copy_(sent[prefill.input_ids.place])
        inputs.positions[:count].copy_(sent[prefill.positions.place])
        inputs.slot_mapping[:count].copy_(sent[prefill.slot_mapping.place])
        inputs.slot_mapping[count:].fill_(-1)
        self._query_start.fill_(count)
        self._query_start[: len(starts)].copy_(starts)
        return self._replayed(size)[:count]

    def _replayed(self, size: int) -> Tensor:
        self._graphs[size].replay()
        return self._hidden[size]

    def _run(self, size: int) -> Tensor:
        """The network over the static buffers: what a graph holds."""
        inputs, starts = self._inputs.rows(size), self._query_start
        part = VarlenPart(size, starts, starts, max_query=size, max_key=size, num_keys=size)
        return self._forward(
            ForwardBatch(
                input_ids=inputs.input_ids,
                positions=inputs.positions,
                slot_mapping=inputs.slot_mapping,
                num_decodes=0,
                decode={},
                prefill={window: VarlenPrefill(window=window, fresh=part, behind=()) for window in self._windows},
            )
        )
