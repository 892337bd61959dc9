"""`python supply/audit.py PIP_AUDIT [ARGUMENT ...]` asks pip-audit for known vulnerabilities of what requirements.lock
names, and says of how many packages it could know.

pip-audit calls it a success when it could look up nothing. Exit status here: 0 if every package was looked up and none
is known to be vulnerable, 1 if one is, 2 if some could not be looked up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from sbom import locked


def verdict(told: dict[str, Any], names: set[str]) -> tuple[int, list[str]]:
    """Exit status and lines, from pip-audit's JSON, for packages that should be in it."""
    found = {package["name"]: package for package in told["dependencies"]}
    known = {name for name, package in found.items() if "skip_reason" not in package}
    lines = [
        f"{name} {package['version']}: {hole['id']} {', '.join(hole.get('aliases', ()))}; mended in "
        f"{', '.join(hole['fix_versions']) or 'no version'}"
        for name, package in found.items()
        for hole in package.get("vulns", ())
    ]
    missing = sorted(names - known)
    lines.append(
        f"{len(names & known)} of {len(names)} packages were looked up, {len(lines)} vulnerabilities are known"
    )
    if missing:
        lines.append(f"NOT LOOKED UP, so nothing is known of them: {', '.join(missing)}")
    holes = any(package.get("vulns") for package in found.values())
    return 1 if holes else 2 if missing else 0, lines


def main(command: list[str]) -> int:
    versions = {name: version for name, (version, _) in locked().items()}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in versions.items())
        file.flush()
        done = subprocess.run(
            [*command, "--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off", "-r", file.name],
            capture_output=True,
            text=True,
        )
    try:
        told = json.loads(done.stdout)
    except ValueError:
        print(done.stderr.strip()[-2000:], file=sys.stderr)
        told = {"dependencies": []}
    status, lines = verdict(told, set(versions))
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
