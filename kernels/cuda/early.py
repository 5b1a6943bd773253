"""
Kernels that are launched before the one ahead of them in the stream has ended.

The launch, and what a kernel may read before it waits, are hidden behind the kernel ahead: in a
decode step of few sequences, which is some hundreds of short kernels, that is a part of the time.

Every program of such a kernel waits before it reads what any kernel of the step wrote, or writes
at all. Then a kernel that has ended says that all ahead of it have, however many were under way.
What never changes between steps, the weights, may be read before the wait.

Source: NVIDIA, CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.configs import SMALL_STEP_ROWS

# above it the products are the library's, which lets nothing start early, and the wait costs as much as the launch
MAX_ROWS = SMALL_STEP_ROWS


def starts_early(num_rows: int) -> bool:
    """Whether the kernels of a step of so many rows do: on compute capability 9.0 and above."""
    return num_rows <= MAX_ROWS and _can_start_early()


@functools.cache
def _can_start_early() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The kernel behind may be launched once all programs have come here."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Until all that the kernels ahead wrote can be seen."""
    if EARLY:
        gdc_wait()
