"""Finds the device, and says what is wrong with a GPU before anything is loaded onto it."""

import os
import re
from pathlib import Path

import torch

from engine.errors import DriverTooOld, GPUTooOld, NoGPU, NotEnoughMemory, StartupError

# Triton compiles for Ampere and newer, and bfloat16 came with it
_LEAST_CAPABILITY = (8, 0)
# instructions that convert float8_e4m3fn came with Ada
_LEAST_FP8_CAPABILITY = (8, 9)

# by major version of CUDA, the first driver that runs it
_FIRST_DRIVER = {"11": "450", "12": "525", "13": "580"}

_ON_THE_CPU = "--device cpu runs on the CPU"
_TORCH_BUILDS = "https://pytorch.org/get-started/locally"


def pick_device(wanted: str) -> torch.device:
    """
    Return the device to run on, tried and usable.

    Args:
        wanted: "cpu", "cuda", or "auto": the GPU where torch was built for CUDA, else the CPU. A
            torch for CUDA without a usable GPU is an error, as a CPU would be slower without a word.

    Raises:
        NoGPU: there is none that torch can use.
        DriverTooOld: the driver is older than torch's CUDA.
        GPUTooOld: the kernels do not run on it.
        NotEnoughMemory: other processes hold all of its memory.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        other = _other_accelerator()
        if wanted == "auto" and other is None:
            return torch.device("cpu")
        build = f"for {other}" if other else "without CUDA"
        raise NoGPU(
            f"torch {torch.__version__} was built {build}, and GPUs are used through CUDA alone: "
            f"install a CUDA build ({_TORCH_BUILDS}); {_ON_THE_CPU}"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        raise _explain_start(str(error)) from error
    # of the visible ones the first: CUDA_VISIBLE_DEVICES chooses
    device = torch.device("cuda", 0)
    _check_capability(device)
    _open(device)
    return device


def compute_dtype(wanted: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """
    Return what the model computes in.

    Args:
        wanted: A dtype's name, or "auto": the checkpoint's own on a GPU, float32 on a CPU.
        checkpoint: What config.json says.

    Raises:
        StartupError: float64 is wanted of a GPU.
    """
    if wanted == "auto":
        # a GPU has no kernels in float64: there a checkpoint of it is cast down
        return torch.float32 if device.type == "cpu" or checkpoint is torch.float64 else checkpoint
    if wanted == "float64" and device.type != "cpu":
        raise StartupError('dtype is "float64", which runs on a CPU only: take "float32", or set --device cpu')
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def cache_dtype(wanted: str, computed: torch.dtype, device: torch.device) -> torch.dtype:
    """
    Return what keys and values are kept in.

    Args:
        wanted: "fp8", or "auto": what the model computes in.
        computed: As `compute_dtype` gives it.

    Raises:
        GPUTooOld: eight bits are wanted of a GPU that cannot convert them.
    """
    if wanted == "auto":
        return computed
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _LEAST_FP8_CAPABILITY:
            raise GPUTooOld(
                f"the {torch.cuda.get_device_name(device)} has compute capability {_dotted(capability)}, and "
                f'kv_cache_dtype is "fp8", which needs {_dotted(_LEAST_FP8_CAPABILITY)} (Ada) or newer: '
                'set kv_cache_dtype to "auto", or take another GPU'
            )
    return torch.float8_e4m3fn


def _other_accelerator() -> str | None:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"XPU {torch.version.xpu}" if torch.version.xpu is not None else None


def _explain_start(said: str) -> StartupError:
    """Turn what torch says when CUDA does not start into what to do about it."""
    too_old = re.search(r"too old \(found version (\d+)\)", said)
    if too_old is not None:
        return _driver_too_old(int(too_old.group(1)))
    # 803: a library of another driver is found first; 804: a container's CUDA is newer than the host's driver
    if re.search(r"Error 80[34]\b", said):
        return DriverTooOld(
            f"the NVIDIA driver{_driver()} does not fit the CUDA libraries that torch {torch.__version__} finds "
            f"({_first_line(said)}): update the driver to {_needed_driver()}; {_ON_THE_CPU}"
        )
    if "no NVIDIA driver" in said:
        return NoGPU(
            f"torch {torch.__version__} was built for CUDA {torch.version.cuda} and finds no NVIDIA driver: "
            f"install one, or start the container with its GPUs (docker run --gpus all); {_ON_THE_CPU}"
        )
    if "No CUDA GPUs are available" in said:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            return NoGPU(
                f'CUDA_VISIBLE_DEVICES is "{hidden}" and leaves no GPU visible: name one that `nvidia-smi -L` '
                f"lists, or unset it; {_ON_THE_CPU}"
            )
        return NoGPU(f"the NVIDIA driver{_driver()} finds no GPU: see what `nvidia-smi -L` says; {_ON_THE_CPU}")
    return NoGPU(f"CUDA does not start ({_first_line(said)}): see whether `nvidia-smi` works here; {_ON_THE_CPU}")


def _driver_too_old(found: int) -> DriverTooOld:
    # CUDA writes 12.4 as 12040
    major, minor = found // 1000, found % 1000 // 10
    return DriverTooOld(
        f"the NVIDIA driver{_driver()} runs CUDA up to {major}.{minor}, and torch {torch.__version__} needs "
        f"CUDA {torch.version.cuda}: update the driver to {_needed_driver()}, or install a torch built for "
        f"CUDA {major} ({_TORCH_BUILDS}); {_ON_THE_CPU}"
    )


def _needed_driver() -> str:
    version = str(torch.version.cuda)
    first = _FIRST_DRIVER.get(version.partition(".")[0])
    return f"{first} or newer" if first else f"one for CUDA {version}"


def _driver(proc: Path = Path("/proc")) -> str:
    """The kernel module's version with a space before it; empty where it cannot be read."""
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return ""
    version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return f" {version.group()}" if version else ""


def _check_capability(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise GPUTooOld(
            f"the {torch.cuda.get_device_name(device)} has compute capability {_dotted(capability)}, and the "
            f"kernels and bfloat16 need {_dotted(_LEAST_CAPABILITY)} (Ampere) or newer: take another GPU; {_ON_THE_CPU}"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _open(device: torch.device) -> None:
    """Make the context, which fails where others have the GPU to themselves or have filled it."""
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        said = str(error)
        if "out of memory" in said:
            raise NotEnoughMemory(
                f"other processes hold all memory of the {torch.cuda.get_device_name(device)}: end them (`nvidia-smi` "
                "lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
            ) from error
        raise NoGPU(
            f"the {torch.cuda.get_device_name(device)} cannot be opened ({_first_line(said)}): another process may "
            f"have it to itself, see `nvidia-smi -q -d COMPUTE`; {_ON_THE_CPU}"
        ) from error


def _first_line(said: str) -> str:
    return said.strip().partition("\n")[0].rstrip(".")
