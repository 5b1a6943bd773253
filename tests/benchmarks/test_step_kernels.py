"""What the kernels of a step add to it, from when they ran."""

from benchmarks.step_kernels import exclusive_us


def test_what_overlaps_counts_once() -> None:
    """
    A kernel that starts under the one ahead adds what it takes longer; a gap belongs to the kernel behind it.
    """
    spans = [("norm", 0.0, 2.0), ("product", 1.0, 5.0), ("norm", 4.0, 6.0), ("product", 9.0, 10.0)]

    assert {"norm": (2, 3.0), "product": (2, 7.0)} == exclusive_us(spans)


def test_the_order_of_the_spans_does_not_matter_and_what_ends_inside_adds_nothing() -> None:
    """
    Profilers report in any order.
    """
    assert {"long": (1, 8.0), "inside": (1, 3.0)} == exclusive_us([("long", 0.0, 8.0 + 3.0), ("inside", 0.0, 3.0)])
