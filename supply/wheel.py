"""`python supply/wheel.py [--twice] [--arm] [PYTHON ...]` puts a wheel for each interpreter into dist, with a manylinux
tag.

Each wheel is built from a copy of the files under version control, by the tools of requirements-build.lock, repaired by
auditwheel, and tried in a fresh environment. CPython 3.12 and newer share one wheel (abi3). `--twice` builds each in
two folders and fails unless both wheels have the same bytes. PIP_ARGS of the environment is passed to pip. Beside the
wheels lies headrace.provenance.json, the statement of what went in.

`--arm` builds for AArch64 by Debian's cross compiler, with the interpreter's own headers: of pyconfig.h only what
concerns the interpreter itself differs. Such a wheel is not installed here; the header of its extension is read.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from provenance import statement
from versions import ROOT, epoch

BUILD = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
NATIVE = "--config-settings=wheel.cmake=true"
"""Without the native kernels there is no wheel: pip fails with the compiler's message."""
ARM = "aarch64-linux-gnu-"
CHECK = "import headrace._native as native; print(native.__file__)"


def run(*words: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    subprocess.run([str(word) for word in words], cwd=cwd, env=os.environ | (env or {}), check=True)


def environment(python: str, folder: Path, *words: str) -> Path:
    """An environment of `python` in which pip installs `words`; returns its interpreter."""
    run(python, "-m", "venv", "--clear", folder)
    inside = folder / "bin" / "python"
    if words:
        run(inside, "-m", "pip", "install", "--quiet", *shlex.split(os.environ.get("PIP_ARGS", "")), *words)
    return inside


def sources() -> list[str]:
    """The files under version control; all files of an unpacked archive."""
    if (ROOT / ".git").exists():
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [name for name in names.splitlines() if (ROOT / name).is_file()]
    folders = ("src", "csrc")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix not in (".so", ".pyc")]
    kept = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE")
    return [str(path.relative_to(ROOT)) for path in files if path.is_file()] + [*kept]


def cross(python: Path) -> dict[str, str]:
    """The variables with which CMake, pip and scikit-build-core build for AArch64."""
    ask = "import sys; print(f'cpython-{sys.version_info[0]}{sys.version_info[1]}')"
    soabi = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": f".{soabi}-aarch64-linux-gnu.so",
        "CMAKE_ARGS": f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER={ARM}g++",
    }


def check_machine(wheel: Path, folder: Path) -> None:
    """The extension is of AArch64, and so does the wheel's name say. Raises `SystemExit`."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if re.fullmatch(r"headrace/_native\..*so", name))
        path = archive.extract(name, folder)
    machine = subprocess.run([f"{ARM}readelf", "-h", path], capture_output=True, text=True, check=True).stdout
    if "AArch64" not in machine or not wheel.name.endswith("_aarch64.whl"):
        raise SystemExit(f"{wheel.name} is not for AArch64:\n{machine}")


def build(inside: Path, folder: Path, time: str, more: dict[str, str]) -> Path:
    """Build one wheel in `folder` with the environment of `inside`; returns the repaired wheel."""
    tree, out = folder / "source", folder / "out"
    shutil.rmtree(folder, ignore_errors=True)
    for name in sources():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    # No path of this machine and no time of day may come into the wheel.
    env = {"SOURCE_DATE_EPOCH": time, "PATH": f"{inside.parent}{os.pathsep}{os.environ['PATH']}"}
    env |= {"CXXFLAGS": f"-ffile-prefix-map={tree}=.", "PYTHONHASHSEED": "0"} | more
    pip = (inside, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", out / "linux")
    run(*pip, NATIVE, tree, env=env)
    [plain] = (out / "linux").glob("*.whl")
    run(inside, "-m", "auditwheel", "repair", "-w", out / "manylinux", plain, env=env)
    [wheel] = (out / "manylinux").glob("*manylinux*.whl")
    return wheel


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("python", nargs="*", default=[sys.executable])
    arguments.add_argument("--twice", action="store_true")
    arguments.add_argument("--arm", action="store_true")
    args = arguments.parse_args()
    if args.arm and shutil.which(f"{ARM}g++") is None:
        print("a wheel for AArch64 needs g++-aarch64-linux-gnu: apt install g++-aarch64-linux-gnu", file=sys.stderr)
        return 1
    locked = ("--require-hashes", "--no-deps", "--requirement", "requirements-build.lock")
    DIST.mkdir(exist_ok=True)
    time = epoch()
    built = {}
    for number, python in enumerate(args.python):
        place = BUILD / str(number)
        inside = environment(python, place / "tools", *locked)
        more = cross(inside) if args.arm else {}
        wheel = build(inside, place / "a", time, more)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if args.twice:
            other = build(inside, place / "another-folder", time, more)
            if other.name != wheel.name or other.read_bytes() != wheel.read_bytes():
                print(f"{wheel} and {other} differ", file=sys.stderr)
                return 1
            print(f"two builds of {wheel.name} have the same bytes")
        if args.arm:
            check_machine(wheel, place / "unpacked")
        else:
            fresh = environment(python, place / "fresh")
            run(fresh, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
            run(fresh, "-I", "-c", CHECK, cwd=place)
        shutil.copyfile(wheel, DIST / wheel.name)
        built[wheel.name] = digest, inside
        print(f"{digest}  dist/{wheel.name}")
    name, prefix = ("headrace.aarch64", ARM) if args.arm else ("headrace", "")
    text = statement(built, sources(), time, prefix)
    (DIST / f"{name}.provenance.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
