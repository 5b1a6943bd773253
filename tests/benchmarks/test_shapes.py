"""Model shapes are configs that others can read."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks import shapes


@pytest.mark.parametrize("shape", sorted(shapes.SHAPES))
def test_a_shape_is_a_config_that_transformers_reads(shape: str, tmp_path: Path) -> None:
    """
    Each folder loads as the architecture that it names, with its own sizes.
    """
    config = AutoConfig.from_pretrained(shapes.write(shape, tmp_path))

    assert shapes.SHAPES[shape]["architectures"] == config.architectures
    assert shapes.SHAPES[shape]["hidden_size"] == config.hidden_size
    assert shapes.SHAPES[shape]["num_key_value_heads"] == config.num_key_value_heads
