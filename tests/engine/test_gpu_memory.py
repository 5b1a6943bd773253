"""How a GPU's memory is shared out, and what is said where it does not suffice."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import gpu_memory
from engine.config import GIB
from engine.errors import NotEnoughMemory
from engine.gpu_memory import (
    SPARE_BYTES,
    MemorySnapshot,
    MemoryUse,
    SequenceNeed,
    check_weights_fit,
    explained,
    graph_memory,
    kv_budget,
    memory_use,
    swap_space,
    weight_bytes,
)
from engine.kv_cache import CacheShape, bytes_per_block
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from tests.support.tiny_models import TINY_CONFIGS

# a GPU of 140 GiB where an own context is all that is used, and an 8B model in bfloat16
START = MemorySnapshot(total=140 * GIB, free=140 * GIB - GIB // 2)
USE = MemoryUse(weights=15 * GIB, activations=3 * GIB, graphs=GIB, non_torch=GIB // 2)
NEED = SequenceNeed(max_model_len=131_072, block_size=16, block_bytes=16 * 131_072)


def budget(start: MemorySnapshot = START, use: MemoryUse = USE, need: SequenceNeed = NEED, **options: Any) -> int:
    return kv_budget(start, use, need, **{"utilization": 0.9, **options})


def refusal(**options: Any) -> str:
    with pytest.raises(NotEnoughMemory) as raised:
        budget(**options)
    return str(raised.value)


def held(gib: int) -> MemorySnapshot:
    return replace(START, free=START.total - gib * GIB)


def test_the_cache_takes_what_the_share_leaves() -> None:
    """
    Nine tenths of the GPU, less weights, activations, graphs and libraries.
    """
    assert 126 * GIB - USE.total == budget()
    assert 140 * GIB - GIB // 2 - SPARE_BYTES - USE.total == budget(utilization=1.0)


def test_what_others_hold_is_left_to_them() -> None:
    """
    Memory that is used at the start is no part of the share: with 40 GiB held, 100 are left.
    """
    assert 126 * GIB - USE.total == budget(held(12))
    assert 100 * GIB - SPARE_BYTES - USE.total == budget(held(40))


def test_a_size_that_was_asked_for_is_taken_if_it_fits() -> None:
    """
    kv_cache_bytes counts instead of what is left, and never beyond it.
    """
    assert 20 * GIB == budget(wanted=20 * GIB)

    said = refusal(wanted=110 * GIB)

    assert "kv_cache_bytes of 110.00 GiB do not fit" in said
    assert said.endswith("\nlower kv_cache_bytes to 106.50 GiB, or raise gpu_memory_utilization to 0.93")


def test_one_sequence_that_does_not_fit_has_a_table_and_its_remedies() -> None:
    """
    Where the memory goes stands line by line, and each setting that would help with its value.
    """
    said = refusal(utilization=0.2, use=replace(USE, activations=12 * GIB))

    assert said.startswith("the GPU has no room for one sequence of max_model_len 131,072:\n")
    figures = dict(re.findall(r"^  (.+?) +(-?[\d,.]+) GiB$", said, flags=re.MULTILINE))
    assert {
        "the whole GPU": "140.00",
        "held at the start: other processes, and CUDA itself": "0.50",
        "may be used, at gpu_memory_utilization 0.2": "28.00",
        "weights": "15.00",
        "activations of the largest step": "12.00",
        "CUDA graphs": "1.00",
        "kernels and libraries": "0.50",
        "left for the KV cache": "-0.50",
        "one sequence of max_model_len": "16.00",
    } == figures
    assert said.endswith("\nraise gpu_memory_utilization to 0.32")


def test_the_need_can_be_lowered_instead() -> None:
    """
    The longest length that fits is named, and what takes more than is missing.
    """
    said = refusal(utilization=0.25)

    assert said.endswith(
        "\nraise gpu_memory_utilization to 0.26, or lower max_model_len to 126,960, "
        "or lower max_num_batched_tokens, or set cuda_graphs to false"
    )


def test_an_earlier_engine_of_the_process_counts_as_its_own() -> None:
    """
    What it still holds is of the same share, and gone for the cache.
    """
    earlier = replace(START, free=START.free - 30 * GIB, reserved=30 * GIB)

    assert budget() - 30 * GIB == budget(earlier)


@pytest.mark.parametrize("gib", [106, 130])
def test_memory_of_other_processes_is_named(gib: int) -> None:
    """
    Where others are the reason, no setting is blamed for it.
    """
    said = refusal(start=held(gib))

    assert re.search(rf"other processes, and CUDA itself +{gib}\.00 GiB", said)
    assert "end the other processes on this GPU" in said
    assert "gpu_memory_utilization to" not in said


def test_nothing_to_change_is_said_too() -> None:
    """
    A model that fills the GPU alone needs another one.
    """
    said = refusal(use=replace(USE, weights=139 * GIB, activations=0, graphs=0))

    assert said.endswith("\ntake a smaller model or a larger GPU")


@given(
    total=st.integers(8, 192),
    share=st.integers(5, 100),
    outside=st.integers(0, 120),
    reserved=st.integers(0, 20),
    weights=st.integers(1, 120),
    length=st.sampled_from([2048, 32_768, 131_072]),
)
def test_the_remedies_help(total: int, share: int, outside: int, reserved: int, weights: int, length: int) -> None:
    """
    A length or a utilization that a message names is one that then fits.
    """
    reserved = min(reserved, max(0, total - outside))
    start = MemorySnapshot(total=total * GIB, free=max(0, total - outside - reserved) * GIB, reserved=reserved * GIB)
    use, need = replace(USE, weights=weights * GIB), replace(NEED, max_model_len=length)
    try:
        budget(start, use, need, utilization=share / 100)
    except NotEnoughMemory as error:
        said = str(error)
    else:
        return
    if found := re.search(r"lower max_model_len to ([\d,]+)", said):
        shorter = replace(need, max_model_len=int(found.group(1).replace(",", "")))
        budget(start, use, shorter, utilization=share / 100)
    if found := re.search(r"raise gpu_memory_utilization to ([\d.]+)", said):
        alone = replace(start, free=start.total - start.reserved - GIB) if "end the other" in said else start
        budget(alone, use, need, utilization=float(found.group(1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_the_check_is_that_of_the_cache(dtype: torch.dtype) -> None:
    """
    What passes here is enough for `CacheShape.fit`, and a byte less is not.
    """
    config = parse("llama")
    need = SequenceNeed(
        max_model_len=500, block_size=16, block_bytes=bytes_per_block(config, block_size=16, dtype=dtype)
    )
    options: Any = {"block_size": 16, "dtype": dtype, "host_bytes": 0, "max_model_len": 500}

    shape = CacheShape.fit(config, cache_bytes=need.num_bytes, **options)

    assert shape.num_tokens == need.tokens_in(need.num_bytes) == 512
    with pytest.raises(NotEnoughMemory):
        CacheShape.fit(config, cache_bytes=need.num_bytes - 1, **options)


def test_weights_that_fit_pass() -> None:
    """
    Up to the share, to the byte.
    """
    check_weights_fit(126 * GIB, START, 0.9)

    with pytest.raises(NotEnoughMemory):
        check_weights_fit(126 * GIB + 1, START, 0.9)


@pytest.mark.parametrize(
    ("weights", "start", "end"),
    [
        (130, START, "raise gpu_memory_utilization to 0.93"),
        (100, held(60), "CUDA_VISIBLE_DEVICES"),
        (130, held(60), "CUDA_VISIBLE_DEVICES, and raise gpu_memory_utilization to 0.93"),
        (150, START, "take a smaller dtype, a smaller model or a larger GPU"),
        (150, held(60), "take a smaller dtype, a smaller model or a larger GPU"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    weights: int, start: MemorySnapshot, end: str
) -> None:
    """
    With their size, what may be used, and what would help: a setting, others' memory, or nothing.
    """
    with pytest.raises(NotEnoughMemory) as raised:
        check_weights_fit(weights * GIB, start, 0.9)

    said = str(raised.value)
    assert said.startswith(f"the weights of {weights}.00 GiB do not fit the GPU:\n")
    assert said.endswith(end)


def parse(name: str) -> ModelConfig:
    raw = TINY_CONFIGS[name].to_dict()
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[name.split()[0]]
    return ModelConfig.parse({**raw, "architectures": [f"{architecture}ForCausalLM"]})


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_weights_are_counted_from_the_shapes(name: str) -> None:
    """
    The estimate is what the decoder holds, with and without biases, norms and tied embeddings.
    """
    config = parse(name)
    tensors = dict(Decoder(config, max_model_len=64, dtype=torch.bfloat16).tensors())

    assert sum(tensor.nbytes for tensor in tensors.values()) == weight_bytes(config, torch.bfloat16)


def test_readings_become_uses() -> None:
    """
    The allocator's growth is weights and activations; what grew beside it is libraries, or others.
    """
    start = MemorySnapshot(total=1000, free=900, reserved=10)
    loaded = MemorySnapshot(total=1000, free=600, reserved=310, peak=310)
    profiled = MemorySnapshot(total=1000, free=450, reserved=430, peak=450)

    use = memory_use(start, loaded, profiled, graphs=7)

    assert MemoryUse(weights=300, activations=140, graphs=7, non_torch=30) == use
    # another process that ended meanwhile is no gain: it may come back
    ended = replace(profiled, free=570)
    assert 0 == memory_use(start, loaded, ended, graphs=7).non_torch


@pytest.mark.parametrize(
    ("measured", "num_graphs", "expected"),
    [([100, 4, 6], 11, 110 + 8 * 5), ([100, 3, 4], 4, 107 + 4), ([100], 3, 300), ([100, 4], 1, 100), ([], 5, 0)],
)
def test_graphs_are_the_largest_and_a_little_for_each(measured: list[int], num_graphs: int, expected: int) -> None:
    """
    They share a pool, so that only the first makes it.
    """
    assert expected == graph_memory(measured, num_graphs)


def test_swap_space_is_what_pinned_memory_takes() -> None:
    """
    The usual size is a power of two, a tenth of the host's and 4 GiB at most; what is set is checked rounded up.
    """
    assert 4 * GIB == swap_space(None, 500 * GIB, "auto")
    assert GIB == swap_space(None, 16 * GIB, "auto")
    assert 0 == swap_space(None, 0, "auto") == swap_space(0, GIB, "swap")
    assert 0 == swap_space(9 * GIB, 500 * GIB, "recompute")
    assert 5 * GIB == swap_space(5 * GIB, 8 * GIB, "swap")

    with pytest.raises(NotEnoughMemory, match=r"is 5\.00 GiB, which takes 8\.00 GiB .* has 7\.00 GiB available"):
        swap_space(5 * GIB, 7 * GIB, "auto")


def test_running_out_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What was being done, who holds what, and the setting to change; other errors pass.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 100 * GIB)
    device = torch.device("cuda", 0)

    with (
        pytest.raises(NotEnoughMemory) as raised,
        explained("capturing the CUDA graphs", "set cuda_graphs to false", device),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    said = str(raised.value)
    assert said.startswith("the GPU ran out of memory while capturing the CUDA graphs:\n")
    assert re.search(r"other processes, and by CUDA itself +38\.00 GiB", said)
    assert said.endswith("\nset cuda_graphs to false")
    with pytest.raises(RuntimeError, match="illegal"), explained("x", "y", device):
        raise RuntimeError("an illegal memory access")


def test_a_reading_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A snapshot has the four figures, taken when all work is done.
    """
    calls: list[str] = []
    for name, value in (
        ("synchronize", None),
        ("mem_get_info", (70, 100)),
        ("memory_reserved", 20),
        ("max_memory_reserved", 25),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name, value=value: calls.append(name) or value)

    reading = gpu_memory.snapshot(torch.device("cuda", 0))

    assert MemorySnapshot(total=100, free=70, reserved=20, peak=25) == reading
    assert 10 == reading.outside
    assert "synchronize" == calls[0]
