"""`python -m tests.programs.arm [COUNT]` (`make native-test-arm`): the kernels of AArch64 on another processor.

The self-tests of `csrc/selftest` are built by Debian's cross compiler, with the sanitizers, and run by QEMU as three
processors, of which each has one table more than the one before. Then COUNT random shapes on each. Prints the counts;
fails where a bit differs from scalar, or where a processor has other tables than it should.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "selftest-arm"
SYSROOT = Path("/usr/aarch64-linux-gnu")
COMPILER, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64", "qemu-aarch64-static")
TABLES = {
    "cortex-a53": ["scalar"],
    "neoverse-n1": ["scalar", "neon_dot"],
    "max": ["scalar", "neon_dot", "neon_i8mm"],
}
"""Processors as QEMU calls them, and the tables that each must have."""
SHAPES = 450


def emulator() -> str | None:
    return next((path for name in EMULATORS if (path := shutil.which(name))), None)


def missing() -> list[str]:
    """Debian's packages that are not there."""
    lacks = {"g++-aarch64-linux-gnu": shutil.which(COMPILER) is None, "qemu-user-static": emulator() is None}
    return [name for name, is_missing in lacks.items() if is_missing]


def build() -> None:
    target = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}")
    tools = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    words = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DHEADRACE_SELFTEST=ON", *target]
    subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD)], env=env, check=True)


def run(cpu: str, *words: str) -> str:
    """The output of the self-test as that processor runs it. Raises `SystemExit` where it fails."""
    program = emulator()
    assert program is not None
    # The emulator has no ptrace, with which leaks are looked for. Faults are planted in processes of their own.
    env = {"QEMU_CPU": cpu, "QEMU_LD_PREFIX": str(SYSROOT), "HEADRACE_EMULATOR": program}
    env["ASAN_OPTIONS"] = "detect_leaks=0"
    command = [program, str(BUILD / "selftest"), *words]
    done = subprocess.run(command, env=os.environ | env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"{cpu}: selftest {' '.join(words)} ended with {done.returncode}")
    return done.stdout


def verdict(cpu: str, compared: str, fuzzed: str) -> str:
    """One line of counts, out of what the self-test and its random shapes print. Raises `SystemExit` for other tables
    than the processor should have, or an operator that its first table beyond scalar has not."""
    lines = re.findall(r"^\w+ +(\d+) runs compared; (.*)$", compared, re.MULTILINE)
    shapes = json.loads(fuzzed)
    tables = TABLES[cpu]
    if shapes["isas"] != tables:
        raise SystemExit(f"{cpu} has {', '.join(shapes['isas'])}; expected {', '.join(tables)}")
    served = {isa for _, isas in lines for isa in isas.split()}
    if not lines or served != set(tables) or not all(set(tables[:2]) <= set(isas.split()) for _, isas in lines):
        raise SystemExit(f"{cpu}: the self-test compared {', '.join(sorted(served))}; expected {', '.join(tables)}")
    runs, noticed = (
        sum(int(runs) for runs, _ in lines),
        [name for name, seen in shapes["planted_noticed"].items() if seen],
    )
    return (
        f"{cpu}: {', '.join(tables)}: {len(lines)} operators, {runs:,} runs as scalar; {shapes['shapes']:,} random"
        f" shapes, {shapes['runs']:,} runs, {shapes['failures']} failures; noticed: {', '.join(noticed)}"
    )


def main() -> int:
    if lacks := missing():
        print(f"native-test-arm needs {' and '.join(lacks)}: apt install {' '.join(lacks)}", file=sys.stderr)
        return 1
    count = sys.argv[1] if len(sys.argv) > 1 else str(SHAPES)
    build()
    for cpu in TABLES:
        print(verdict(cpu, run(cpu), run(cpu, "fuzz", count)), flush=True)
    print("emulated: these kernels have never run on hardware")
    return 0


if __name__ == "__main__":
    sys.exit(main())
