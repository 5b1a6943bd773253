"""What is started without Triton's own look-up is what Triton would have started, down to the driver's call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.knobs import runtime

from kernels.cuda import (
    activation,
    argmax,
    cascade_attention,
    decode_attention,
    decode_parts,
    gather_kv,
    gemv,
    launching,
    prefill_attention,
    rms_norm,
    rope,
    skinny_gemm,
    step_state,
)
from kernels.cuda.launching import LAUNCHER_FORMAT, start_kernel
from kernels.newest_token import NewestTokens
from kernels.prefill_attention import VarlenPart
from kernels.step_state import JOIN_COLUMNS, DecodeInputs, HostRing, SlotRows
from tests.support.elementwise import RopeCase
from tests.support.fake_cuda import FakeCuda
from tests.support.paged import paged_batch
from tests.support.shared import cascaded, share

MODULES = (
    activation, argmax, cascade_attention, decode_attention, decode_parts, gather_kv, gemv, prefill_attention,
    rms_norm, rope, skinny_gemm, step_state,
)  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(autouse=True)
def cuda(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    driver.stand_in(monkeypatch)
    driver.device, driver.stream, driver.num_bound = 0, 11, 0
    driver.take()
    return driver


@triton.jit
def _many_kernel(first, FIXED: tl.constexpr, second, count, factor, LAST: tl.constexpr = 3, more=5):
    """Constants in the middle, and two parameters that have defaults."""
    place = tl.program_id(0) * FIXED + tl.arange(0, FIXED)
    value = tl.load(first + place, mask=place < count, other=0)
    if second is not None:
        value += tl.load(second + place, mask=place < count, other=0).to(value.dtype)
    tl.store(first + place, (value * factor + LAST + more).to(value.dtype), mask=place < count)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def norms() -> None:
    x, weight = random(3, 896), random(896)
    rms_norm.rms_norm_triton(x, weight, 1e-6)
    rms_norm.add_rms_norm_triton(x, random(3, 896), torch.nn.Parameter(weight, requires_grad=False), 1e-6)


def rotation(has_norms: bool) -> None:
    case = RopeCase(dtype=torch.bfloat16, num_tokens=5, has_norms=has_norms)
    arguments = case.random(5, case.width), case.rotation(), case.slot_mapping(), case.kv_cache()
    rope.rope_and_store_triton(*arguments, case.num_heads, case.norms(), case.kv_scales())


def decode(longest_part: int | None, dtype: torch.dtype) -> None:
    batch = paged_batch([40, 7], num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    plan = batch.plan(4, None, longest_part)
    decode_attention.decode_attention_triton(random(2, 4, 64), batch.kv_cache, plan, 0.125, kv_scales=batch.kv_scales)
    if plan.parts is not None:
        decode_parts.cut_sequences_triton(plan.parts, batch.seq_lens, None, 2)


def decode_of_newest() -> None:
    batch = paged_batch([40, 7], num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    cosines, sines = torch.zeros(2, 2, 1, 64).unbind()
    newest = NewestTokens((cosines, sines), torch.zeros(2, dtype=torch.int64))
    query = random(2, 8, 64)[:, :4]
    decode_attention.decode_attention_triton(query, batch.kv_cache, batch.plan(4), 0.125, newest=newest)


def cascade() -> None:
    batch = paged_batch([40, 37], num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    layout = cascade_attention.CascadeLayout(2, 2, 32, 16, 32, 264)
    plan = cascaded(batch.plan(4), layout, share(batch, [([0, 1], 32)]), 64, 4)
    config = {"rows": 32, "tile": 32, "warps": 4, "stages": 2}
    assert plan.cascade is not None
    cascade_attention.launch(
        random(2, 4, 64), batch.kv_cache, plan.block_tables, plan.cascade, 0.125, 0.0, None, config
    )
    decode_attention.decode_attention_triton(random(2, 4, 64), batch.kv_cache, plan, 0.125)


def prefill(tma: bool) -> None:
    starts = torch.tensor([0, 40], dtype=torch.int32)
    part = VarlenPart(40, starts, starts, 40, 40, 40, None, None)
    heads = [random(40, number, 64) for number in (4, 2, 2)]
    tiles = prefill_attention.Tiles(64, 64, 4, 2)
    prefill_attention.attend(*heads, part, None, 0.125, 0.0, tiles, tma=tma)


def gathered() -> None:
    batch = paged_batch([40, 7], num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    key_start = torch.tensor([0, 40, 47], dtype=torch.int32)
    gather_kv.gather_kv_triton(batch.kv_cache, batch.block_tables, batch.slots, key_start, 47)


def products() -> None:
    weight, bias = random(256, 512), random(256)
    gemv.gemv_triton(random(1, 512), weight, bias)
    gemv.gated_gemv_triton(random(2, 512), weight)
    config = skinny_gemm.DEFAULT | {"splits": 2}
    skinny_gemm.launch(random(9, 512), weight, bias, config)
    skinny_gemm.launch(random(9, 512), weight, None, skinny_gemm.DEFAULT, gated=True)


def largest() -> None:
    argmax.argmax_triton(random(2, 20_000))
    argmax.argmax_triton(random(300, 5000))


def states() -> None:
    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    rows = SlotRows(
        numbers(9), numbers(9).long(), numbers(9, 5), numbers(9), numbers(9, 2), numbers(9), numbers(9, 6).float()
    )
    inputs = DecodeInputs(numbers(3).long(), numbers(3).long(), numbers(3).long(), numbers(3))
    step_state.scatter_triton(rows.num_computed, numbers(3), numbers(3))
    step_state.join_slots_triton(rows, numbers(2, JOIN_COLUMNS))
    step_state.begin_decode_triton(rows, numbers(3), numbers(3), inputs, 16)
    step_state.end_step_triton(rows, numbers(3), numbers(3).long())
    ring = HostRing(numbers(4, 32), numbers(4, 16).long(), numbers(2))
    step_state.receive_decode_triton(ring, rows, numbers(3), inputs, fresh_start=16, block_size=16)
    step_state.end_decode_triton(ring, rows, numbers(3), numbers(3).long())


WORK: dict[str, Callable[[], object]] = {
    "norms": norms,
    "gate": lambda: activation.silu_mul_triton(random(3, 256)),
    "rotation": lambda: rotation(False),
    "rotation and norms": lambda: rotation(True),
    "decode": lambda: decode(None, torch.bfloat16),
    "decode of parts": lambda: decode(16, torch.bfloat16),
    "decode of newest tokens": decode_of_newest,
    "decode of float8": lambda: decode(None, torch.float8_e4m3fn),
    "cascade": cascade,
    "prefill": lambda: prefill(False),
    "prefill by TMA": lambda: prefill(True),
    "gather": gathered,
    "products": products,
    "argmax": largest,
    "states": states,
}


@pytest.mark.parametrize("name", WORK)
def test_the_driver_is_asked_for_the_same(name: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Of every kernel of a step: grid, threads, shared memory, early start, stream, and each parameter's bits.
    """
    calls: list[tuple[Any, ...]] = []

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        calls.append((kernel, grid, args, constants))

    for module in MODULES:
        monkeypatch.setattr(module, "start_kernel", note)
    for module in (activation, argmax, decode_attention, gemv, rms_norm, rope, skinny_gemm):
        # so that launches have an attribute to be compared
        monkeypatch.setattr(module, "starts_early", lambda _: True)
    scratch = torch.zeros(1 << 16, dtype=torch.int8)
    monkeypatch.setattr(prefill_attention, "_workspace", lambda *_: scratch)
    WORK[name]()

    assert calls
    for kernel, grid, args, constants in calls:
        kernel[grid](*args, **constants)
        start_kernel(kernel, grid, *args, **constants)
        num_bound = cuda.num_bound
        start_kernel(kernel, grid, *args, **constants)
        start_kernel(kernel, grid, *args, **constants)

        assert num_bound == cuda.num_bound, "a known call went through Triton"
        expected, *others = cuda.take()
        assert [expected] * 3 == others
        assert (11, (*grid, 1, 1)[:3]) == (expected.stream, expected.grid)
        assert expected.attributes or not constants.get("launch_pdl")


