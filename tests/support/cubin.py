"""Compile a launch to machine code for a GPU that need not be there, and read what the compiler made of it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.backends.cuda.launch import Launch

CAPABILITIES = (80, 90, 100, 120)
SHARED_LIMITS = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one program may take."""

NEXT = {"bf16": 2, "f16": 2}
"""Numbers in 32 bits; 4 of all other types."""

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.bool: "i1",
}


@dataclasses.dataclass(frozen=True)
class Cubin:
    """One kernel's machine code and its resources, with its TTIR, TTGIR and PTX."""

    name: str
    capability: int
    registers: int
    stack: int
    shared: int
    ttir: str
    ttgir: str
    ptx: str
    binary: bytes = dataclasses.field(repr=False)

    @functools.cached_property
    def instructions(self) -> tuple[tuple[int, str, str], ...]:
        """In order, as (address, operation, text). Disassembled when first read: that takes longer than compiling."""
        pattern = r"^\s*/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+[A-Z0-9_.]*)([^\n]*)"
        code = _dumped(self.binary, "-sass")
        return tuple((int(m[1], 16), m[2], m[0]) for m in re.finditer(pattern, code, re.M))

    def count(self, prefix: str) -> int:
        return sum(operation.startswith(prefix) for _, operation, _ in self.instructions)

    def operands(self) -> list[tuple[str, int]]:
        """Return type and `kWidth` of the operands of products that lie in registers: how many numbers next to each
        other along K a thread holds. If they fill 32 bits, instructions sum K in the order of memory."""
        dots = re.findall(r"= (?:tt\.dot|ttng\.warp_group_dot) [^\n]*", self.ttgir)
        pattern = r"x([a-z]\w*), #ttg\.dot_op<\{opIdx = \d, parent = #\w+, kWidth = (\d+)\}>"
        return [(kind, int(width)) for dot in dots for kind, width in re.findall(pattern, dot)]

    def loops(self, shortest: int = 32) -> list[list[str]]:
        """Return the operations of each backward branch's range, the longest loop first."""
        bodies = []
        for address, operation, text in self.instructions:
            target = re.search(r"0x([0-9a-f]+)", text.split("BRA", 1)[-1]) if operation.startswith("BRA") else None
            if target and int(target[1], 16) < address:
                first = int(target[1], 16)
                bodies.append([name for at, name, _ in self.instructions if first <= at <= address])
        return sorted((body for body in bodies if len(body) >= shortest), key=len, reverse=True)

    def histogram(self) -> collections.Counter[str]:
        return collections.Counter(operation for _, operation, _ in self.instructions)


def compiled(launch: Launch, capability: int) -> Cubin:
    """Compile `launch` as it would be compiled on a GPU of that capability. Its tensors may be on any device."""
    names = launch.kernel.jit.arg_names
    parameters = {parameter.name: parameter for parameter in launch.kernel.jit.params}
    defaults = {name: parameter.default for name, parameter in parameters.items() if parameter.has_default}
    values: dict[str, Any] = defaults | dict(launch.arguments) | dict(launch.config.tiles)
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(names):
        value = values[name]
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[place,] = [["tt.divisibility", 16]]
        elif parameters[name].do_not_specialize:
            signature[name] = "i32"
        elif parameters[name].is_constexpr or value is None or (value == 1 and isinstance(value, int)):
            # As at run time: None and 1 become constants.
            signature[name] = "constexpr"
            constants[place,] = value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    of_language = GluonASTSource if launch.kernel.jit.is_gluon() else ASTSource
    source = of_language(fn=launch.kernel.jit, signature=signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    usage = _dumped(kernel.asm["cubin"], "-res-usage")
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources is not None, usage
    return Cubin(
        name=launch.kernel.name,
        capability=capability,
        registers=int(resources[1]),
        stack=int(resources[2]),
        shared=int(kernel.metadata.shared),
        ttir=str(kernel.asm["ttgir" if launch.kernel.jit.is_gluon() else "ttir"]),
        ttgir=str(kernel.asm["ttgir"]),
        ptx=str(kernel.asm["ptx"]),
        binary=kernel.asm["cubin"],
    )


def faults(cubin: Cubin) -> list[str]:
    """Return what no kernel may have: a stack, where spilled registers lie, too much shared memory, arithmetic on
    bfloat16, products that sum K in another order than that of memory."""
    listed = []
    if cubin.stack:
        listed.append(f"stack of {cubin.stack} bytes, {cubin.count('LDL')} LDL, {cubin.count('STL')} STL")
    if cubin.shared > SHARED_LIMITS[cubin.capability]:
        listed.append(f"{cubin.shared} bytes of shared memory, {SHARED_LIMITS[cubin.capability]} at most")
    if arithmetic := re.findall(r"arith\.(?:add|sub|mul|div)f [^\n]*bf16", cubin.ttir):
        listed.append(f"arithmetic on bfloat16: {arithmetic[0]}")
    if others := sorted({each for each in cubin.operands() if each[1] != NEXT.get(each[0], 4)}):
        listed.append(f"K out of order, operands in registers: {others}")
    return [f"{cubin.name} on sm_{cubin.capability}: {fault}" for fault in listed]


@functools.cache
def _tool() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _dumped(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(), option, file.name], capture_output=True, text=True, check=True).stdout
