"""`python supply/audit.py PIP_AUDIT [ARGUMENT ...]` asks for known vulnerabilities of what requirements.lock names and
of the JavaScript libraries of the page, and says of how many packages it could know.

pip-audit looks up the Python packages; it calls it a success when it could look up nothing. The registry of npm that
`NPM_REGISTRY` names is asked for advisories on the libraries of the page. Exit status here: 0 if every package was
looked up and none is known to be vulnerable, 1 if one is, 2 if some could not be looked up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from typing import Any

from versions import Vendored, locked, vendored

REGISTRY = "https://registry.npmjs.org"


def verdict(packages: list[dict[str, Any]], names: set[str]) -> tuple[int, list[str]]:
    """Exit status and lines, from entries of pip-audit's form, for packages that should be among them."""
    found = {package["name"]: package for package in packages}
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


def of_python(command: Sequence[str], versions: dict[str, str]) -> list[dict[str, Any]]:
    """What pip-audit knows of the packages."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in versions.items())
        file.flush()
        done = subprocess.run(
            [*command, "--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off", "-r", file.name],
            capture_output=True,
            text=True,
        )
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        print(done.stderr.strip()[-2000:], file=sys.stderr)
        return []
    return packages


def of_page(packages: Sequence[Vendored]) -> list[dict[str, Any]]:
    """The advisories of npm on the libraries of the page, in pip-audit's form; nothing where npm does not answer."""
    url = f"{os.environ.get('NPM_REGISTRY', REGISTRY).rstrip('/')}/-/npm/v1/security/advisories/bulk"
    body = json.dumps({package.name: [package.version] for package in packages}).encode()
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            advisories = json.loads(reply.read())
    except (OSError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return []
    return [
        {
            "name": f"npm:{package.name}",
            "version": package.version,
            "vulns": [
                {"id": hole["url"], "aliases": [hole["title"]], "fix_versions": []}
                for hole in advisories.get(package.name, ())
            ],
        }
        for package in packages
    ]


def main(command: list[str]) -> int:
    versions = {name: version for name, (version, _) in locked().items()}
    libraries = vendored()
    names = set(versions) | {f"npm:{package.name}" for package in libraries}
    status, lines = verdict(of_python(command, versions) + of_page(libraries), names)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
