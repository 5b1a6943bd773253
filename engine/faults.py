"""Which of torch's errors say that the device is full, and which that it is lost."""

import torch

_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # torch on a CPU
    "can't allocate memory",
)

# after these every further call fails, whatever it does; the words are the driver's, torch and Triton repeat them
_LOST = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "the launch timed out",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "context is destroyed",
    "invalid device context",
    "no CUDA-capable device is detected",
    "devices are busy or unavailable",
    "driver shutting down",
    "CUDA error: unknown error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "unhandled cuda error",
)
_OF_A_DEVICE = ("CUDA", "CUBLAS", "CUDNN", "NCCL")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether less work at a time may help."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def is_lost(error: RuntimeError) -> bool:
    """Whether nothing works on the device any more, for this process."""
    text = str(error)
    return any(word in text for word in _OF_A_DEVICE) and any(words in text for words in _LOST)


def release_cached_memory() -> None:
    """Give back what torch keeps of a GPU for later, in whatever pieces it is."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
