"""The laws of the web page's JavaScript and CSS, as `rules` has those of the Python sources."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.laws import rules, sizes

# JavaScript and CSS of the page, without the libraries in vendor/.
MAX_PAGE_CODE_LINES = 3_500


def page_files() -> dict[str, str]:
    """Names and texts of the page's JavaScript and CSS, without the libraries."""
    folder = rules.PACKAGE / "serve" / "inspector"
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".js", ".css"))
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path.read_text(encoding="utf-8") for name, path in names.items() if not name.startswith("vendor/")}


def page_violations(files: Mapping[str, str]) -> list[str]:
    """Files of the page that are too long, and the page if it has too many lines with code."""
    lines = {name: sizes.num_lines(text) for name, text in files.items()}
    broken = [f"{name}: {num} lines" for name, num in lines.items() if num > sizes.MAX_FILE_LINES]
    num_code = sum(num_page_code_lines(text) for text in files.values())
    return broken + ([f"the page: {num_code} lines with code"] if num_code > MAX_PAGE_CODE_LINES else [])


def num_page_code_lines(text: str) -> int:
    """Lines of JavaScript or CSS that hold more than blanks and comments."""
    without = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return sum(1 for line in without.splitlines() if line.strip() and not line.strip().startswith("//"))
