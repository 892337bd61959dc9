"""`python -m tests.programs.schemas FOLDER`: the whole campaign, as one line of JSON; see `campaign`.

Fails below 90 % coverage, on a document that is not valid, and on an invalid instance that is taken for a valid one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.programs.schemas.campaign import Campaign, cases, summary

MIN_COVERAGE = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=3)
    options = parser.parse_args()
    campaign = Campaign()
    start = time.monotonic()
    result = []
    for case in cases(options.folder):
        before = time.monotonic()
        result.append(campaign.judge(case, options.documents))
        if time.monotonic() - before > 10:
            print(f"{case.name}: {time.monotonic() - before:.0f} s", file=sys.stderr)
    output = summary(result) | {"seconds": round(time.monotonic() - start, 1)}
    print(json.dumps(output, ensure_ascii=False))
    sound = (
        output["coverage"] >= MIN_COVERAGE and not output["documents_invalid"] and not output["invalid_but_accepted"]
    )
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
