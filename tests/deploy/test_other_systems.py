"""macOS and Windows: an import, the command, CMake and an install from the source archive each end with one sentence.

The systems are simulated: a Python whose `sys.platform` is another, and CMake with another CMAKE_SYSTEM_NAME.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.laws.rules import ROOT

SENTENCE = (
    "headrace runs on Linux only (x86-64 or AArch64) and has no wheel for this system: use Docker, or WSL 2 on Windows "
    "(docs/howto-deploy.md)."
)
SYSTEMS = {"darwin": "Darwin", "win32": "Windows"}
"""`sys.platform`, and CMake's name."""
ABSENT = ("fcntl", "grp", "pwd", "resource", "termios")
"""Modules of Python that Windows has not."""
BUILD = """
import platform, sys, sysconfig
from scikit_build_core.build import build_wheel

sysconfig.get_config_vars()
platform.mac_ver = lambda *_: ("14.0", ("", "", ""), "arm64")
sys.platform = sys.argv[1]
build_wheel("out", {})
"""


def tools() -> str:
    """PATH with the programs of this environment."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def python(platform: str, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run code where `sys.platform` is another, as the script `words[0]` with the arguments behind it."""
    absent = f"sys.modules.update(dict.fromkeys({ABSENT}))" if platform == "win32" else ""
    program = f"import sys; sys.platform = {platform!r}; sys.argv = {list(words)}; {absent}\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("platform", SYSTEMS)
@pytest.mark.parametrize("code", ["import headrace", "from headrace import LLM", "import headrace.serve.app"])
def test_an_import_elsewhere_is_one_error_with_the_sentence(platform: str, code: str) -> None:
    done = python(platform, f"try:\n    {code}\nexcept ImportError as error:\n    print(error)", "my_program.py")
    assert done.stdout.strip() == f"{SENTENCE} This Python's platform is {platform}."
    assert done.stderr == ""


@pytest.mark.parametrize("platform", SYSTEMS)
@pytest.mark.parametrize("script", ["bin/headrace", "headrace.exe", "Scripts/headrace-script.py"])
def test_the_command_elsewhere_prints_the_sentence_alone(platform: str, script: str) -> None:
    done = python(platform, "from headrace.__main__ import main; main()", script, "serve")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == f"{SENTENCE} This Python's platform is {platform}."


def test_control_the_command_on_linux_prints_its_version() -> None:
    done = python("linux", "from headrace.__main__ import main; main()", "bin/headrace", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("headrace ")


@pytest.mark.parametrize("platform", SYSTEMS)
def test_the_module_elsewhere_prints_the_sentence_alone(platform: str) -> None:
    done = python(platform, "import runpy; runpy._run_module_as_main('headrace')", "-m")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == f"{SENTENCE} This Python's platform is {platform}."


@pytest.mark.parametrize("name", [*SYSTEMS.values(), "FreeBSD"])
def test_cmake_elsewhere_says_so_before_it_looks_for_a_compiler(name: str, tmp_path: Path) -> None:
    words = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja", f"-DCMAKE_SYSTEM_NAME={name}"]
    env = os.environ | {"CXX": "/bin/false", "PATH": tools()}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
    text = " ".join(done.stderr.split())
    assert done.returncode
    assert f"{SENTENCE} This system is {name}." in text
    assert "compiler" not in text


def installed_elsewhere(folder: Path, platform: str) -> tuple[int, str, list[str]]:
    """Exit status, last line and wheels of the build from a source archive, which pip runs."""
    (folder / "src" / "headrace").mkdir(parents=True)
    for name in ("CMakeLists.txt", "README.md", "LICENSE", "pyproject.toml", "src/headrace/__init__.py"):
        shutil.copyfile(ROOT / name, folder / name)
    name = SYSTEMS.get(platform, "Linux")
    env = os.environ | {"CMAKE_ARGS": f"-DCMAKE_SYSTEM_NAME={name}", "CXX": "/bin/false", "PATH": tools()}
    words = [sys.executable, "-c", BUILD, platform]
    done = subprocess.run(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout.strip().splitlines()[-1], [path.name for path in folder.glob("out/*.whl")]


@pytest.mark.parametrize("platform", SYSTEMS)
def test_an_install_from_source_elsewhere_ends_with_the_sentence(platform: str, tmp_path: Path) -> None:
    assert installed_elsewhere(tmp_path, platform) == (1, SENTENCE, [])


def test_control_an_install_from_source_on_linux_goes_on_without_kernels(tmp_path: Path) -> None:
    status, line, wheels = installed_elsewhere(tmp_path, "linux")
    assert (status, wheels) == (0, ["headrace-0.1.0-py3-none-any.whl"])
    assert SENTENCE not in line
