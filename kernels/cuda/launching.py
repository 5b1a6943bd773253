"""
Launches of kernels that cost the host little from the second call on.

Triton binds the arguments of every call to the kernel's signature, finds out anew what each is to be
compiled for, and makes text of the options to look the kernel up. An eager step of a small model is
some hundred launches, and waits for that. Here a call is looked up by what its arguments are, and
what was compiled for it is started by Triton's launcher of that signature, directly.

Nothing of how Triton specialises is repeated: two calls share an entry only if their numbers,
constants and options are of equal types and values and their tensors of equal dtypes, and only if
every pointer is a multiple of 16. What a tensor may differ in besides, shape and strides, no kernel
sees. Other calls go the ordinary way, as do all while a profiler listens, under the interpreter,
without a GPU, and of a Triton whose launcher takes other arguments than that of 3.6.

Three of Triton's checks are made by the first call only: that the device can read what each pointer is
of (pinned memory of the host has the same address there), that no global that a kernel reads has
changed, and that debug settings are the same.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton.backends.nvidia import driver
from triton.knobs import runtime

# a step of another number of tokens has entries of its own, some ten of them
MAX_ENTRIES = 4096

# the arguments of the launcher before the kernel's own: grid, stream, function, cooperative, early start,
# two scratch memories, packed metadata, metadata for hooks, and the hooks before and after
LAUNCHER_FORMAT = "iiiKKppOOOOOO"
_PLAIN = frozenset({int, float, bool, str, type(None), triton.language.dtype})

# none on a torch without CUDA
_current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# by key: what starts the kernel, its arguments between the stream and the kernel's, and the kernel's last ones;
# the kernel itself is kept so that no other can have its id
_entries: dict[tuple[object, ...], tuple[Callable[..., object], tuple[Any, ...], tuple[Any, ...], object]] = {}


def start_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """
    Start a kernel as `kernel[grid](*args, **constants)` does, on the current device and stream.

    Args:
        kernel: A `@triton.jit` function.
        args: Its first parameters: tensors, numbers or None.
        constants: Its other parameters, and options like num_warps; no tensors.
    """
    if _current_device is None or _current_stream is None or _is_watched(kernel):
        kernel[grid](*args, **constants)
        return

    raw: list[Any] = []
    # an integer stands for itself, any other value comes behind its type: 1, 1.0 and True differ
    seen: list[object] = []
    bits = 0
    for arg in args:
        kind = type(arg)
        if kind is int:
            raw.append(arg)
            seen.append(arg)
        elif kind is Tensor or kind is Parameter:
            pointer = arg.data_ptr()
            bits |= pointer
            raw.append(pointer)
            seen.append(arg.dtype)
        else:
            raw.append(arg)
            seen += kind, arg
    device, values = _current_device(), constants.values()
    key = (id(kernel), device, tuple(seen), tuple(constants), tuple(values), tuple(map(type, values)))
    entry = None if bits & 15 else _entries.get(key)
    if entry is not None:
        start, head, last, _ = entry
        start(*(*grid, 1, 1)[:3], _current_stream(device), *head, *raw, *last)
        return
    compiled = kernel[grid](*args, **constants)
    if not bits & 15:
        _remember(key, kernel, compiled, args, constants)


def next_power_of_2(n: int) -> int:
    """The least that is no less than `n`, 1 or more; Triton's own takes the host as long as a launch."""
    return 1 << (n - 1).bit_length()


def _is_watched(kernel: Any) -> bool:
    """Whether somebody asked to be told of launches, in a way that only Triton knows how to serve."""
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or kernel.pre_run_hooks)
    except AttributeError:
        return True


def _remember(
    key: tuple[object, ...], kernel: Any, compiled: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Keep what a call started, if all that the next one may do without Triton is known."""
    launcher = getattr(compiled, "run", None)
    if not (isinstance(kernel, triton.JITFunction) and isinstance(launcher, driver.CudaLauncher)):
        return
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != LAUNCHER_FORMAT:
        return
    if not all(type(arg) in _PLAIN or type(arg) in (Tensor, Parameter) for arg in args):
        return
    if not all(type(value) in _PLAIN for value in constants.values()):
        return

    # the launcher takes all parameters in their order; those compiled in it leaves unread
    last = tuple(_value_of(name, kernel, constants) for name in kernel.arg_names[len(args) :])
    hooks = (None, None, None)
    head: tuple[Any, ...]
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        # makes the memory, then starts
        start = launcher
        head = (compiled.function, compiled.packed_metadata, *hooks)
    else:
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        start = launcher.launch
        head = (compiled.function, *flags, None, None, compiled.packed_metadata, *hooks)
    if len(_entries) >= MAX_ENTRIES:
        _entries.clear()
    _entries[key] = start, head, last, kernel


def _value_of(name: str, kernel: Any, constants: dict[str, Any]) -> Any:
    return constants[name] if name in constants else kernel.signature.parameters[name].default
