"""The `headrace` command, which `python -m headrace` is too. It imports the command line only after it has seen to the
signals."""

from __future__ import annotations

import sys

from headrace.serve import early_signals


def main() -> None:
    """Run the command line and leave with its exit status."""
    if sys.argv[1:2] == ["serve"]:
        early_signals.hold()
    from headrace.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
