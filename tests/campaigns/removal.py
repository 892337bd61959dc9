"""`Removal`: the control of a row of docs/security.md or docs/reliability.md, as a snippet of the code.

`tests.campaigns.rows` replaces it by what is there without the control, and the row's own test must fail.
"""

from __future__ import annotations

from typing import NamedTuple

SRC = "src/headrace/"


class Removal(NamedTuple):
    """`original` stands once in `file`; `test` is one that the row names, as path::name below tests/."""

    row: str
    file: str
    original: str
    replacement: str
    test: str
