"""`python -m tests.programs.arm_python [WORDS]` tries the wheel of `make wheel-arm` in an emulated Python of AArch64.

Debian's CPython 3.11 for arm64 and numpy's wheel are unpacked in build/arm-python, and nothing is installed. Without
WORDS the integer products and `top_k` of every table there are compared with numpy's; WORDS are passed to that Python
instead. Emulated: it tells of bits, and nothing of speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.programs.arm import ROOT, emulator

PLACE = ROOT / "build" / "arm-python"
SYSTEM, SITE = PLACE / "system", PLACE / "site"
DEBIAN = (
    "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 libexpat1 zlib1g libffi8 "
    "libssl3 libbz2-1.0 liblzma5 libuuid1 libcrypt1 libsqlite3-0"
).split()
PACKAGES = "numpy pytest pytest-timeout hypothesis msgspec".split()
PLATFORMS = [f"--platform=manylinux{tag}_aarch64" for tag in ("2014", "_2_17", "_2_28")]
TESTS = [f"tests/native/kernels/test_{name}.py" for name in ("whole_sums", "top_k")]


def fetch_system() -> None:
    """Debian's packages, by lists of their own: those of this machine stay as they are."""
    apt = PLACE / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    options = ["APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Sandbox::User=root"]
    options += [f"Dir::State::lists={apt / 'lists'}", f"Dir::Cache={apt / 'cache'}", "Dir::State::status=/dev/null"]
    get = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    subprocess.run([*get, "update"], check=True)
    subprocess.run([*get, "download", *DEBIAN], cwd=apt / "debs", check=True)
    for package in sorted((apt / "debs").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, SYSTEM], check=True)


def fetch_site() -> None:
    words = ["pip", "install", "--quiet", "--target", str(SITE), "--only-binary=:all:", "--python-version=3.11"]
    words += ["--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none", *PLATFORMS, "-c", "constraints.txt"]
    subprocess.run([sys.executable, "-m", *words, *PACKAGES], cwd=ROOT, check=True)


def unpack(wheel: Path) -> None:
    shutil.rmtree(SITE / "headrace", ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(SITE)


def main() -> int:
    program, wheels = emulator(), sorted((ROOT / "dist").glob("headrace-*-cp311-cp311-*_aarch64.whl"))
    if program is None or not wheels or shutil.which("apt-get") is None:
        needs = "qemu-user-static, Debian's apt-get, and a wheel of `make wheel-arm` for Python 3.11"
        print(f"tests.programs.arm_python needs {needs}", file=sys.stderr)
        return 1
    if not (SYSTEM / "usr" / "bin" / "python3.11").exists():
        fetch_system()
    if not (SITE / "numpy").exists():
        fetch_site()
    unpack(wheels[-1])
    env = {"QEMU_LD_PREFIX": str(SYSTEM), "QEMU_CPU": os.environ.get("QEMU_CPU", "max"), "PYTHONPATH": str(SITE)}
    command = [program, str(SYSTEM / "usr" / "bin" / "python3.11"), "-B"]
    words = sys.argv[1:] or ["-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", *TESTS]
    if not sys.argv[1:]:
        tell = "import platform; from headrace import _native; print(platform.machine(), *_native.isas(), flush=True)"
        subprocess.run([*command, "-c", tell], cwd=PLACE, env=os.environ | env, check=True)
    return subprocess.run([*command, *words], cwd=ROOT, env=os.environ | env).returncode


if __name__ == "__main__":
    sys.exit(main())
