"""The search for configurations within a step, with prices in place of a GPU."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from benchmarks import step_sweep
from benchmarks.shapes import SHAPES
from benchmarks.step_sweep import Choice, Config, Overlay, neighbours, rules_of, shapes_of, sweep
from engine.model.config import ModelConfig
from kernels.cuda import decode_attention, gemv, skinny_gemm

MODEL = ModelConfig.parse(SHAPES["qwen2.5-0.5b"])
PRODUCT: Config = {"use": 1, "block_n": 64, "block_k": 64, "warps": 4, "stages": 6, "splits": 1, "ahead": 4}


def faults_here(_attempt: object, cases: Sequence[tuple[Any, Config]], patience_s: float) -> list[str | None]:
    """What compilers would say: no more than eight parts."""
    assert patience_s >= step_sweep.PATIENCE_S
    return ["does not compile" if config["splits"] > 8 else None for _, config in cases]


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Compilers without a GPU have nothing to do.
    """
    monkeypatch.setattr(step_sweep, "faults_of", faults_here)


def shapes_asked() -> Iterator[tuple[int, int, bool]]:
    return ((shape.in_features, shape.out_features, shape.gated) for shape in shapes_of(MODEL))


def test_a_neighbour_differs_in_one_number() -> None:
    """
    By one step down or up; and there is the library.
    """
    found = list(neighbours(PRODUCT))

    assert {"use": 0} == {name: value for name, value in found[-1].items() if value != PRODUCT[name]}
    assert all(1 == sum(config[name] != PRODUCT[name] for name in PRODUCT) for config in found)
    assert [32, 128] == [config["block_n"] for config in found if config["block_n"] != 64]
    assert [2] == [config["splits"] for config in found if config["splits"] != 1]


def test_the_library_is_left_from_configurations_of_ours() -> None:
    """
    What a table says beside "use": 0 is no place to begin.
    """
    found = list(neighbours(PRODUCT | {"use": 0}))

    assert len(step_sweep.STARTS) == len(found)
    assert all(config["use"] for config in found)


@pytest.mark.parametrize(("batch", "module"), [(1, gemv), (32, skinny_gemm)])
def test_what_is_entered_is_what_a_step_would_ask_for(batch: int, module: Any) -> None:
    """
    The products of a layer and attention are overlaid, others stay, and afterwards all is as before.
    """
    before = [dict(module.config_for(batch, *shape[:2], torch.bfloat16, shape[2])) for shape in shapes_asked()]
    overlay = Overlay(batch, MODEL)
    for choice in overlay.choices:
        choice.config = {"mark": 1}

    with overlay.entered():
        assert all(
            {"mark": 1} == module.config_for(batch, *shape[:2], torch.bfloat16, shape[2]) for shape in shapes_asked()
        )
        assert "mark" not in module.config_for(batch, 896, 151936, torch.bfloat16, False)
        assert {"mark": 1} == decode_attention.decode_config(64, 7, torch.bfloat16, 1)  # type: ignore[attr-defined]

    after = [dict(module.config_for(batch, *shape[:2], torch.bfloat16, shape[2])) for shape in shapes_asked()]
    assert before == after


def test_large_batches_have_attention_alone() -> None:
    """
    Their products are the library's.
    """
    assert ["attention"] == [choice.name for choice in Overlay(256, MODEL).choices]


def price(choices: Sequence[Choice]) -> float:
    """A step that is fastest with blocks of 16 rows in 4 parts, and in which the library's product costs more."""
    product = choices[0].config
    if not product["use"]:
        return 200.0
    return 100.0 + abs(product["block_n"] - 16) / 16 + abs(product["splits"] - 4)


def test_the_search_climbs_to_what_is_best_and_tries_nothing_twice() -> None:
    """
    Step by step, whatever the configuration it starts from.
    """
    overlay = Overlay(32, MODEL)
    overlay.choices = overlay.choices[:1]
    overlay.choices[0].config = dict(PRODUCT)
    lines: list[dict[str, Any]] = []

    last = sweep(overlay, lambda: price(overlay.choices), lines.append, 60.0)

    assert 100.0 == last
    assert (16, 4) == (overlay.choices[0].config["block_n"], overlay.choices[0].config["splits"])
    tried = [str({name: line[name] for name in PRODUCT}) for line in lines]
    assert len(set(tried)) == len(tried)


def test_what_does_not_compile_or_run_is_passed_over() -> None:
    """
    It costs its own try alone.
    """
    overlay = Overlay(32, MODEL)
    choice = overlay.choices[0]
    overlay.choices = [choice]
    choice.config = PRODUCT | {"splits": 8}
    lines: list[dict[str, Any]] = []

    def measure() -> float:
        if choice.config["block_k"] == 128:
            raise RuntimeError("out of shared memory")
        # the more parts, the better: but 16 do not compile
        return 100.0 - choice.config["splits"]

    assert 92.0 == sweep(overlay, measure, lines.append, 60.0)
    assert 8 == choice.config["splits"]
    assert {None} == {line["step_us"] for line in lines if line["splits"] == 16}
    assert {None} == {line["step_us"] for line in lines if line["block_k"] == 128}


def test_two_numbers_that_gain_together_are_found_where_one_costs_little() -> None:
    """
    From what is hardly slower the search goes on; from what is slower it does not.
    """
    overlay = Overlay(32, MODEL)
    choice = overlay.choices[0]
    overlay.choices = [choice]
    choice.config = dict(PRODUCT)

    def measure() -> float:
        changed = {name: value for name, value in choice.config.items() if value != PRODUCT[name]}
        if changed == {"warps": 8, "stages": 8}:
            return 50.0
        prices = {"block_n": 100.5, "splits": 100.5, "block_n splits": 90.0, "": 100.0}
        return prices.get(" ".join(changed), 103.0)

    lines: list[dict[str, Any]] = []

    assert 90.0 == sweep(overlay, measure, lines.append, 60.0)
    assert {"block_n", "splits"} == {name for name, value in choice.config.items() if value != PRODUCT[name]}


def test_rules_are_those_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Of the library, no more than that.
    """
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    overlay = Overlay(32, MODEL)
    overlay.choices[1].config["use"] = 0

    rules = rules_of(overlay.choices)

    assert {"skinny_gemm": 4, "decode_attention": 1} == {table: len(found) for table, found in rules.items()}
    assert {"use": 0} == rules["skinny_gemm"][1]["use"]
    when = {"gpu": "a card", "num_rows": 32, "in_features": 896, "out_features": 896, "gated": 0, "dtype": "bfloat16"}
    assert when == rules["skinny_gemm"][1]["when"]
    when = {"gpu": "a card", "head_dim": 64, "group_size": 7, "dtype": "bfloat16", "few": 1}
    assert when == rules["decode_attention"][0]["when"]
