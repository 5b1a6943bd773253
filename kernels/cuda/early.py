"""
Kernels that are launched before the one ahead of them in the stream has ended.

The launch, and what a kernel may read before it waits, are hidden behind the kernel ahead: in a
decode step of few sequences, which is some hundreds of short kernels, that is a part of the time.

Every program of such a kernel waits before it reads what any kernel of the step wrote, or writes
at all. Then a kernel that has ended says that all ahead of it have, however many were under way.
What never changes between steps, the weights, may be read before the wait.

A kernel that lets the next one start only when it has waited itself tells it more: that all but itself
have ended. Attention stands behind such a one, and looks up its tokens before it waits.

Source: NVIDIA, CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# bytes that a thread asks for at once
PIECE = tl.constexpr(2048)
# of what comes next: half of the second cache of a Hopper GPU
MAX_FETCHED_BYTES = 24 << 20

# above it the products are the library's, which lets nothing start early, and the wait costs as much as the launch
MAX_ROWS = 64


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


@triton.jit
def fetch_rows(rows, BYTES: tl.constexpr):
    """
    Ask the second cache for so many bytes at each of these addresses, a multiple of 16 of them.

    Source: NVIDIA, PTX ISA, "cp.async.bulk.prefetch.L2".
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [rows, tl.full(rows.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_share(memory, num_pieces, THREADS: tl.constexpr):
    """Ask the second cache for memory that a later kernel reads, with all programs of this one: a share each."""
    program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    num_programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    for first in range(program * THREADS, num_pieces, num_programs * THREADS):
        # the last ones twice, where they do not fill a warp
        pieces = tl.minimum(first + tl.arange(0, THREADS), num_pieces - 1)
        fetch_rows(memory.to(tl.pointer_type(tl.int8)) + pieces.to(tl.int64) * PIECE, PIECE)
