"""
What a step takes on an H200: the roofline's work, at the rates that were measured.

Prefill attention goes by `results/h200-prefill-attention.jsonl`, of an earlier kernel that was as fast; all else
was fitted to fourteen single steps and sixteen whole runs of both models of the GPU table, which the tests of this
file and of `simulate` name: steps to 5 %, runs to 10 %. Steps with a prompt beside decodes are launched kernel by
kernel, no faster than the processor does that; those of few fresh prompts alone are graphs. Seconds, bytes and
floating-point operations throughout.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from benchmarks.gpu import MAX_NUM_BATCHED_TOKENS
from benchmarks.roofline import H200, Hardware, Shape
from engine.cuda.graphs import graph_sizes
from engine.cuda.prefill_graphs import PrefillShape, affordable_tokens, shapes_within, smallest

_ELEMENT_BYTES = 2.0
_LOGIT_BYTES = 2.0
# sequences that share a prefix from which on it is read in a pass of its own
_PASS_SEQS = 8
# (tokens, operations/s) of causal prefill attention; between two lengths linear
_PREFILL_RATES = ((128, 88e12), (512, 225e12), (1024, 305e12), (2048, 373e12), (4096, 434e12), (8192, 470e12))


@dataclass(frozen=True, slots=True)
class Rates:
    """
    How near to the hardware the engine comes.

    Args:
        matrix: Share of the peak that products of many rows reach, if their inner size is large.
        inner: Inner size at which half of that is reached.
        weights: Share of the read rate at which products of few rows read their weights.
        blend: Exponent of the norm that adds reading to arithmetic where neither prevails.
        context: Share of the read rate at which decode attention of very many sequences reads.
        streams: Sequences times KV heads that reach half of that.
        repeated: Bytes/s of context that another sequence of the step reads too: it is on the chip by then.
        passed: The same where so many share it that it is read in a pass of its own.
        pass_s: What a layer takes longer with that pass.
        layer_s: All else of a layer, by the most rows that it is true of: products of few rows have one kernel of
            ours, those of more another; beyond these they are the library's, and no kernel starts early.
        prompt_layer_s: What a layer takes longer where it is launched kernel by kernel (assumed).
        elements: How often a layer's elementwise kernels move the activations.
        step_s: What is left of a step.
        launch_s: What the processor takes for one kernel that it launches by itself, views and allocations included.
        kernels: Of a layer, where they are launched one by one.
        mixed_s: What else the processor does for a step with a prompt.
        host_s: What it does for a step of 1,024 decodes.
        request_s: What it does for a request while the GPU waits: before the first step, and between steps.
    """

    matrix: float = 0.885
    inner: float = 125.0
    weights: float = 1.0
    blend: float = 1.5
    context: float = 1.05
    streams: float = 31.0
    repeated: float = 13e12
    passed: float = 44e12
    pass_s: float = 18e-6
    layer_s: tuple[tuple[float, float], ...] = ((4, 11e-6), (32, 20e-6), (64, 23e-6), (inf, 32e-6))
    prompt_layer_s: float = 20e-6
    elements: float = 0.48
    step_s: float = 60e-6
    launch_s: float = 33e-6
    kernels: int = 12
    mixed_s: float = 1e-3
    host_s: float = 0.93e-3
    request_s: float = 0.24e-3

    def layer(self, rows: int) -> float:
        """Seconds of a layer of so many rows beside its products and its attention."""
        return next(seconds for most, seconds in self.layer_s if rows <= most)


@dataclass(frozen=True, slots=True)
class Work:
    """
    What a step has to do.

    Args:
        decodes: Sequences that decode.
        context: Tokens that these read, all together.
        repeated: Of them, those that another one reads as well.
        prompts: (tokens computed, tokens before them) of each chunk of a prompt.
        sampled: Chunks of prompts that sample.
    """

    decodes: int
    context: int = 0
    repeated: int = 0
    prompts: Sequence[tuple[int, int]] = ()
    sampled: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(length for length, _ in self.prompts)


@dataclass(frozen=True, slots=True)
class Price:
    """
    What a step takes.

    Args:
        device_s: The GPU's work.
        host_s: The processor's, for the step that is planned meanwhile.
    """

    device_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        return max(self.device_s, self.host_s)


class StepCost:
    """
    Prices steps of one model.

    Args:
        max_num_seqs: The engine's, which decides the sizes of its graphs.
        token_budget: Tokens of its largest step, which no graph of prompts exceeds.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        max_num_seqs: int,
        token_budget: int = MAX_NUM_BATCHED_TOKENS,
        rates: Rates | None = None,
        gpu: Hardware = H200,
    ) -> None:
        self.shape = shape
        self.rates = rates or Rates()
        self.gpu = gpu
        self.sizes = graph_sizes(max_num_seqs)
        self.prefills = shapes_within(
            affordable_tokens(shape.layers, shape.linear_params),
            max_num_batched_tokens=token_budget,
            max_num_seqs=max_num_seqs,
        )
        self._kv_bytes = _ELEMENT_BYTES * shape.kv_elements(1)

    @property
    def read_s(self) -> float:
        """Seconds in which all weights are read once, at the rate of the memory."""
        return _ELEMENT_BYTES * (self.shape.linear_params + self.shape.head_params) / self.gpu.read

    def price(self, work: Work) -> Price:
        """What a step takes while others are in flight."""
        rates, tokens = self.rates, work.prompt_tokens
        host_s = rates.host_s * work.decodes / 1024
        if not tokens:
            # padded to the size of a graph
            rows = self.sizes[bisect_left(self.sizes, work.decodes)]
            return Price(self._products_s(rows, rows) + self._attention_s(work), host_s)
        graph = self._prefill_graph(work)
        rows = graph.tokens if graph else work.decodes + tokens
        device_s = self._products_s(rows, work.decodes + work.sampled) + self._attention_s(work)
        device_s += sum(self._prefill_s(*chunk) for chunk in work.prompts)
        host_s += rates.mixed_s
        if graph is None:
            device_s += self.shape.layers * rates.prompt_layer_s
            host_s += self.shape.layers * rates.kernels * rates.launch_s
        return Price(device_s, host_s)

    def _prefill_graph(self, work: Work) -> PrefillShape | None:
        """The graph that a step runs in which starts prompts and does nothing else."""
        if work.decodes or any(before for _, before in work.prompts):
            return None
        lengths = [length for length, _ in work.prompts]
        return smallest(self.prefills, tokens=sum(lengths), longest=max(lengths), prompts=len(lengths))

    def _products_s(self, tokens: int, sampled: int) -> float:
        # all but attention
        rates, shape = self.rates, self.shape
        moved = shape.layers * _ELEMENT_BYTES * (8 * shape.hidden + 3 * shape.intermediate)
        seconds = rates.step_s + shape.layers * rates.layer(tokens) + rates.elements * tokens * moved / self.gpu.read
        seconds += self._product_s(tokens, shape.linear_params)
        if sampled:
            # written and read again
            logits = 2 * _LOGIT_BYTES * sampled * shape.vocab
            seconds += self._product_s(sampled, shape.head_params) + logits / self.gpu.read
        return seconds

    def _product_s(self, rows: int, params: int) -> float:
        rates = self.rates
        peak = self.gpu.matrix * rates.matrix * self.shape.hidden / (self.shape.hidden + rates.inner)
        arithmetic = 2 * rows * params / peak
        reading = params * _ELEMENT_BYTES / (self.gpu.read * rates.weights)
        return float((arithmetic**rates.blend + reading**rates.blend) ** (1 / rates.blend))

    def _attention_s(self, work: Work) -> float:
        rates, fresh = self.rates, work.context - work.repeated
        if not work.context:
            return 0.0
        streams = work.decodes * self.shape.kv_heads
        seconds = self._kv_bytes * fresh * (1 + rates.streams / streams) / (rates.context * self.gpu.read)
        if work.context < _PASS_SEQS * fresh:
            return seconds + self._kv_bytes * work.repeated / rates.repeated
        return seconds + self._kv_bytes * work.repeated / rates.passed + self.shape.layers * rates.pass_s

    def _prefill_s(self, length: int, before: int) -> float:
        operations = self.shape.attention_operations(length * before + length * (length + 1) / 2)
        # a prefix is gathered first: read and written
        gathered = 2 * self._kv_bytes * before / self.gpu.read
        return operations / _between(_PREFILL_RATES, length + before) + gathered


def _between(points: Sequence[tuple[int, float]], place: float) -> float:
    for (left, low), (right, high) in pairwise(points):
        if place <= right:
            return low + max(0.0, (place - left) / (right - left)) * (high - low)
    return points[-1][1]
