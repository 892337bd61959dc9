"""No instruction of one ISA stands in another's code. A function compiled for AVX-512 that the linker keeps for
everybody ends the process on an older CPU, so the objects themselves are looked at."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "native" / "CMakeFiles"
# Registers that code must not touch. Those from 16 on exist with AVX-512 alone, however short they are.
HIGH = r"|[xy]mm(?:1[6-9]|2\d|3[01])"
FORBIDDEN = {
    "base": rf"%(?:[yz]mm{HIGH})",
    "_native": rf"%(?:[yz]mm{HIGH})",
    "isa_scalar": rf"%(?:[yz]mm{HIGH})",
    "isa_avx2": rf"%(?:zmm{HIGH})",
    "isa_avx_vnni": rf"%(?:zmm{HIGH})",
}
# Of AArch64, where registers say nothing: the products that a table may not use (`make native-test-arm`).
ARM = "aarch64-linux-gnu-"
ARM_OBJECTS = ROOT / "build" / "selftest-arm" / "CMakeFiles"
ARM_FORBIDDEN = {
    "base": r"\t(?:usdot|[su]dot|[su]mmla|usmmla)\t",
    "isa_scalar": r"\t(?:usdot|[su]dot|[su]mmla|usmmla)\t",
    "isa_neon_dot": r"\t(?:usdot|[su]mmla|usmmla)\t",
}


def tool(name: str) -> str:
    result = shutil.which(name)
    if result is None:
        pytest.skip(f"no {name}")
    return result


def objects(target: str, tree: Path = OBJECTS) -> list[Path]:
    paths = sorted((tree / f"{target}.dir").rglob("*.o"))
    if not paths:
        pytest.skip(f"no build tree: make {'native' if tree == OBJECTS else 'native-test-arm'}")
    return paths


def read(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def alien_instructions(path: Path, forbidden: str, target: str = "") -> list[str]:
    code = read(tool(f"{target}objdump"), "-d", "--no-show-raw-insn", path)
    return [f"{path.name}: {line.strip()}" for line in code.splitlines() if re.search(forbidden, line)][:5]


def alien_symbols(path: Path, isa: str) -> list[str]:
    """Symbols that the linker might take for another unit's, or another unit for its own, and anything of the C++
    library, whose templates would be compiled with this ISA's flags."""
    broken = []
    for line in read(tool("nm"), "-C", path).splitlines():
        kind, name = re.match(r"[0-9a-f ]{16} (\S) (.*)", line).groups()  # type: ignore[union-attr]
        is_ours = name.startswith(f"hr_{isa}::") or name == f"hr_kernels_{isa}"
        if (kind == "u" or kind.isupper()) and kind != "U" and not is_ours:
            broken.append(f"{path.name}: {kind} {name}")
        if kind in "Uw" and re.search(r"\bstd::|operator (?:new|delete)|__cxa|__gxx", name):
            broken.append(f"{path.name}: uses {name}")
    return broken


@pytest.mark.parametrize("target", list(FORBIDDEN))
def test_no_register_of_a_higher_isa(target: str) -> None:
    assert not [line for path in objects(target) for line in alien_instructions(path, FORBIDDEN[target])]


@pytest.mark.parametrize("target", list(ARM_FORBIDDEN))
def test_no_instruction_of_a_higher_table_of_arm(target: str) -> None:
    paths = objects(target, ARM_OBJECTS)
    assert not [line for path in paths for line in alien_instructions(path, ARM_FORBIDDEN[target], ARM)]


@pytest.mark.parametrize("isa", ["neon_dot", "neon_i8mm"])
def test_the_tables_of_arm_have_what_they_are_named_after(isa: str) -> None:
    paths = [path for path in objects(f"isa_{isa}", ARM_OBJECTS) if path.name.startswith("linear_i8")]
    assert alien_instructions(paths[0], r"\tusmmla\t" if isa == "neon_i8mm" else r"\tsdot\t", ARM)
    assert not alien_symbols(paths[0], isa)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx_vnni", "avx512_vnni", "amx_int8"])
def test_an_isa_defines_nothing_outside_its_namespace(isa: str) -> None:
    paths = objects(f"isa_{isa}")
    assert any(path.name.startswith("table.cpp") for path in paths)
    assert not [line for path in paths for line in alien_symbols(path, isa)]


def memory_moves(path: Path, name: str) -> list[str]:
    """Instructions of the functions called `name` that have a vector go to memory or come from there."""
    code = read(tool("objdump"), "-d", "-C", "--no-show-raw-insn", path)
    bodies = re.findall(rf"^[0-9a-f]+ <.*::{name}\(.*\)>:\n((?:.+\n)*)", code, re.M)
    assert bodies, f"{path} has no {name}"
    return [line.strip() for body in bodies for line in body.splitlines() if re.search(r"\(%r", line) and "mm" in line]


@pytest.mark.parametrize("isa", ["avx2", "avx512_vnni"])
def test_the_probes_of_the_limits_stay_in_registers(isa: str) -> None:
    (path,) = (path for path in objects(f"isa_{isa}") if path.name.startswith("probe.cpp"))
    for name in ("int8", "f32"):
        assert not memory_moves(path, name)


PLANTED = """
#include <immintrin.h>
inline float __attribute__((noinline)) everybodys(const float* x) { return _mm512_reduce_add_ps(_mm512_loadu_ps(x)); }
struct Box { float* p; Box() : p(new float[16]) {} };
namespace hr_avx2 { float own(const float* x) { Box box; return everybodys(x) + box.p[0]; } }
float naked() { return 1; }
namespace hr_avx2 {
void f32(long turns) {
    __m512 a[20];
    for (int j = 0; j < 20; j++) a[j] = _mm512_setzero_ps();
    for (long i = 0; i < turns; i++)
        for (int j = 0; j < 20; j++) __asm__ volatile("vfmadd231ps %0, %0, %0" : "+v"(a[j]));
}
}
"""


def test_a_planted_object_is_noticed(tmp_path: Path) -> None:
    source, target = tmp_path / "planted.cpp", tmp_path / "planted.o"
    source.write_text(PLANTED)
    if subprocess.run(
        [tool("g++"), "-O2", "-w", "-mavx512f", "-c", source, "-o", target], capture_output=True, timeout=100
    ).returncode:
        pytest.skip("g++ here does not compile for AVX-512")
    for forbidden in FORBIDDEN.values():
        assert alien_instructions(target, forbidden)
    broken = "\n".join(alien_symbols(target, "avx2"))
    assert "W everybodys" in broken
    assert "T naked" in broken
    assert "uses operator new" in broken
    assert "own" not in broken
    assert memory_moves(target, "f32")
