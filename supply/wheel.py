"""`python supply/wheel.py [--all] [--twice] [--arm] [PYTHON ...]` puts a wheel for each interpreter into dist, with a
manylinux tag.

Each wheel is built from a copy of the files under version control, by the tools of requirements-build.lock, repaired by
auditwheel, and tried in a fresh environment: `headrace --version`, and one token of the built-in model. CPython 3.12
and newer share one wheel (abi3). `--twice` builds each in two folders and fails unless both wheels have the same bytes.
PIP_ARGS of the environment is passed to pip. Beside the wheels lies headrace.provenance.json, the statement of what
went in.

`--all` builds what CPython 3.11 to 3.14 need, two wheels and the source archive, tries each wheel with every
interpreter at hand that it is for, and prints a line for each CPython. One that is not at hand is "NOT TRIED"; one that
no wheel is for fails the command.

`--arm` builds for AArch64 by Debian's cross compiler, with the interpreter's own headers: of pyconfig.h only what
concerns the interpreter itself differs. Such a wheel is not installed here; the header of its extension is read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from provenance import statement
from pythons import Interpreter, cover, installs, interpreter, interpreters, of_each_series
from versions import ROOT, epoch

BUILD = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
NATIVE = "--config-settings=wheel.cmake=true"
"""Without the native kernels there is no wheel: pip fails with the compiler's message."""
ARM = "aarch64-linux-gnu-"
CHECK = "import headrace._native as native; print(native.__file__)"
SOURCES = "from scikit_build_core.build import build_sdist; import sys; print(build_sdist(sys.argv[1]))"
LOCKED = ("--require-hashes", "--no-deps", "--requirement")


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


def archive(tree: Path, inside: Path, time: str) -> str:
    """Put the source archive of a copy of the files into dist; returns its name."""
    env = os.environ | {"SOURCE_DATE_EPOCH": time, "PATH": f"{inside.parent}{os.pathsep}{os.environ['PATH']}"}
    words = [inside, "-c", SOURCES, DIST]
    return subprocess.run(words, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]


def report(covered: dict[str, str], trials: dict[str, str], machine: str, everything: bool) -> tuple[list[str], bool]:
    """A line for each CPython, and whether there is a wheel for all of them that should have one.

    Args:
        covered: the wheel that each CPython installs, or nothing.
        trials: what the wheel did with each CPython that it was tried with.
        machine: the machine that the wheels are for.
        everything: whether a CPython without a wheel is a fault.
    """
    lines = []
    for series, wheel in covered.items():
        if not wheel and everything:
            lines.append(f"CPython {series} on {machine}: NO WHEEL: no interpreter that could build it is at hand")
        elif wheel and series in trials:
            lines.append(f"{trials[series]} ({wheel})")
        elif wheel:
            reason = "it is not at hand" if everything else "not asked for"
            if machine != platform.machine():
                reason = "built for another machine: see tests.programs.arm_python"
            lines.append(f"CPython {series} on {machine}: NOT TRIED, {reason} ({wheel})")
    return lines, not everything or all(covered.values())


def trial(python: str, wheel: Path, folder: Path) -> str:
    """Install the wheel in a fresh environment of `python`, with the packages of requirements.lock, and run it.

    Returns a sentence of what it printed. Raises `SystemExit` where it does not compute a token.
    """
    fresh = environment(python, folder / "fresh", *LOCKED, "requirements.lock")
    run(fresh, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    run(fresh, "-I", "-c", CHECK, cwd=folder)
    # An empty home: the built-in model is unpacked from this wheel.
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(home)}
    words = (("--version",), ("generate", "builtin", "--prompt", "Once upon a time", "--max-tokens", "1", "--json"))
    version, answer = (
        subprocess.run(
            [fresh.parent / "headrace", *each], cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for each in words
    )
    num_tokens = json.loads(answer)["usage"]["completion_tokens"]
    if num_tokens != 1:
        raise SystemExit(f"{wheel.name}: {num_tokens} tokens instead of 1: {answer}")
    return f"{version.strip()}, 1 token of the built-in model"


def chosen(names: list[str], everything: bool) -> tuple[list[Interpreter], list[Interpreter]]:
    """The interpreters to build with, and those to try with. Raises `SystemExit` for a name that is no Python."""
    named = []
    for name in names:
        if (each := interpreter(name, real=False)) is None:
            raise SystemExit(f"{name} is no Python of 3.11 or newer that can make an environment")
        named.append(each)
    if not everything:
        return named, named
    by_series = of_each_series([*named, *interpreters()])
    own, shared = ([each for key, each in by_series.items() if (key == "3.11") == is_own] for is_own in (True, False))
    return [*own[:1], *shared[:1]], list(by_series.values())


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("python", nargs="*", default=[sys.executable])
    arguments.add_argument("--all", action="store_true")
    arguments.add_argument("--twice", action="store_true")
    arguments.add_argument("--arm", action="store_true")
    args = arguments.parse_args()
    if args.arm and shutil.which(f"{ARM}g++") is None:
        print("a wheel for AArch64 needs g++-aarch64-linux-gnu: apt install g++-aarch64-linux-gnu", file=sys.stderr)
        return 1
    machine = "aarch64" if args.arm else platform.machine()
    builders, testers = chosen(args.python, args.all)
    DIST.mkdir(exist_ok=True)
    time = epoch()
    built, trials = {}, dict[str, str]()
    for number, builder in enumerate(builders):
        place = BUILD / str(number)
        inside = environment(builder.path, place / "tools", *LOCKED, "requirements-build.lock")
        more = cross(inside) if args.arm else {}
        # One folder for all, so that a compiler cache of the environment has the kernels of the one before.
        wheel = build(inside, BUILD / "a", time, more)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if args.twice:
            other = build(inside, BUILD / "another-folder", time, more)
            if other.name != wheel.name or other.read_bytes() != wheel.read_bytes():
                print(f"{wheel} and {other} differ", file=sys.stderr)
                return 1
            print(f"two builds of {wheel.name} have the same bytes")
        if args.arm:
            check_machine(wheel, place / "unpacked")
        else:
            for each in testers if args.all else [builder]:
                if installs(wheel.name, each.series, machine):
                    trials[each.series] = f"CPython {each.version}: {trial(each.path, wheel, place / each.series)}"
        shutil.copyfile(wheel, DIST / wheel.name)
        built[wheel.name] = digest, inside
        print(f"{digest}  dist/{wheel.name}", flush=True)
    if args.all and not args.arm:
        name = archive(BUILD / "a" / "source", inside, time)
        built[name] = hashlib.sha256((DIST / name).read_bytes()).hexdigest(), inside
        print(f"{built[name][0]}  dist/{name}", flush=True)
    name, prefix = ("headrace.aarch64", ARM) if args.arm else ("headrace", "")
    text = statement(built, sources(), time, prefix)
    (DIST / f"{name}.provenance.json").write_text(text + "\n", encoding="utf-8")
    covered = cover([name for name in built if name.endswith(".whl")], machine)
    lines, is_complete = report(covered, trials, machine, args.all)
    print("\n".join(lines))
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