def add(
    cuda: FakeCuda, first: Tensor, second: Tensor | None = None, count: int = 64, factor: Any = 2, **more: Any
) -> bool:
    """Launch; returns whether Triton bound the arguments."""
    num_bound = cuda.num_bound
    start_kernel(_many_kernel, (2,), first, 32, second, count, factor, **more)
    return num_bound < cuda.num_bound


def test_constants_stand_anywhere(cuda: FakeCuda) -> None:
    """
    Parameters come in their order, whichever of them are named, and defaults count.
    """
    first, second = random(64), random(64)
    wanted: dict[str, Any] = {"second": second, "FIXED": 32, "factor": 2.5, "count": 64}
    _many_kernel[(2,)](first, 32, second, 64, 2.5)
    start_kernel(_many_kernel, (2,), first, 32, second, 64, 2.5)
    start_kernel(_many_kernel, (2,), first, 32, second, 64, 2.5)
    num_bound = cuda.num_bound
    for _ in range(2):
        start_kernel(_many_kernel, (2,), first, 32, second, count=64, factor=2.5, LAST=3)

    assert num_bound + 1 == cuda.num_bound
    expected, *others = cuda.take()
    assert [expected] * 4 == others
    assert 5 in expected.params
    # a named tensor is right too, though every time by Triton
    start_kernel(_many_kernel, (2,), first, **wanted)
    start_kernel(_many_kernel, (2,), first, **wanted)
    assert num_bound + 3 == cuda.num_bound
    assert [expected] * 2 == cuda.take()


