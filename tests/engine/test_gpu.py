"""Which device is taken, and what is said of one that cannot be: torch's side is pretended."""

from pathlib import Path

import pytest
import torch

from engine import gpu
from engine.config import MAX_GPU_SEQS, EngineConfig
from engine.errors import DriverTooOld, GPUTooOld, NoGPU, NotEnoughMemory, StartupError
from engine.gpu import cache_dtype, compute_dtype, pick_device
from kernels.decode_parts import max_items

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"


class FakeTorch:
    """What this torch was built for, and what CUDA answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch, "__version__", "2.11.0+test")
        monkeypatch.setattr(gpu, "_driver", lambda: " 550.54.15")
        self.built_for(cuda="13.0")
        self.answers(init=None)
        self.has(capability=(9, 0))
        self.opens(None)

    def built_for(self, *, cuda: str | None = None, hip: str | None = None, xpu: str | None = None) -> None:
        for name, version in (("cuda", cuda), ("hip", hip), ("xpu", xpu)):
            self._patch.setattr(torch.version, name, version)

    def answers(self, *, init: str | None) -> None:
        self._patch.setattr(torch.cuda, "init", lambda: _fail(init))

    def has(self, *, capability: tuple[int, int]) -> None:
        self._patch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
        self._patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def opens(self, error: str | None) -> None:
        self._patch.setattr(torch.cuda, "mem_get_info", lambda _: _fail(error) or (1, 1))


def _fail(error: str | None) -> None:
    if error is not None:
        raise RuntimeError(error)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    return FakeTorch(monkeypatch)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.usefixtures("fake")
def test_a_gpu_that_works_is_taken(wanted: str) -> None:
    """
    A torch for CUDA takes the first visible GPU, asked for or not.
    """
    assert CUDA == pick_device(wanted)


def test_a_torch_without_cuda_takes_the_cpu(fake: FakeTorch) -> None:
    """
    Left to choose, the CPU build of torch runs on the CPU.
    """
    fake.built_for()

    assert CPU == pick_device("auto")


def test_the_cpu_is_taken_where_it_is_asked_for(fake: FakeTorch) -> None:
    """
    CUDA is not even tried then.
    """
    fake.answers(init=TOO_OLD)

    assert CPU == pick_device("cpu")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (NO_DRIVER, NoGPU, ["2.11.0+test", "finds no NVIDIA driver", "--gpus all"]),
        ("No CUDA GPUs are available", NoGPU, ["550.54.15 finds no GPU", "nvidia-smi -L"]),
        ("CUDA unknown error - this may be due to\na setup", NoGPU, ["(CUDA unknown error - this may be due to)"]),
        ("Unexpected error. Error 802: system not yet initialized", NoGPU, ["Error 802", "nvidia-smi"]),
        (
            TOO_OLD,
            DriverTooOld,
            ["550.54.15", "up to 12.4", "needs CUDA 13.0", "580 or newer", "torch built for CUDA 12"],
        ),
        (
            "Unexpected error. Error 804: forward compatibility",
            DriverTooOld,
            ["550.54.15", "Error 804", "580 or newer"],
        ),
    ],
)
def test_a_gpu_that_does_not_start_is_never_replaced_by_the_cpu(
    fake: FakeTorch, wanted: str, said: str, error: type[StartupError], words: list[str]
) -> None:
    """
    The message has what was found, what is needed, and how to have the CPU.
    """
    fake.answers(init=said)

    with pytest.raises(error) as raised:
        pick_device(wanted)

    for word in [*words, "--device cpu"]:
        assert word in str(raised.value)


def test_hidden_gpus_are_named_by_what_hides_them(fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An empty CUDA_VISIBLE_DEVICES is the reason that nobody thinks of.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake.answers(init="No CUDA GPUs are available")

    with pytest.raises(NoGPU, match='CUDA_VISIBLE_DEVICES is ""'):
        pick_device("auto")


def test_a_newer_cuda_than_is_known_is_named_itself(fake: FakeTorch) -> None:
    """
    Without a driver's number the message still says what it must run.
    """
    fake.built_for(cuda="15.1")
    fake.answers(init=TOO_OLD)

    with pytest.raises(DriverTooOld, match=r"update the driver to one for CUDA 15\.1"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("build", "wanted", "words"),
    [
        ({}, "cuda", "built without CUDA"),
        ({"hip": "6.4"}, "cuda", "built for ROCm 6.4"),
        ({"hip": "6.4"}, "auto", "built for ROCm 6.4"),
        ({"xpu": "2025"}, "auto", "built for XPU 2025"),
    ],
)
def test_other_accelerators_are_refused(fake: FakeTorch, build: dict[str, str], wanted: str, words: str) -> None:
    """
    A GPU of another maker is not passed over in silence either.
    """
    fake.built_for(**build)

    with pytest.raises(NoGPU, match=f"{words}.*--device cpu"):
        pick_device(wanted)


def test_an_old_gpu_is_refused_with_both_numbers(fake: FakeTorch) -> None:
    """
    Before Ampere there is neither bfloat16 nor what the kernels are compiled to.
    """
    fake.has(capability=(7, 5))

    with pytest.raises(GPUTooOld, match=r"Tesla T4 has compute capability 7\.5.* need 8\.0"):
        pick_device("auto")


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (
            "CUDA error: out of memory\nCUDA kernel errors",
            NotEnoughMemory,
            "other processes hold all memory of the Tesla",
        ),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nx", NoGPU, "busy or unavailable.* to itself"),
    ],
)
def test_a_gpu_that_others_have_is_refused(fake: FakeTorch, said: str, error: type[StartupError], words: str) -> None:
    """
    Filled up or taken exclusively: the message says that it is others, and how to find them.
    """
    fake.opens(said)

    with pytest.raises(error, match=words) as raised:
        pick_device("auto")

    assert "nvidia-smi" in str(raised.value)


def test_the_driver_is_read_from_its_module(tmp_path: Path) -> None:
    """
    Both spellings of the version file are understood, and a machine without one.
    """
    assert "" == gpu._driver(tmp_path)

    folder = tmp_path / "driver/nvidia"
    folder.mkdir(parents=True)
    for line, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", " 550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", " 580.65.06"),
        ("something else", ""),
    ):
        (folder / "version").write_text(line + "\nGCC version:  gcc version 12.3.0\n")
        assert version == gpu._driver(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "device", "expected"),
    [
        ("auto", torch.bfloat16, CUDA, torch.bfloat16),
        ("auto", torch.float16, CUDA, torch.float16),
        ("auto", torch.float32, CUDA, torch.float32),
        ("auto", torch.float64, CUDA, torch.float32),
        ("auto", torch.bfloat16, CPU, torch.float32),
        ("float16", torch.bfloat16, CUDA, torch.float16),
        ("float64", torch.float32, CPU, torch.float64),
    ],
)
def test_the_dtype_follows_the_checkpoint_on_a_gpu(
    wanted: str, checkpoint: torch.dtype, device: torch.device, expected: torch.dtype
) -> None:
    """
    auto is the checkpoint's own there and float32 on a CPU; what is asked for stands.
    """
    assert expected is compute_dtype(wanted, checkpoint, device)


def test_float64_is_for_the_cpu() -> None:
    """
    A GPU has no kernels in it: the message says what to take.
    """
    with pytest.raises(StartupError, match='take "float32"'):
        compute_dtype("float64", torch.float32, CUDA)


def test_the_cache_is_as_wide_as_the_model_computes_or_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Any CPU converts eight bits, a GPU from Ada on.
    """
    assert torch.bfloat16 is cache_dtype("auto", torch.bfloat16, CUDA)
    assert torch.float8_e4m3fn is cache_dtype("fp8", torch.float64, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert torch.float8_e4m3fn is cache_dtype("fp8", torch.bfloat16, CUDA)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(GPUTooOld, match=r'NVIDIA A100 has compute capability 8\.0, .*"fp8".* 8\.9 .*to "auto"'):
        cache_dtype("fp8", torch.bfloat16, CUDA)


def test_what_is_left_open_follows_the_device() -> None:
    """
    The batch is larger on a GPU, and what was set stays; graphs are a GPU's.
    """
    config = EngineConfig(model=Path("m"), max_num_seqs=3, shared_tenants=True)
    cpu, cuda = config.resolved("cpu"), EngineConfig(model=Path("m")).resolved("cuda")

    assert (3, 512, "cpu", False, True) == (
        cpu.max_num_seqs,
        cpu.max_num_batched_tokens,
        cpu.device,
        cpu.cuda_graphs,
        cpu.shared_tenants,
    )
    assert (1024, 8192, "cuda", True) == (cuda.max_num_seqs, cuda.max_num_batched_tokens, cuda.device, cuda.cuda_graphs)
    assert cuda == cuda.resolved("cuda")


def test_more_sequences_than_a_launch_has_rows_are_refused() -> None:
    """
    On a GPU, where a row is a part of a sequence; the most that are taken leave room for all parts.
    """
    assert 65_535 >= max_items(MAX_GPU_SEQS, programs_a_seq=1)
    assert MAX_GPU_SEQS == EngineConfig(model=Path("m"), max_num_seqs=MAX_GPU_SEQS).resolved("cuda").max_num_seqs
    config = EngineConfig(model=Path("m"), max_num_seqs=MAX_GPU_SEQS + 1)
    assert MAX_GPU_SEQS + 1 == config.resolved("cpu").max_num_seqs

    with pytest.raises(StartupError, match=r"max_num_seqs is 32769; want 32768 or less on a GPU"):
        config.resolved("cuda")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "gpu"}, 'device is "gpu"'),
        ({"policy": "lifo"}, 'policy is "lifo"; want "throughput" or "fcfs"'),
        ({"kv_cache_dtype": "int8"}, 'kv_cache_dtype is "int8"; want "auto" or "fp8"'),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0;"),
        ({"gpu_memory_utilization": 90.0}, "gpu_memory_utilization is 90; want a share"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], said: str) -> None:
    """
    The message names the setting, its value and what is wanted.
    """
    with pytest.raises(StartupError, match=said):
        EngineConfig(model=Path("m"), **settings)  # type: ignore[arg-type]
