"""
What a step takes on an H200: the roofline's work, at the rates that were measured.

Attention goes by `results/h200-decode-attention.jsonl` and `h200-prefill-attention.jsonl`; products, small
kernels and what is left were fitted to the twelve runs of `results/h200-fcfs.jsonl`. Steps with a
prompt are launched kernel by kernel, no faster than the processor does that: what this costs was
assumed, for lack of small ones among those runs. Seconds, bytes and floating-point operations throughout.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.roofline import H200, Hardware, Shape
from engine.cuda.graphs import graph_sizes

_ELEMENT_BYTES = 2.0
_LOGIT_BYTES = 2.0
# rows whose products have a kernel of their own
_OWN_ROWS = 4
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
        library_s: What the four products of a layer take longer beyond the rows that have a kernel of their own.
        context: Share of the read rate at which decode attention reads.
        repeated: Bytes/s of context that another sequence of the step reads too: it is on the chip by then.
        layer_s: All else of a layer: small kernels, and the gaps between them.
        prompt_layer_s: What a layer takes longer in a step with a prompt, which is launched kernel by kernel (assumed).
        elements: How often a layer's elementwise kernels move the activations.
        step_s: What is left of a step.
        launch_s: What the processor takes to launch one kernel.
        kernels: Of a layer, in a step with a prompt.
        mixed_s: What else the processor does for a step with a prompt.
        host_s: What it does for a step of 1,024 decodes.
    """

    matrix: float = 1.0
    inner: float = 700.0
    weights: float = 1.0
    blend: float = 1.5
    library_s: float = 14e-6
    context: float = 1.02
    repeated: float = 9e12
    layer_s: float = 20e-6
    prompt_layer_s: float = 20e-6
    elements: float = 1.3
    step_s: float = 60e-6
    launch_s: float = 8e-6
    kernels: int = 12
    mixed_s: float = 1e-3
    host_s: float = 0.93e-3


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
    """

    def __init__(self, shape: Shape, *, max_num_seqs: int, rates: Rates | None = None, gpu: Hardware = H200) -> None:
        self.shape = shape
        self.rates = rates or Rates()
        self.gpu = gpu
        self.sizes = graph_sizes(max_num_seqs)
        self._kv_bytes = _ELEMENT_BYTES * shape.kv_elements(1)

    def price(self, work: Work) -> Price:
        """What a step takes while others are in flight."""
        rates, tokens = self.rates, work.prompt_tokens
        host_s = rates.host_s * work.decodes / 1024
        if not tokens:
            # padded to the size of a graph
            rows = self.sizes[bisect_left(self.sizes, work.decodes)]
            return Price(self._products_s(rows, rows) + self._attention_s(work), host_s)
        device_s = self._products_s(work.decodes + tokens, work.decodes + work.sampled) + self._attention_s(work)
        device_s += sum(self._prefill_s(*chunk) for chunk in work.prompts) + self.shape.layers * rates.prompt_layer_s
        return Price(device_s, host_s + rates.mixed_s + self.shape.layers * rates.kernels * rates.launch_s)

    def _products_s(self, tokens: int, sampled: int) -> float:
        # all but attention
        rates, shape = self.rates, self.shape
        moved = shape.layers * _ELEMENT_BYTES * (8 * shape.hidden + 3 * shape.intermediate)
        seconds = rates.step_s + shape.layers * rates.layer_s + rates.elements * tokens * moved / self.gpu.read
        if tokens > _OWN_ROWS:
            seconds += shape.layers * rates.library_s
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
        rates = self.rates
        fresh = (work.context - work.repeated) / (rates.context * self.gpu.read)
        return self._kv_bytes * (fresh + work.repeated / rates.repeated)

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
