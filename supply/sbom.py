"""`python supply/sbom.py` prints a bill of materials of what is installed (CycloneDX 1.6, JSON).

Components are the packages of requirements.lock as they are in this environment, with their licences and the hashes of
the lock, and what each needs. The same packages at the same commit give the same bytes.
"""

from __future__ import annotations

import datetime
import json
import re
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from wheel import epoch

ROOT = Path(__file__).resolve().parents[1]


def locked() -> dict[str, tuple[str, list[str]]]:
    """Version and SHA-256 hashes of each package of the lock."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        match = re.match(r"([a-z0-9-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)$", line.strip())
        if match:
            found[match[1]] = match[2], re.findall(r"sha256:([0-9a-f]{64})", match[3])
    return found


def purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def component(name: str, version: str, digests: list[str]) -> dict[str, Any]:
    """One package. Raises `SystemExit` if another version is installed."""
    about = metadata.distribution(name)
    if about.version != version:
        raise SystemExit(f"{name}: {about.version} is installed, and the lock says {version}")
    licence = about.metadata.get("License-Expression") or about.metadata.get("License") or ""
    made: dict[str, Any] = {"type": "library", "bom-ref": purl(name, version), "name": name, "version": version}
    made |= {"purl": purl(name, version), "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests]}
    if licence:
        made["licenses"] = [{"license": {"name": licence.splitlines()[0][:200]}}]
    return made


def needs(name: str, known: dict[str, str]) -> list[str]:
    """What a package needs of those in the bill."""
    wanted = {re.sub(r"[-_.]+", "-", Requirement(text).name).lower() for text in metadata.requires(name) or ()}
    return sorted(purl(other, known[other]) for other in wanted & set(known))


def bill() -> dict[str, Any]:
    """The whole document."""
    packages = locked()
    versions = {name: version for name, (version, _) in packages.items()}
    own = metadata.version("headrace")
    root = {"type": "application", "bom-ref": purl("headrace", own), "name": "headrace", "version": own}
    tree = [{"ref": purl(name, versions[name]), "dependsOn": needs(name, versions)} for name in versions]
    whole = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(int(epoch()), datetime.UTC).isoformat(),
            "component": root | {"licenses": [{"license": {"id": "Apache-2.0"}}]},
        },
        "components": [component(name, version, digests) for name, (version, digests) in packages.items()],
        "dependencies": [{"ref": purl("headrace", own), "dependsOn": needs("headrace", versions)}, *tree],
    }
    # Another document has another number, and the same one the same.
    return whole | {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(whole))}"}


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
