"""`python supply/sbom.py` prints a bill of materials of what is installed (CycloneDX 1.6, JSON).

Components are the packages of requirements.lock as they are in this environment, with their licences and the hashes of
the lock, and what each needs; the JavaScript libraries that the page holds; and the package that is linked into the
native core. The same packages at the same commit give the same bytes.
"""

from __future__ import annotations

import datetime
import json
import re
import uuid
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from versions import Vendored, epoch, locked, vendored

LINKED = "nanobind"
"""The package of requirements-build.lock whose code is in the native core."""


def purl(name: str, version: str, index: str = "pypi") -> str:
    return f"pkg:{index}/{name}@{version}"


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


def library(package: Vendored) -> dict[str, Any]:
    """One library of the page."""
    ref = purl(package.name, package.version, "npm")
    return {
        "type": "library",
        "bom-ref": ref,
        "name": package.name,
        "version": package.version,
        "purl": ref,
        "licenses": [{"license": {"id": package.licence}}],
        "components": [
            {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}
            for name, digest in package.files.items()
        ],
    }


def needs(name: str, known: dict[str, str]) -> list[str]:
    """What a package needs of those in the bill."""
    wanted = {re.sub(r"[-_.]+", "-", Requirement(text).name).lower() for text in metadata.requires(name) or ()}
    return sorted(purl(other, known[other]) for other in wanted & set(known))


def bill() -> dict[str, Any]:
    """The whole document."""
    packages = locked()
    versions = {name: version for name, (version, _) in packages.items()}
    parts = [library(package) for package in vendored()]
    parts.append(component(LINKED, *locked("requirements-build.lock")[LINKED]))
    own = metadata.version("headrace")
    root = {"type": "application", "bom-ref": purl("headrace", own), "name": "headrace", "version": own}
    tree = [{"ref": purl(name, versions[name]), "dependsOn": needs(name, versions)} for name in versions]
    tree += [{"ref": part["bom-ref"], "dependsOn": []} for part in parts]
    own_needs = needs("headrace", versions) + [part["bom-ref"] for part in parts]
    whole = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(int(epoch()), datetime.UTC).isoformat(),
            "component": root | {"licenses": [{"license": {"id": "Apache-2.0"}}]},
        },
        "components": [component(name, *pin) for name, pin in packages.items()] + parts,
        "dependencies": [{"ref": purl("headrace", own), "dependsOn": own_needs}, *tree],
    }
    # Another document has another number, and the same one the same.
    return whole | {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(whole))}"}


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
