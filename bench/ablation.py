"""`python -m bench.ablation MODEL NAME`: runs `headrace bench ablate MODEL`, and keeps what it measured.

Writes bench/results/ablate-NAME.json (with commit, machine and load, by `bench.record`) and the picture
docs/figures/ablate-NAME.svg, and puts the tables between the lines `<!-- ablate-NAME -->` and `<!-- end -->` of
docs/performance.md. Flags of `headrace bench ablate` follow after `--`. With --page the page and the picture are made
again from what is recorded.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.record import RESULTS
from bench.tied import tied
from headrace.cli.bench.ablation_text import markdown, notes, plot

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"


def section(record: dict[str, Any], name: str) -> str:
    """Return what stands between the two marks of the page."""
    cpu, result = record["host"]["cpu"], record["result"]
    where = (
        f"`{record['command']}` on {cpu['cores_allowed']} cores of {cpu['name']}, commit {record['commit']}, "
        f"{record['date']}, load {record['load_before']:.2f} before it began; medians of {result['rounds']} rounds."
    )
    picture = f"![Tokens per second by rung, and what each is worth in the whole](figures/ablate-{name}.svg)"
    listed = [f"- {line}" for line in notes(result)]
    return "\n".join(["", where, "", picture, "", *markdown(result), *listed, ""])


def with_section(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the marks of `name`. Raises ValueError if they are not there."""
    marks = re.compile(rf"(<!-- ablate-{re.escape(name)} -->\n).*?(<!-- end -->)", re.S)
    if not marks.search(page):
        raise ValueError(f"{PAGE.name} has no lines <!-- ablate-{name} --> and <!-- end -->")
    return marks.sub(lambda match: match.group(1) + text + match.group(2), page)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    parser.add_argument("model", help="as headrace bench ablate takes it")
    parser.add_argument("name", help="of the result, the picture and the marks on the page")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("flags", nargs="*", help="of headrace bench ablate, after --")
    args = parser.parse_args()
    with_section(PAGE.read_text(encoding="utf-8"), args.name, "")
    if not args.page:
        command = ["headrace", "bench", "ablate", args.model, *args.flags, "--json"]
        subprocess.run(tied([sys.executable, "-m", "bench.record", f"ablate-{args.name}", "--", *command]), check=True)
    record = json.loads((RESULTS / f"ablate-{args.name}.json").read_text(encoding="utf-8"))
    plot(record["result"], ROOT / "docs" / "figures" / f"ablate-{args.name}.svg", f"commit {record['commit']}")
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), args.name, section(record, args.name)), "utf-8")


if __name__ == "__main__":
    main()
