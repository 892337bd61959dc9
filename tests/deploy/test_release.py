"""The release: its workflow names what exists and may do little, and the files that name the version agree."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
from tests.laws.rules import ROOT

yaml = pytest.importorskip("yaml")
WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
WRITES = {
    "publish-index": {"id-token"},
    "publish-image": {"packages", "id-token", "attestations"},
    "publish-release": {"contents", "id-token", "attestations"},
}
"""What each job may write; a job that is not named may write nothing."""
RIGHTS_OF_BUILDS = {"contents": "read"}
TODAY = "2026-12-01"


def jobs(text: str) -> dict[str, dict[str, Any]]:
    by_name: dict[str, dict[str, Any]] = yaml.safe_load(text)["jobs"]
    return by_name


def scripts(text: str) -> str:
    return "\n".join(step.get("run", "") for job in jobs(text).values() for step in job["steps"])


def missing(text: str) -> list[str]:
    """Targets of make, programs of the repository and needed jobs that the workflow names, and that are not there."""
    targets = set(re.findall(r"(?m)^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8")))
    names = [f"make {name}" for name in re.findall(r"\bmake ([\w-]+)", scripts(text)) if name not in targets]
    names += [name for name in re.findall(r"\bpython3? ([\w/]+\.py)", scripts(text)) if not (ROOT / name).is_file()]
    needs = {name for job in jobs(text).values() for name in job.get("needs", [])}
    return names + sorted(needs - set(jobs(text)))


def loose(text: str) -> list[str]:
    """Actions that are not named by a commit and its version, and those that are named by two."""
    uses = re.findall(r"(?m)uses: (\S+)(.*)$", text)
    names = [
        name for name, rest in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) or not re.match(r" # v\d", rest)
    ]
    commits: dict[str, set[str]] = {}
    for name, rest in uses:
        commits.setdefault(name.partition("@")[0], set()).add(f"{name.partition('@')[2]}{rest}")
    return names + [f"{name} twice" for name, versions in commits.items() if len(versions) > 1]


def rights(text: str) -> list[str]:
    """Jobs that may write more than they should, run for other events than a tag with it, or build with it."""
    broken = [] if yaml.safe_load(text)["permissions"] == {} else ["all"]
    for name, job in jobs(text).items():
        writes = {right for right, access in job["permissions"].items() if access != "read"}
        if writes != WRITES.get(name, set()) or not (writes or job["permissions"] == RIGHTS_OF_BUILDS):
            broken.append(f"{name} has {job['permissions']}")
        if writes and (
            not job.get("if", "").startswith("github.ref_type == 'tag'") or job.get("environment") != "release"
        ):
            broken.append(f"{name} writes without a tag or an agreement")
        if writes and any("make " in step.get("run", "") for step in job["steps"]):
            broken.append(f"{name} builds")
        if not job.get("timeout-minutes"):
            broken.append(f"{name} has no bound on its time")
        for step in job["steps"]:
            if "checkout" in step.get("uses", "") and step.get("with", {}).get("persist-credentials") is not False:
                broken.append(f"{name} keeps the credentials of the checkout")
            # Text of an event in a script is a script of a stranger.
            if "${{" in step.get("run", ""):
                broken.append(f"{name} puts an expression into a script")
    return broken


def test_the_workflow_names_what_exists() -> None:
    assert missing(WORKFLOW) == []
    assert {"make wheel", "make image"} <= set(re.findall(r"make [a-z]+", scripts(WORKFLOW)))
    wrong = WORKFLOW.replace("make wheel", "make wheels").replace("supply/release.py", "supply/releases.py")
    assert missing(wrong)[:2] == ["make wheels", "supply/releases.py"]
    assert missing(WORKFLOW.replace("needs: [wheels, image]", "needs: [wheel, image]")) == ["wheel"]


def test_actions_are_named_by_commits_in_one_version() -> None:
    assert loose(WORKFLOW) == []
    assert len(re.findall(r"uses: ", WORKFLOW)) > 8
    assert loose(re.sub(r"actions/attest-sbom@\S+", "actions/attest-sbom@v3", WORKFLOW, count=1)) == [
        "actions/attest-sbom@v3",
        "actions/attest-sbom twice",
    ]
    assert loose(re.sub(" # v5.0.1", "", WORKFLOW, count=1)) == [
        "actions/checkout@93cb6efe18208431cddfb8368fd83d5badbf9bfd",
        "actions/checkout twice",
    ]


def test_no_job_has_more_rights_than_it_needs() -> None:
    assert rights(WORKFLOW) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("permissions: {}", "permissions: write-all", "all"),
        ("      contents: read", "      contents: write", "wheels has"),
        ("      id-token: write # the index", "      contents: write # the index", "publish-index has"),
        ("    environment: release\n", "", "publish-index writes without"),
        ("\n    if: github.ref_type == 'tag'\n", "\n", "publish-index writes without"),
        ("run: mkdir packages &&", "run: make wheel &&", "publish-index builds"),
        ("    timeout-minutes: 90\n", "", "wheels has no bound"),
        ("          persist-credentials: false\n", "          fetch-depth: 1\n", "wheels keeps"),
        ('"$GITHUB_REF_NAME"\n', "${{ github.ref_name }}\n", "wheels puts"),
    ],
)
def test_control_a_right_too_many_is_noticed(old: str, new: str, fault: str) -> None:
    assert old in WORKFLOW
    assert any(line.startswith(fault) for line in rights(WORKFLOW.replace(old, new, 1)))


def test_the_workflow_builds_for_every_python_of_the_lock(release: dict[str, ModuleType]) -> None:
    assert tuple(yaml.safe_load(WORKFLOW)["env"]["PYTHONS"].split()) == release["lock"].PYTHONS
    machines = [entry["machine"] for entry in jobs(WORKFLOW)["wheels"]["strategy"]["matrix"]["include"]]
    assert tuple(machines) == release["lock"].MACHINES


# -- the version -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def release() -> Iterator[dict[str, ModuleType]]:
    """The programs as modules, by name."""
    names = ("lock", "release")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "supply"))
        yield {name: __import__(name) for name in names}
        for name in names:
            sys.modules.pop(name)


@pytest.fixture
def texts(release: dict[str, ModuleType]) -> dict[str, str]:
    """The files that name the version, as they are on the day of the release."""
    by_name = {name: (ROOT / name).read_text(encoding="utf-8") for name in release["release"].FILES}
    by_name["CHANGELOG.md"] = (
        f"# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - {TODAY}\n\n### Added\n\n- All.\n\n## [0.0.1]\n"
    )
    by_name["CITATION.cff"] = (
        re.sub("(?m)^date-released: .*\n", "", by_name["CITATION.cff"]) + f"date-released: {TODAY}\n"
    )
    return by_name


def test_files_agree_on_the_day_of_the_release(release: dict[str, ModuleType], texts: dict[str, str]) -> None:
    assert release["release"].faults("v0.1.0", texts) == []
    assert release["release"].notes(texts["CHANGELOG.md"], "0.1.0") == "### Added\n\n- All."


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [
        ("pyproject.toml", 'version = "0.1.0"', 'version = "0.1.1"', "pyproject.toml has version 0.1.1"),
        ("src/headrace/__init__.py", '"0.1.0"', '"0.2.0"', "src/headrace/__init__.py has version 0.2.0"),
        ("CITATION.cff", "version: 0.1.0", "version: 0.1.2", "CITATION.cff has version 0.1.2"),
        ("CITATION.cff", f"date-released: {TODAY}", "", "CITATION.cff has date-released none"),
        ("CHANGELOG.md", "[0.1.0]", "[0.1.1]", "CHANGELOG.md has no line"),
        ("CHANGELOG.md", "### Added\n\n- All.\n", "", "CHANGELOG.md says nothing"),
        ("README.md", "headrace-0.1.0", "headrace-0.0.9", "README.md names headrace 0.0.9"),
        (
            "deploy/kubernetes/headrace.yaml",
            "headrace:0.1.0",
            "headrace:0.3.0",
            "deploy/kubernetes/headrace.yaml names",
        ),
    ],
)
def test_control_another_version_is_named(
    release: dict[str, ModuleType], texts: Mapping[str, str], name: str, old: str, new: str, fault: str
) -> None:
    assert old in texts[name]
    lines = release["release"].faults("v0.1.0", {**texts, name: texts[name].replace(old, new)})
    assert any(line.startswith(fault) for line in lines), lines


@pytest.mark.parametrize("tag", ["0.1.0", "v0.1", "v0.1.0rc1", ""])
def test_a_tag_of_another_form_is_refused(release: dict[str, ModuleType], texts: dict[str, str], tag: str) -> None:
    assert release["release"].faults(tag, texts) == [
        f"the tag is {tag!r}; it must be v and three numbers, as in v0.1.0"
    ]


def test_the_changelog_has_a_place_for_the_next_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"(?m)^## \[Unreleased\]$", text)
    kinds = set(re.findall(r"(?m)^### (.*)$", text))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
