"""What `deploy/` holds fits the server: metrics of the dashboard, routes of the probes, flags, times and mounts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from tests.docs import pages
from tests.support import fake
from tests.support.server import Live

from headrace.engine.client import EngineClient
from headrace.engine.links import ProcessLink
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
STREAM_END_S = 5.0


def read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


# -- the dashboard -----------------------------------------------------------------------------------------------------


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def unknown_names(dashboard: dict[str, Any], exposition: str) -> set[str]:
    """Metrics of the panels that a scrape does not have."""
    names = {name for expression in expressions(dashboard) for name in re.findall(r"headrace:\w+", expression)}
    return names - set(re.findall(r"(?m)^(headrace:\w+)[{ ]", exposition))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.support.server import write_tokenizer

    tokenizer = Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    client = EngineClient(ProcessLink(EngineConfig(model="fake"), fake.command()), max_restarts=1)
    with Live(client, tokenizer, ServerConfig(api_key=["sesame"])) as live:
        yield live


def test_every_panel_shows_metrics_that_the_server_has(server: Live) -> None:
    import httpx

    reply = httpx.get(f"http://127.0.0.1:{server.port}/metrics", headers={"x-api-key": "sesame"}, timeout=240)
    dashboard = json.loads(read("grafana/headrace.json"))
    assert len(expressions(dashboard)) >= 12
    assert unknown_names(dashboard, reply.text) == set()
    # The control: a name with a wrong letter is noticed.
    wrong = json.loads(read("grafana/headrace.json").replace("generation_tokens_total", "generation_token_total"))
    assert unknown_names(wrong, reply.text) == {"headrace:generation_token_total"}
    sources = yaml.safe_load(read("grafana/datasource.yml"))["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"] for source in sources}


def test_the_probe_finds_its_key(server: Live, tmp_path: Path) -> None:
    """In a file or in the environment; without one it looks at the process alone, where a key is needed."""
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text("sesame\n")
    wrong.write_text("simsim\n")
    code = "import sys; sys.path.insert(0, 'deploy'); import probe; a = sys.argv; print(probe.probe(a[1], int(a[2])))"

    def status(path: str, port: int = server.port, **variables: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, path, str(port)],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE")} | variables,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()

    assert status("/health/ready", HEADRACE_PROBE_KEY_FILE=str(key)) == "200"
    assert status("/health/ready", HEADRACE_API_KEY="sesame other") == "200"
    assert status("/health/ready", HEADRACE_API_KEY="sesame", HEADRACE_PROBE_KEY_FILE=str(wrong)) == "401"
    assert status("/health/ready") == "200", "that of /health/live"
    assert status("/health/ready", port=1) == "0"


def test_a_command_for_other_machines_has_keys() -> None:
    def keyless(words: list[str]) -> bool:
        return "0.0.0.0" in words and not {"--api-key-file", "--generate-api-key"} & set(words)

    assert [words for words in commands() if keyless(words)] == []
    assert keyless(["serve", "builtin", "--host", "0.0.0.0"])


# -- flags, routes, times ----------------------------------------------------------------------------------------------


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(read("kubernetes/headrace.yaml")))


def container() -> dict[str, Any]:
    result: dict[str, Any] = manifests()[0]["spec"]["template"]["spec"]["containers"][0]
    return result


def unit() -> dict[str, str]:
    """The last value of each setting of the unit."""
    return dict(line.split("=", 1) for line in read("headrace.service").splitlines() if re.match(r"[A-Z]\w+=", line))


def commands() -> list[list[str]]:
    """What each way of deploying runs, after the word `headrace`."""
    compose = yaml.safe_load(read("compose.yaml"))["services"]["headrace"]["command"]
    docker = json.loads(re.findall(r"(?m)^CMD (\[.*\])$", read("Dockerfile"))[-1])
    return [compose, docker, container()["args"], unit()["ExecStart"].split()[1:]]


def test_every_command_is_one_of_headrace() -> None:
    for words in commands():
        pages.check_headrace(words)
    with pytest.raises(ValueError, match="--prot"):
        pages.check_headrace([*commands()[0], "--prot", "1"])


def short(seconds: dict[str, float], needed: float) -> list[str]:
    return [name for name, value in seconds.items() if value <= needed]


def test_every_grace_period_is_longer_than_the_drain() -> None:
    config = ServerConfig()
    needed = getattr(config, "shutdown_delay", 5.0) + config.shutdown_timeout + STREAM_END_S
    seconds = {
        "kubernetes": float(manifests()[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]),
        "compose": float(yaml.safe_load(read("compose.yaml"))["services"]["headrace"]["stop_grace_period"].rstrip("s")),
        "systemd": float(unit()["TimeoutStopSec"]),
    }
    assert short(seconds, needed) == []
    assert short(seconds | {"another": needed}, needed) == ["another"]


def wrong_probes(one: dict[str, Any]) -> list[str]:
    """Probes of a container that use another route than theirs, or give the start less than five minutes."""
    start, ready, live = one["startupProbe"], one["readinessProbe"], one["livenessProbe"]
    fit = {
        "start": start["exec"]["command"][-1] == "/health/ready",
        "time to start": start["failureThreshold"] * start["periodSeconds"] >= 300,
        "ready": ready["exec"]["command"][-1] == "/health/ready",
        "live": live["httpGet"]["path"] == "/health/live",
    }
    return [name for name, value in fit.items() if not value]


def test_probes_of_kubernetes_use_health_routes() -> None:
    assert wrong_probes(container()) == []
    text = read("kubernetes/headrace.yaml")

    def edited(old: str, new: str) -> list[str]:
        assert old in text
        manifest = next(yaml.safe_load_all(text.replace(old, new)))
        return wrong_probes(manifest["spec"]["template"]["spec"]["containers"][0])

    assert edited("path: /health/live", "path: /health/serving") == ["live"]
    assert edited("probe.py, /health/ready]", "probe.py, /health/live]") == ["start", "ready"]
    assert edited("failureThreshold: 120", "failureThreshold: 12") == ["time to start"]


def open_to_root(manifest: dict[str, Any]) -> list[str]:
    """Settings of a pod that leave its container more than it needs."""
    spec = manifest["spec"]["template"]["spec"]
    inside = spec["containers"][0]["securityContext"]
    exempt = {
        "runAsNonRoot": spec["securityContext"].get("runAsNonRoot"),
        "readOnlyRootFilesystem": inside.get("readOnlyRootFilesystem"),
        "allowPrivilegeEscalation": inside.get("allowPrivilegeEscalation") is False,
        "capabilities": inside.get("capabilities") == {"drop": ["ALL"]},
    }
    return [name for name, value in exempt.items() if not value]


def test_the_pod_is_hardened() -> None:
    assert open_to_root(manifests()[0]) == []
    text = read("kubernetes/headrace.yaml").replace("allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true")
    assert open_to_root(next(yaml.safe_load_all(text))) == ["allowPrivilegeEscalation"]


def unit_holes(settings: dict[str, str]) -> list[str]:
    expected = {"DynamicUser": "yes", "ProtectSystem": "strict", "NoNewPrivileges": "yes", "CapabilityBoundingSet": ""}
    expected |= {"PrivateTmp": "yes", "ProtectHome": "yes", "KillMode": "mixed"}
    lacking = [name for name in ("SystemCallFilter", "MemoryMax", "TasksMax") if name not in settings]
    return [name for name, value in expected.items() if settings.get(name) != value] + lacking


def test_the_unit_is_hardened() -> None:
    assert unit_holes(unit()) == []
    assert unit_holes(unit() | {"ProtectSystem": "full"}) == ["ProtectSystem"]


# -- the image ---------------------------------------------------------------------------------------------------------


def lint(text: str) -> list[str]:
    """The rules of an image that matter here, for machines without hadolint."""
    last = text[text.rindex("\nFROM ") :]
    problems = []
    if not re.search(r"(?m)^USER (?!0\b|root\b)\S+", last):
        problems.append("runs as root")
    if "HEALTHCHECK" not in last:
        problems.append("no health check")
    if re.search(r"(?m)^FROM (?!\S+:\d[\w.-]+@sha256:[0-9a-f]{64}( AS \w+)?$)", text):
        problems.append("a base image without a tag or a digest")
    if re.search(r"apt-get install(?!.*--no-install-recommends)", text):
        problems.append("recommended packages")
    installs = re.findall(r"pip (?:install|wheel) ([^&\n]+)", text)
    if not all(
        "--require-hashes" in words or "--no-index" in words or "--no-build-isolation" in words for words in installs
    ):
        problems.append("packages without hashes")
    if not re.search(r"(?m)^ENTRYPOINT \[", last):
        problems.append("a shell in front of the server, which takes no signal")
    return problems


def test_the_image() -> None:
    text = read("Dockerfile")
    assert lint(text) == []
    assert lint(re.sub(r"(?m)^USER.*\n", "", text)) == ["runs as root"]
    assert lint(text.replace("--require-hashes", "")) == ["packages without hashes"]
    assert lint(text.replace("--no-build-isolation", "")) == ["packages without hashes"]
    assert lint(re.sub("@sha256:[0-9a-f]+", "", text, count=1)) == ["a base image without a tag or a digest"]


def test_images_that_compose_takes_are_fixed_by_their_digests() -> None:
    def loose(compose: str) -> list[str]:
        images = [service["image"] for service in yaml.safe_load(compose)["services"].values() if "image" in service]
        return [image for image in images if not re.fullmatch(r"\S+:v?\d[\w.-]+@sha256:[0-9a-f]{64}", image)]

    text = read("compose.yaml")
    assert loose(text) == []
    assert loose(re.sub("@sha256:[0-9a-f]+", "", text, count=1)) == ["prom/prometheus:v3.5.0"]


def lacking(dockerfile: str, ignore: str) -> list[str]:
    """Files that the image copies, and that are not there or not sent to the builder."""
    allowed = [line[1:] for line in ignore.splitlines() if line.startswith("!")]
    names = [name for copy in re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", dockerfile) for name in copy.split()]
    return [name for name in names if not (ROOT / name).exists() or name not in allowed]


def test_files_of_the_image_are_there() -> None:
    text, ignore = read("Dockerfile"), read("Dockerfile.dockerignore")
    assert lacking(text, ignore) == []
    assert lacking(text.replace("COPY csrc csrc", "COPY crsc csrc"), ignore) == ["crsc"]
    assert lacking(text, ignore.replace("!deploy/probe.py\n", "")) == ["deploy/probe.py"]


def unlocked(dockerfile: str, lock: str) -> list[str]:
    """Interpreters of the image for which the lock has no hash of msgspec, whose wheels are for one each."""
    [msgspec] = re.findall(r"(?m)^msgspec==.*((?:\n    --hash.*)+)", lock)
    pythons = ["3.11", "3.12", "3.13", "3.14"][: msgspec.count("--hash")]
    return [python for python in re.findall(r"(?m)^FROM python:(\d+\.\d+)[\d.]*-", dockerfile) if python not in pythons]


def test_the_image_has_an_interpreter_of_the_lock() -> None:
    text, lock = read("Dockerfile"), (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert unlocked(text, lock) == []
    assert unlocked(text.replace("FROM python:3.11", "FROM python:3.15"), lock) == ["3.15", "3.15"]


def missing_mounts(compose: str) -> list[str]:
    """Files that compose mounts, and that are not there."""
    services = yaml.safe_load(compose)["services"]
    mounts = [volume.split(":")[0] for one in services.values() for volume in one.get("volumes", ()) if "./" in volume]
    return [mount for mount in mounts if not (DEPLOY / mount).is_file()]


def test_files_that_compose_mounts_are_there() -> None:
    text = read("compose.yaml")
    assert missing_mounts(text) == []
    wrong = text.replace("./prometheus.yml:", "./prometheus.yaml:").replace("./grafana/headrace.json:", "./grafana:")
    assert missing_mounts(wrong) == ["./prometheus.yaml", "./grafana"]


# -- the package -------------------------------------------------------------------------------------------------------


def test_the_floor_of_starlette() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [starlette] = [one for one in map(Requirement, needs) if one.name == "starlette"]
    assert "1.2.9" not in starlette.specifier
    assert "1.3.0" in starlette.specifier


def built_without_compiler(folder: Path, pyproject: str, settings: dict[str, str] | None = None) -> list[str]:
    """Names of the wheels that the build with pip's `settings` makes where C++ can not be compiled."""
    (folder / "src" / "headrace").mkdir(parents=True)
    (folder / "src" / "headrace" / "__init__.py").touch()
    shutil.copytree(ROOT / "src/headrace/serve/inspector", folder / "src/headrace/serve/inspector")
    for name in ("CMakeLists.txt", "README.md", "LICENSE", ".gitignore"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "pyproject.toml").write_text(pyproject)
    code = f"from scikit_build_core.build import build_wheel; build_wheel('out', {settings})"
    env = os.environ | {"CXX": "/bin/false"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    names = [path.name for path in (folder / "out").glob("*.whl")]
    assert names or "C++ compiler" in done.stdout + done.stderr
    return names


def test_without_a_compiler_the_package_installs_all_the_same(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [wheel] = built_without_compiler(tmp_path / "one", text)
    assert wheel == "headrace-0.1.0-py3-none-any.whl"
    names = set(zipfile.ZipFile(tmp_path / "one" / "out" / wheel).namelist())
    page = ("index.html", "app.js", "style.css", "vendor/preact-htm.js", "vendor/uplot.js", "vendor/LICENSE.htm")
    assert {f"headrace/serve/inspector/{name}" for name in page} <= names
    assert built_without_compiler(tmp_path / "other", text.replace('wheel.py-api = "py3"\n', "")) == []


def test_without_a_compiler_there_is_no_image_and_no_wheel_for_others(tmp_path: Path) -> None:
    # The test above is the control: without the setting the build makes a wheel without native kernels.
    builders = [(ROOT / name).read_text(encoding="utf-8") for name in ("deploy/Dockerfile", "supply/wheel.py")]
    [words, *others] = [re.findall(r"--config-settings=([\w.]+)=(\w+)", text) for text in builders]
    assert others == [words]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert built_without_compiler(tmp_path, text, dict(words)) == []


def advice(text: str) -> list[list[str]]:
    """The commands that a help text names; raises `ValueError` if headrace does not take one."""
    named = [words.split()[1:] for words in re.findall(r"`(headrace [^`]+)`", " ".join(text.split()))]
    for words in named:
        pages.check_headrace(words)
    return named


def test_headrace_without_a_command_says_what_to_do() -> None:
    command = [sys.executable, "-m", "headrace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "120"})
    text = done.stdout + done.stderr
    assert advice(text) == [["serve"], ["serve", "path/to/model"], ["doctor"]]
    with pytest.raises(ValueError, match="sreve"):
        advice(text.replace("serve path", "sreve path"))
