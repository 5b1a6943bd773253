"""Kernels run by Triton's interpreter, on the CPU, in a process of their own."""

import os
from typing import Any

import pytest

# kernels are made for the interpreter or for a GPU when their module is imported
if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/kernels/interpreted needs TRITON_INTERPRET=1 and a process of its own: `make test`")

from triton.runtime import interpreter

patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
    """Bounds of loops are arrays of one element, which numpy 2.4 no longer takes for integers."""
    patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])


interpreter._patch_lang_tensor = patch_tensor_and_index