@pytest.mark.parametrize(
    "change",
    [
        {"count": 1},
        {"count": 65},
        {"count": 1 << 40},
        {"factor": 2.0},
        {"factor": True},
        {"factor": 1},
        {"factor": 1.0},
        {"second": random(64)},
        {"second": random(64, dtype=torch.float32)},
        {"first": random(64, dtype=torch.float16)},
        {"LAST": 4},
        {"LAST": 3},
        {"LAST": 3.0},
        {"num_warps": 2},
        {"launch_pdl": True},
    ],
    # a tensor by its dtype: its numbers are others in each process
    ids=lambda change: str({name: getattr(value, "dtype", value) for name, value in change.items()}),
)
def test_what_differs_is_another_call(change: dict[str, Any], cuda: FakeCuda) -> None:
    """
    Every value, type, dtype and option: the first time Triton looks, and in turns each gets its own.
    """
    first, seen = random(64), []
    assert add(cuda, first)
    assert add(cuda, **{"first": first, **change})
    for _ in range(2):
        assert not add(cuda, first)
        assert not add(cuda, **{"first": first, **change})
        seen.append(cuda.take()[-2:])

    arguments = {"second": None, "count": 64, "factor": 2, "LAST": 3, "first": first} | change
    _many_kernel[(2,)](FIXED=32, **arguments)
    assert seen[0] == seen[1]
    assert [seen[0][1]] == cuda.take()


def test_numbers_that_are_equal_are_not_the_same(cuda: FakeCuda) -> None:
    """
    1, 1.0 and True have kernels of their own, as arguments and as constants.
    """
    first = random(64)
    for known in (False, True):
        for one in (1, 1.0, True):
            assert known != add(cuda, first, factor=one)
            assert known != add(cuda, first, LAST=one)
    functions = [launch.function for launch in cuda.take()]
    # the constants' kernels are Triton's to tell apart
    assert 3 == len({*functions[::2]})
    assert functions[:6] == functions[6:]


def test_names_belong_to_values(cuda: FakeCuda) -> None:
    """
    The same values by other names are another call, and of another kernel too.
    """
    first, kernel = random(64), triton.jit(_many_kernel.fn)
    for known in (False, True):
        assert known != add(cuda, first, LAST=4, num_warps=2)
        assert known != add(cuda, first, num_warps=4, LAST=2)
        num_bound = cuda.num_bound
        start_kernel(kernel, (2,), first, 32, None, 64, 2, LAST=4, num_warps=2)
        assert known != (num_bound < cuda.num_bound)


def test_new_tensors_of_a_known_kind_are_passed_on(cuda: FakeCuda) -> None:
    """
    Only dtypes are remembered: what is started gets the pointers of its own call, and the stream of its moment.
    """
    add(cuda, random(64), random(64))
    first, second, cuda.stream = random(64), random(64), 12

    assert not add(cuda, first, second)

    launch = cuda.take()[-1]
    assert (first.data_ptr(), second.data_ptr()) == launch.params[:2]
    assert 12 == launch.stream


