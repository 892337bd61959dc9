"""The process of a rank that has room for few rows of a gather: its last argument is the number of its socket."""

from __future__ import annotations

import sys

from headrace.engine import rank, ranks

SLOT_BYTES = 2**14

if __name__ == "__main__":
    ranks.SLOT_BYTES = rank.SLOT_BYTES = SLOT_BYTES
    sys.exit(rank.main(int(sys.argv[1])))
