"""The native core stays small, and its ISA units keep to what may be compiled several times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = {path.relative_to(CSRC).as_posix(): path.read_text() for path in sorted(CSRC.rglob("*.[ch]*"))}
MAX_LINES, MAX_FILE_LINES = 10_100, 500
# Plain C headers and the intrinsics. Those of the C++ library hold templates, and those end up in anybody's code.
ALLOWED = re.compile(r"(?:arm_neon|assert|errno|float|immintrin|limits|math|stddef|stdint|string|unistd)\.h")


def wrong_includes(source: str) -> list[str]:
    return [name for name in re.findall(r"#include <(.*)>", source) if not ALLOWED.fullmatch(name)]


def test_the_core_can_be_read_in_a_day() -> None:
    assert {"bind.cpp", "tape.cpp", "team.cpp", "dispatch.cpp", "include/kernels.h"} <= set(SOURCES)
    lines = {name: text.count("\n") for name, text in SOURCES.items()}
    assert sum(lines.values()) <= MAX_LINES
    assert not {name: num for name, num in lines.items() if num > MAX_FILE_LINES}


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith(("generic/", "isa/"))])
def test_an_isa_unit_uses_no_c_plus_plus_library(name: str) -> None:
    assert not wrong_includes(SOURCES[name])


def test_a_header_of_the_library_is_noticed() -> None:
    assert wrong_includes("#include <vector>\n#include <stdint.h>\n") == ["vector"]
