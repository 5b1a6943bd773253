"""
A CUDA driver that starts nothing and writes down what it was asked to start.

All of Triton above it is real: how it binds and specialises, its compiler, the launchers in C that it makes.
"""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from kernels.cuda import launching

_SOURCE = """
#include <cuda.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], shared, num_attrs, attrs[4];
  unsigned long long stream, function, params[64];
} Launch;

Launch launches[64];
int num_launches, num_params[4096], sizes[4096][64];

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  unsigned long long handle = (unsigned long long)function;
  Launch* launch = &launches[num_launches++ % 64];
  memset(launch, 0, sizeof(Launch));
  launch->grid[0] = config->gridDimX, launch->grid[1] = config->gridDimY, launch->grid[2] = config->gridDimZ;
  launch->block[0] = config->blockDimX, launch->block[1] = config->blockDimY, launch->block[2] = config->blockDimZ;
  launch->shared = config->sharedMemBytes;
  launch->num_attrs = config->numAttrs;
  for (unsigned i = 0; i < config->numAttrs; ++i) launch->attrs[i] = config->attrs[i].id;
  launch->stream = (unsigned long long)config->hStream;
  launch->function = handle;
  for (int i = 0; i < num_params[handle]; ++i) memcpy(&launch->params[i], params[i], sizes[handle][i]);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute name, int value) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) { *text = "?"; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* found, CUpointer_attribute name, CUdeviceptr pointer) {
  *(CUdeviceptr*)found = pointer;
  return CUDA_SUCCESS;
}
"""

_BYTES = {"i1": 1, "u1": 1, "i8": 1, "i16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True)
class Launch:
    """What the driver was asked to start: `params` are the kernel's own, as bits, then two scratch memories."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    attributes: tuple[int, ...]
    stream: int
    function: int
    params: tuple[int, ...]


class _CLaunch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("num_attrs", ctypes.c_uint),
        ("attrs", ctypes.c_uint * 4),
        ("stream", ctypes.c_ulonglong),
        ("function", ctypes.c_ulonglong),
        ("params", ctypes.c_ulonglong * 64),
    )


class FakeCuda:
    """
    Stands for Triton's driver and for the two questions that `kernels.cuda.launching` asks of torch.

    Args:
        device, stream: The current ones.
        num_bound: Calls that went through Triton.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "driver.c").write_text(_SOURCE, encoding="utf-8")
        path = folder / "libcuda.so.1"
        command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{nvidia.include_dirs[0]}"]
        subprocess.run([*command, str(folder / "driver.c"), "-o", str(path)], check=True)
        # launchers ask the loader for this name, and find it loaded
        self._library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self._num_functions = 0
        self._sizes: list[int] = []
        self.device, self.stream, self.num_bound = 0, 11, 0
        self.utils = self

    def take(self) -> list[Launch]:
        """What was started since the last call, oldest first."""
        count = ctypes.c_int.in_dll(self._library, "num_launches")
        assert count.value <= 64, "more launches than are kept"
        found = (_CLaunch * 64).in_dll(self._library, "launches")
        num_params = (ctypes.c_int * 4096).in_dll(self._library, "num_params")
        taken = [
            Launch(
                tuple(x.grid),
                tuple(x.block),
                x.shared,
                tuple(x.attrs[: x.num_attrs]),
                x.stream,
                x.function,
                tuple(x.params[: num_params[x.function]]),
            )
            for x in found[: count.value]
        ]
        count.value = 0
        return taken

    # what Triton asks of its driver

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, _device: int) -> int:
        self.num_bound += 1
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def launcher_cls(self, source: Any, metadata: Any) -> nvidia.CudaLauncher:
        types = [kind for kind in source.signature.values() if kind != "constexpr"]
        self._sizes = [8 if kind[0] == "*" else _BYTES[kind] for kind in types] + [8, 8]
        return nvidia.CudaLauncher(source, metadata)

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        self._num_functions += 1
        handle = self._num_functions
        (ctypes.c_int * 4096).in_dll(self._library, "num_params")[handle] = len(self._sizes)
        sizes: Any = (ctypes.c_int * (4096 * 64)).in_dll(self._library, "sizes")
        sizes[handle * 64 : handle * 64 + len(self._sizes)] = self._sizes
        return handle, handle, 0, 0, 1024

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Until the patch is undone."""
        folder = Path(self._library._name).parent
        patch.setattr(nvidia, "library_dirs", lambda: [str(folder)])
        patch.setattr(nvidia, "PyCUtensorMap", object)
        patch.setattr(launching, "_current_device", lambda: self.device)
        patch.setattr(launching, "_current_stream", lambda _device: self.stream)
        patch.setattr(launching, "_entries", {})
        patch.setattr(driver, "_active", self)
