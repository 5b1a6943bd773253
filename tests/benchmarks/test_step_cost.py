"""What a step is said to cost on a GPU goes with what it has to do."""

import pytest

from benchmarks import roofline, shapes
from benchmarks.step_cost import StepCost, Work

_LLAMA = roofline.Shape.of(shapes.SHAPES["llama-3.1-8b"])
_COST = StepCost(_LLAMA, max_num_seqs=1024)


def device_ms(work: Work) -> float:
    return 1e3 * _COST.price(work).device_s


@pytest.mark.parametrize(("decodes", "context", "measured"), [(1, 256, 4.11), (32, 256, 5.39), (1024, 180, 32.0)])
def test_decode_steps_cost_what_was_measured(decodes: int, context: int, measured: float) -> None:
    """
    Alone, in a small batch and in the largest: milliseconds of the 8B model, to a twentieth.
    """
    assert device_ms(Work(decodes, context=decodes * context)) == pytest.approx(measured, rel=0.05)


def test_a_batch_costs_as_much_as_the_graph_that_it_runs_in() -> None:
    """
    A decode batch is padded; one with a prompt is not.
    """
    assert device_ms(Work(65)) == device_ms(Work(72)) < device_ms(Work(73))
    assert device_ms(Work(65, prompts=((8, 0),))) < device_ms(Work(72, prompts=((8, 0),)))


def test_no_step_is_faster_than_the_hardware() -> None:
    """
    The same work costs more than its physical limit, of prompts and of decodes.
    """
    for tokens in (1, 100, 1000, 8192):
        least = roofline.linear_s(_LLAMA, tokens, 1, roofline.BF16)
        least += roofline.prefill_attention_s(_LLAMA, tokens, 0)
        assert least < _COST.price(Work(0, prompts=((tokens, 0),), sampled=1)).device_s


def test_context_that_others_read_too_costs_less() -> None:
    """
    A prefix of many sequences comes from memory once a layer, and then from the cache of the chip.
    """
    assert device_ms(Work(200, context=400_000, repeated=380_000)) < device_ms(Work(200, context=400_000))


def test_a_small_step_with_a_prompt_waits_for_the_processor() -> None:
    """
    A small model's kernels are launched more slowly, one by one, than they run.
    """
    small = StepCost(roofline.Shape.of(shapes.SHAPES["qwen2.5-0.5b"]), max_num_seqs=1024)
    mixed = small.price(Work(10, context=1000, prompts=((10, 0),), sampled=1))

    assert mixed.seconds == mixed.host_s > mixed.device_s
    alone = small.price(Work(10, context=1000))
    assert alone.seconds == alone.device_s
