"""`python docs/labs/pages.py [NAME ...]`: the pages and pictures of the labs of the engine, made by `headrace lab`.

Writes NAME.md and figures/lab-NAME.svg. matplotlib is a dev dependency. Counts are the same on every machine; times are
those of the machine that runs this.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from headrace.labs import base, catalogue

HERE = Path(__file__).parent


def host() -> str:
    """What was measured on, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    where = f"{os.cpu_count()} cores of {cpu}, the built-in model"
    return f"Made by `python docs/labs/pages.py` on {where}. Times are of one run beside other work; counts are exact."


def main(names: list[str]) -> None:
    for name in names or list(catalogue.LABS):
        lab = catalogue.run(name, "builtin")
        base.plot(lab, HERE / "figures" / f"lab-{name}.svg")
        (HERE / f"lab-{name}.md").write_text(base.page_of(lab, host()), encoding="utf-8")
        print(f"lab-{name}.md")


if __name__ == "__main__":
    main(sys.argv[1:])