@pytest.mark.parametrize("place", ["first", "second"])
def test_other_alignments_are_left_to_triton(place: str, cuda: FakeCuda) -> None:
    """
    One pointer that 16 does not divide, and the call is neither looked up nor remembered.
    """
    given = {"first": random(72), "second": random(72)}
    add(cuda, **given)
    aligned = cuda.take()[-1]
    shifted = given | {place: given[place][4:]}

    for _ in range(3):
        assert add(cuda, **shifted)
    assert not add(cuda, **given)

    *others, last = cuda.take()
    assert aligned == last
    assert aligned.function not in {launch.function for launch in others}
    assert {shifted[place].data_ptr()} == {launch.params[place == "second"] for launch in others}


def test_each_device_has_its_own(cuda: FakeCuda) -> None:
    """
    A function is loaded for one device.
    """
    first = random(64)
    for known in (False, True):
        for cuda.device in (0, 1):
            assert known != add(cuda, first)
    zero, one, *again = [launch.function for launch in cuda.take()]
    assert zero != one
    assert [zero, one] == again


def test_the_number_of_entries_is_bounded(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Numbers of tokens without end are forgotten, and found again.
    """
    monkeypatch.setattr(launching, "MAX_ENTRIES", 3)
    first = random(64)
    for count in range(33, 43):
        assert add(cuda, first, count=count)
        assert not add(cuda, first, count=count)
        assert len(launching._entries) <= 3
    assert add(cuda, first, count=33)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_every_launch(hook: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A profiler may come and go, by a chain or in its place.
    """
    first, seen = random(64), []
    add(cuda, first)

    def listen(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    getattr(runtime, hook).add(listen)
    assert add(cuda, first)
    getattr(runtime, hook).remove(listen)
    assert not add(cuda, first)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, hook, listen)
        assert add(cuda, first)
    assert not add(cuda, first)
    assert ["_many_kernel"] * 2 == seen


def test_a_kernel_may_have_hooks_of_its_own(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    They get the arguments as they were given.
    """
    first, seen = random(64), []
    add(cuda, first)
    monkeypatch.setattr(_many_kernel, "pre_run_hooks", [lambda *args, **_: seen.append(args[0])])

    assert add(cuda, first)
    assert seen[0] is first


def test_an_empty_grid_starts_nothing(cuda: FakeCuda) -> None:
    """
    The first time and later.
    """
    first = random(64)
    for _ in range(3):
        start_kernel(_many_kernel, (0,), first, 32, None, 64, 2)
    assert [] == cuda.take()
    assert not add(cuda, first)


def test_another_launcher_is_left_to_triton(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where its arguments are not those that are known here, nothing is remembered.
    """
    assert LAUNCHER_FORMAT == nvidia._BASE_ARGS_FORMAT
    monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOOOOO")
    first = random(64)

    assert all(add(cuda, first) for _ in range(3))


def test_the_launcher_takes_what_it_is_given() -> None:
    """
    In Triton's own source: grid, stream, function, flags, scratch, metadata and hooks, then all parameters in order.
    """
    source = nvidia.make_launcher({}, {0: "*bf16", 1: "constexpr", 2: "i32", 3: "fp32"}, None)

    parsed = source[source.index("PyArg_ParseTuple(args") :]
    names = parsed[: parsed.index("))")].replace("\n", " ").split(",")
    assert f'"{LAUNCHER_FORMAT}OOid"' == names[1].strip()
    assert [
        "gridX", "gridY", "gridZ", "_stream", "_function", "launch_cooperative_grid", "launch_pdl",
        "global_scratch_obj", "profile_scratch_obj", "kernel_metadata", "launch_metadata",
        "launch_enter_hook", "launch_exit_hook", "_arg0", "_arg1", "_arg2", "_arg3",
    ] == [name.strip().lstrip("&") for name in names[2:]]  # fmt: skip
    # an integer is a pointer without a question to the driver
    pointer = source[source.index("getPointer(PyObject") :]
    assert (
        pointer.index("PyLong_Check(obj)") < pointer.index("return ptr_info") < pointer.index("cuPointerGetAttribute")
    )
