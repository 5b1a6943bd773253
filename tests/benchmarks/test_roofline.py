"""The physical limit is what the published figures were divided by."""

import pytest

from benchmarks import roofline, shapes, workloads

_LLAMA = roofline.Shape.of(shapes.SHAPES["llama-3.1-8b"])
_QWEN = roofline.Shape.of(shapes.SHAPES["qwen2.5-0.5b"])


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("sharegpt", 16540),
        ("fixed512", 13464),
        ("prefix", 21560),
        ("batch32", 7918),
        ("single", 286),
        ("groups", 13130),
        ("longtail", 10571),
    ],
)
def test_the_limit_of_llama_8b_on_an_h200(name: str, rate: int) -> None:
    """
    Output tokens/s of the limit, in bf16, for each workload.
    """
    requests = workloads.build(name, vocab=128256)

    assert rate == round(roofline.limit_of(name, requests, _LLAMA, roofline.BF16)["output_tok_s"])


def test_a_single_decode_costs_reading_the_weights() -> None:
    """
    At batch 1 a step takes as long as 15 GB of weights take to be read.
    """
    weights = 2 * (_LLAMA.linear_params + _LLAMA.head_params)

    assert weights / roofline.H200.read == pytest.approx(roofline.linear_s(_LLAMA, 1, 1, roofline.BF16), rel=2e-3)


def test_fp8_is_never_slower() -> None:
    """
    A smaller cache lowers the bound, and smaller weights and a faster product once more.
    """
    requests = workloads.build("batch32")

    slow = roofline.limit(requests, _QWEN, roofline.BF16)
    cache = roofline.limit(requests, _QWEN, roofline.FP8_KV)
    fast = roofline.limit(requests, _QWEN, roofline.FP8)

    assert fast["wall_s"] < cache["wall_s"] < slow["wall_s"]


def test_a_smaller_batch_is_never_faster() -> None:
    """
    Sharing the weights between more requests lowers the time for all of them.
    """
    requests = workloads.build("batch32")

    walls = [roofline.limit(requests, _QWEN, max_batch=batch)["wall_s"] for batch in (32, 8, 1)]

    assert sorted(walls) == walls


def test_a_shared_prefix_shrinks_with_the_lengths() -> None:
    """
    A scaled workload shares less, and still takes time for all that is its requests' own.
    """
    requests = workloads.build("prefix", scale=0.1)

    limit = roofline.limit_of("prefix", requests, _LLAMA, roofline.BF16, scale=0.1)

    assert limit["wall_s"] < roofline.limit(requests, _LLAMA)["wall_s"]
    assert limit["wall_s"] > roofline.limit([r._replace(prompt=r.prompt[204:]) for r in requests], _LLAMA)["wall_s"]
