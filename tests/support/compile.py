"""Kernels compiled for an H100 or H200 where there is none: what the compiler made can be asserted."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# of one thread block on sm_90
MAX_SHARED_BYTES = 232448


@dataclass(frozen=True, slots=True)
class Compiled:
    """
    What became of a kernel.

    Args:
        ptx: Its text.
        shared: Bytes of shared memory a thread block takes.
        spills: Bytes of registers stored to memory and loaded again.
        registers: Of each thread.
        num_warps: Of a thread block.
    """

    ptx: str
    shared: int
    spills: int
    registers: int
    num_warps: int

    def count(self, instruction: str) -> int:
        """How many lines of the PTX hold a text, like "mma.sync" or "cp.async.cg"."""
        return sum(instruction in line for line in self.ptx.splitlines())


def compile_sm90(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compiled:
    """
    Compile a kernel for compute capability 9.0, without a GPU.

    Pointers count as aligned to 16 bytes, as those of torch's allocator are.

    Args:
        kernel: A `@triton.jit` function; not under the interpreter.
        signature: The type of each argument that is not in `constexprs`, like "*bf16", "i32" or
            "fp32"; "i64:16" is an integer that 16 divides, as the launcher finds most strides to be.
        constexprs: Compile-time values, None for a pointer that is not given among them.

    Raises:
        ValueError: An argument has neither type nor value.
    """
    if not hasattr(kernel, "cache_key"):
        raise ValueError("compile_sm90 needs compiled kernels: run without TRITON_INTERPRET=1, in a process of its own")
    types, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constexprs:
            types[name] = "constexpr"
            continue
        if name not in signature:
            raise ValueError(f"argument {name} of {kernel.__name__} has neither a type nor a value")
        types[name], _, divisor = signature[name].partition(":")
        if divisor or types[name].startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]

    source = ASTSource(kernel, types, dict(constexprs), attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spills = _resources(ptx)
    threads = re.search(r"\.reqntid (\d+)", ptx)
    assert threads is not None
    return Compiled(ptx, compiled.metadata.shared, spills, registers, int(threads[1]) // 32)


def _resources(ptx: str) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, as the assembler reports them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        # line tables are no use here and cost time
        path.write_text(re.sub(r"\n\s*\.(loc|file)\b[^\n]*", "", ptx), encoding="utf-8")
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path), "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return int(registers[1]), sum(map(int, spilled))
