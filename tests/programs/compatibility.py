"""What users of other engines look for, and the tests that show it: the table of docs/compatibility.md.

`python -m tests.programs.compatibility docs/compatibility.md` (`make compatibility`) runs every test that is named here
and writes the page with what came out; with `--keep` (`make docs`) the results of rows that did not change are kept and
nothing is run, with `--again` only the tests of rows that failed or changed are. `tests/laws/test_compatibility.py`
holds names and page to this table.
"""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.clients import page as clients
from tests.programs import dialects
from tests.programs.compatibility_models import ENCODERS, MODELS, RULES, VECTORS
from tests.programs.compatibility_pictures import TOWERS
from tests.programs.compatibility_rows import APIS, DECODING, FILES

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "Models": MODELS,
    "Encoders": ENCODERS,
    "Pictures": TOWERS,
    "Decoding": DECODING,
    "APIs and operation": (*VECTORS, *APIS),
}

HEAD = """# What works

What users of vLLM, llama-server, Ollama and the hosted APIs look for, and the tests that show it here. Each API is
tested with its own client library (openai {openai}, anthropic {anthropic}, ollama {ollama}) against a live server;
llama-server has none, and is tested over HTTP. Written by `make compatibility`, which runs the tests named here; a
test fails when the page is stale. [How to serve](howto-serve.md) has the base URLs.
"""


def node_id(name: str) -> str:
    """pytest's name of a test of the table."""
    file, _, test = name.partition(":")
    return f"{FILES[file]}::{test}"


def link(name: str) -> str:
    """A test of the table as a link to its file."""
    file, _, test = name.partition(":")
    return f"[{test}](../{FILES[file]})"


def all_tests() -> list[str]:
    """Every test that is named, once."""
    return list(dict.fromkeys(name for rows in TABLES.values() for row in rows for name in row.tests))


def missing_tests(names: list[str]) -> list[str]:
    """Those that are no test function of their file."""
    result: dict[str, set[str]] = {}
    for file in {name.partition(":")[0] for name in names}:
        tree = ast.parse((ROOT / FILES[file]).read_text(encoding="utf-8"))
        result[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [name for name in names if name.partition(":")[2] not in result[name.partition(":")[0]]]


def page(results: dict[str, str]) -> str:
    """The page; `results` says what came of each test."""
    return tables(results) + dialects.section() + clients.section(clients.load())


def tables(results: dict[str, str]) -> str:
    """The page less the sections on dialects and clients."""
    pins = dict(re.findall(r"^(\S+?)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    text = HEAD.format(**{name: pins[name] for name in ("openai", "anthropic", "ollama")})
    for title, rows in TABLES.items():
        text += f"\n## {title}\n\n"
        if rows is MODELS:
            text += "The tests of most rows are:\n\n"
            text += "".join(f"- *{word}*, {link(name)}: {meaning}\n" for name, (word, meaning) in RULES.items()) + "\n"
        text += "| feature | works | how | tests | result |\n|---|---|---|---|---|\n"
        for row in rows:
            links = ", ".join(RULES[name][0] if name in RULES else link(name) for name in row.tests)
            result = "; ".join(dict.fromkeys(results.get(name, "not run") for name in row.tests))
            text += f"| {row.feature} | {row.works} | {row.how} | {links} | {result} |\n"
    return text


def without_results(text: str) -> str:
    """A page less its last column, for comparison."""
    return re.sub(r"\| [^|\n]* \|$", "|", text, flags=re.MULTILINE)


def run(names: list[str]) -> dict[str, str]:
    """Run the tests: "passed", "skipped", or "FAILED" if any of a test's cases did."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ids = [node_id(name) for name in names]
        subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *ids], cwd=ROOT)
        outcomes: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        for case in ET.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "FAILED" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            outcomes[case.get("classname", ""), case.get("name", "").partition("[")[0]].add(outcome)
    result = {}
    for name in names:
        file, _, test = node_id(name).partition("::")
        seen = outcomes[file.removesuffix(".py").replace("/", "."), test]
        result[name] = next((each for each in ("FAILED", "passed", "skipped") if each in seen), "not run")
    return result


def with_results_of(text: str, old: str) -> str:
    """A page with the results that an older one has for the same rows."""
    known = {without_results(line): line for line in old.splitlines()}
    return "".join(known.get(without_results(line), line) + "\n" for line in text.splitlines())


def settled(text: str) -> str:
    """The lines of a page that need no other run."""
    return "\n".join(line for line in text.splitlines() if "FAILED" not in line and "not run" not in line)


def open_tests(text: str) -> list[str]:
    """The tests of the rows that a page does not have as settled."""
    known = {without_results(line) for line in settled(text).splitlines()}
    tests = {row.feature: row.tests for rows in TABLES.values() for row in rows}
    changed = [line.split(" | ")[0] for line in tables({}).splitlines() if without_results(line) not in known]
    return list(dict.fromkeys(name for cell in changed for name in tests.get(cell.removeprefix("| "), ())))


def write_kept(target: Path) -> None:
    """Write the page with the results that it has for rows that did not change."""
    with_results = with_results_of(tables({}), target.read_text(encoding="utf-8"))
    target.write_text(with_results + dialects.section() + clients.section(clients.load()), encoding="utf-8")


def main() -> int:
    target = Path(sys.argv[1])
    if "--keep" in sys.argv:
        write_kept(target)
        return 0
    text = target.read_text(encoding="utf-8") if "--again" in sys.argv else ""
    results = run(open_tests(text))
    fresh = with_results_of(tables(results), settled(text))
    target.write_text(fresh + dialects.section() + clients.section(clients.load()), encoding="utf-8")
    counts = collections.Counter(results.values())
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return 1 if counts["FAILED"] or counts["not run"] else 0


if __name__ == "__main__":
    sys.exit(main())
