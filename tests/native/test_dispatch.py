"""Which ISA serves: what the processor has counts only if the operating system saves its registers."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from headrace.backends import native as face
from headrace.protocol.errors import RequestError

# Words of a processor with everything, and of a system that saves all its registers.
WORDS = {
    "leaf1_ecx": 1 << 27 | 1 << 28 | 1 << 12 | 1 << 29,  # OSXSAVE, AVX, FMA, F16C
    "leaf7_ebx": 1 << 5 | 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31,  # AVX2; AVX-512 F, DQ, BW, VL
    "leaf7_ecx": 1 << 11,  # AVX512_VNNI
    "leaf7_edx": 1 << 24 | 1 << 25,  # AMX tile, int8
    "leaf7_1_eax": 1 << 4,  # AVX_VNNI
    "xcr0": 0x2 | 0x4 | 0xE0 | 0x60000,
    "hwcap": 0,
    "hwcap2": 0,
}
# The same of AArch64, whose system has the say alone.
ARM = dict.fromkeys(WORDS, 0) | {"hwcap": 1 << 20, "hwcap2": 1 << 13}  # ASIMDDP; I8MM
ALL = {"avx2", "avx512", "avx512_vnni", "avx_vnni", "amx_int8"}


def found(native: ModuleType, **changes: int) -> set[str]:
    return {name for name, there in native.decide(**WORDS | changes).items() if there}


def test_a_machine_with_everything(native: ModuleType) -> None:
    assert found(native) == ALL


@pytest.mark.parametrize(
    ("xcr0", "allowed"),
    [
        (0x6, {"avx2", "avx_vnni"}),  # AVX-512 in CPUID, not in XCR0
        (0x6 | 0x60000, {"avx2", "avx_vnni", "amx_int8"}),
        (0xE6, ALL - {"amx_int8"}),
        (0x6 | 0xC0, {"avx2", "avx_vnni"}),  # the mask registers' state is missing
        (0xE6 | 0x20000, ALL - {"amx_int8"}),  # tile configuration without tile data
        (0x2, set()),  # SSE alone: none of the others
        (0x4, set()),
        (0x0, set()),
    ],
)
def test_the_system_has_a_say(native: ModuleType, xcr0: int, allowed: set[str]) -> None:
    assert found(native, xcr0=xcr0) == allowed


def test_without_osxsave_xcr0_says_nothing(native: ModuleType) -> None:
    assert found(native, leaf1_ecx=WORDS["leaf1_ecx"] & ~(1 << 27)) == set()


@pytest.mark.parametrize(
    ("word", "bit", "lost"),
    [
        ("leaf1_ecx", 12, ALL),  # no FMA: no table may be used that was compiled with it
        ("leaf1_ecx", 29, ALL),  # no F16C
        ("leaf7_ebx", 5, ALL),
        ("leaf7_ebx", 30, {"avx512", "avx512_vnni"}),  # no BW
        ("leaf7_ebx", 31, {"avx512", "avx512_vnni"}),  # no VL
        ("leaf7_ecx", 11, {"avx512_vnni"}),
        ("leaf7_edx", 25, {"amx_int8"}),
        ("leaf7_1_eax", 4, {"avx_vnni"}),
    ],
)
def test_a_missing_bit_takes_what_needs_it(native: ModuleType, word: str, bit: int, lost: set[str]) -> None:
    assert found(native, **{word: WORDS[word] & ~(1 << bit)}) == ALL - lost


def test_an_arm_machine(native: ModuleType) -> None:
    assert found(native, **ARM) == {"dotprod", "i8mm"}
    assert found(native, **ARM | {"hwcap2": 0}) == {"dotprod"}
    assert found(native, **ARM | {"hwcap": 0}) == set()  # the table of i8mm needs that of dotprod below it
    assert found(native, **ARM | {"hwcap": ~(1 << 20) & 2**64 - 1, "hwcap2": ~(1 << 13) & 2**64 - 1}) == set()


def test_amx_is_tried_before_it_serves(native: ModuleType) -> None:
    """The word of the processor and of the system is not enough: a product of tiles is made in a child process."""
    if "amx_int8" in native.isas():
        assert {op for op, isa in native.served().items() if isa == "amx_int8"} == {
            "linear_i4", "linear_i5", "linear_i6", "linear_i8", "linear_k"
        }  # fmt: skip
    else:
        assert not native.features()["amx_int8"]


# An unprivileged process can forbid itself a call: the request for the tiles' registers (number 0x1023 of arch_prctl).
REFUSED = """
import ctypes, struct, sys
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
rules = [(LOAD, 0, 0, 0), (EQUAL, 0, 3, 158), (LOAD, 0, 0, 16), (EQUAL, 0, 1, 0x1023)]
rules += [(RETURN, 0, 0, 0x50000 | 22), (RETURN, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
held = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(held)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, FILTER, program):
    sys.exit(77)
from headrace import _native
print(*_native.isas())
"""


def test_a_system_that_refuses_the_tiles_is_served_without(native: ModuleType) -> None:
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=100)
    if done.returncode == 77:
        pytest.skip("this system has no filter of calls")
    assert done.stdout.split() == [isa for isa in native.isas() if isa != "amx_int8"], done.stderr


def test_scalar_serves_everything(native: ModuleType) -> None:
    assert native.isas()[0] == "scalar"
    assert set(native.served("scalar").values()) == {"scalar"}
    assert set(native.served("scalar")) == set(native.schema())


def test_a_ceiling_is_kept(native: ModuleType) -> None:
    for rank, isa in enumerate(native.isas()):
        served = set(native.served(isa).values())
        assert isa in served
        assert served <= set(native.isas()[: rank + 1])


def test_an_unknown_isa_is_told(native: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"avx9000.*scalar"):
        native.served("avx9000")
    with pytest.raises(ValueError, match="avx9000"):
        native.Tape("avx9000")
    with pytest.raises(ValueError, match="avx9000"):
        native.set_isa("avx9000")


def test_the_environment_forces_an_isa(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    best = native.served()
    try:
        for isa in native.isas():
            monkeypatch.setenv("HEADRACE_ISA", isa)
            face.native.cache_clear()
            face.native()
            assert native.served() == native.served(isa)
        monkeypatch.setenv("HEADRACE_ISA", "avx9000")
        face.native.cache_clear()
        with pytest.raises(RequestError, match=r"HEADRACE_ISA.*avx9000.*scalar"):
            face.native()
    finally:
        monkeypatch.undo()
        face.native.cache_clear()
        face.native()
    assert native.served() == best
