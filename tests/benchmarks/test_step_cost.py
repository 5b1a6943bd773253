"""What a step is said to cost on a GPU goes with what it has to do."""

import pytest

from benchmarks import roofline, shapes
from benchmarks.step_cost import StepCost, Work

_LLAMA, _QWEN = (roofline.Shape.of(shapes.SHAPES[name]) for name in ("llama-3.1-8b", "qwen2.5-0.5b"))
_COSTS = {"8b": StepCost(_LLAMA, max_num_seqs=1024), "0.5b": StepCost(_QWEN, max_num_seqs=1024)}
# 8,192 tokens with those of 108 decodes
_MIXED = Work(108, context=108 * 4200, prompts=((1880, 2216), (4096, 0), (2108, 0)), sampled=2)


def device_ms(work: Work, model: str = "8b") -> float:
    return 1e3 * _COSTS[model].price(work).device_s


@pytest.mark.parametrize(
    ("model", "decodes", "context", "measured"),
    [
        ("0.5b", 1, 205, 0.57),
        ("0.5b", 8, 230, 0.82),
        ("0.5b", 32, 215, 0.785),
        ("0.5b", 64, 215, 0.957),
        ("0.5b", 256, 230, 1.646),
        ("0.5b", 1024, 230, 3.31),
        ("0.5b", 200, 4200, 3.79),
        ("8b", 1, 256, 3.86),
        ("8b", 32, 215, 4.70),
        ("8b", 200, 4200, 32.98),
        ("8b", 1024, 180, 32.0),
    ],
)
def test_decode_steps_cost_what_was_measured(model: str, decodes: int, context: int, measured: float) -> None:
    """
    Alone, in small batches and in large ones: milliseconds, to a twentieth.
    """
    assert device_ms(Work(decodes, context=decodes * context), model) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("model", "measured"), [("0.5b", 17.0), ("8b", 212)])
def test_a_large_step_with_prompts_costs_what_was_measured(model: str, measured: float) -> None:
    """
    The same for one of 8,192 tokens.
    """
    assert device_ms(_MIXED, model) == pytest.approx(measured, rel=0.05)


def test_a_prefix_of_all_costs_what_was_measured() -> None:
    """
    200 sequences of 190 tokens behind 2,048 that are read once for all of them.
    """
    work = Work(200, context=200 * 2238, repeated=199 * 2048)
    assert device_ms(work, "0.5b") == pytest.approx(1.93, rel=0.05)


def test_a_small_step_is_cheaper_by_more_than_its_sequences() -> None:
    """
    Up to 64 sequences the kernels are ours, and start early: a step of 72 costs a small model a quarter more, and a
    large one not much.
    """
    assert device_ms(Work(72), "0.5b") > 1.2 * device_ms(Work(64), "0.5b")
    assert device_ms(Work(72), "8b") < 1.15 * device_ms(Work(64), "8b")


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
        assert least < _COSTS["8b"].price(Work(0, prompts=((tokens, 0),), sampled=1)).device_s


def test_context_that_others_read_too_costs_less() -> None:
    """
    A prefix of many sequences comes from memory once a layer, and then from the cache of the chip.
    """
    assert device_ms(Work(200, context=400_000, repeated=380_000)) < device_ms(Work(200, context=400_000))


def test_the_first_token_of_a_short_prompt_costs_what_was_measured() -> None:
    """
    Alone, its step is a graph that the processor waits for, and so neither hides behind the other: a small model takes
    2.3 ms for 128 tokens.
    """
    small = _COSTS["0.5b"]
    price = small.price(Work(0, prompts=((128, 0),), sampled=1))

    assert 1e3 * (small.rates.request_s + price.host_s + price.device_s) == pytest.approx(2.3, rel=0.1)


def test_few_fresh_prompts_alone_are_not_launched_kernel_by_kernel() -> None:
    """
    They run in the next larger graph; beside decodes, behind a prefix, or where there are more, they do not.
    """
    small = _COSTS["0.5b"]
    fresh = small.price(Work(0, prompts=((600, 0),)))

    assert fresh.device_s < small.price(Work(0, prompts=((1024, 0),))).device_s
    for work in (
        Work(1, context=600, prompts=((600, 0),)),
        Work(0, prompts=((600, 16),)),
        Work(0, prompts=((8, 0),) * 75),
        Work(0, prompts=((5000, 0),)),
    ):
        assert small.price(work).host_s > 5 * fresh.host_s


def test_no_graph_of_prompts_is_larger_than_a_step_may_be() -> None:
    """
    Its padding is that of the engine's own graph.
    """
    few, many = (StepCost(_QWEN, max_num_seqs=1024, token_budget=budget) for budget in (2100, 8192))
    work = Work(0, prompts=((2100, 0),))

    assert few.price(work).host_s == many.price(work).host_s
    assert few.price(work).device_s < many.price(work).device_s


def test_a_small_step_with_a_prompt_waits_for_the_processor() -> None:
    """
    A small model's kernels are launched more slowly, one by one, than they run.
    """
    small = _COSTS["0.5b"]
    mixed = small.price(Work(10, context=1000, prompts=((10, 0),), sampled=1))

    assert mixed.seconds == mixed.host_s > mixed.device_s
    alone = small.price(Work(10, context=1000))
    assert alone.seconds == alone.device_s
