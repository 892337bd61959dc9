"""A real Prometheus with the configuration of `deploy/` scrapes a real server, and each panel has data."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from bench.tied import tied
from tests.support.serving import free_port, serve

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TARGET, KEY_FILE = "headrace:8000", "/run/secrets/metrics_key"
KEYS = '[alice]\nkey = "key-of-alice"\n\n[monitor]\nkey = "key-of-monitor"\nclasses = ["metrics"]\n'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed"),
]


def configuration(server: str, key_file: Path) -> str:
    """`deploy/prometheus.yml` for a server of this machine, with a shorter interval and a job without the key."""
    text = (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
    assert TARGET in text
    assert KEY_FILE in text
    config = yaml.safe_load(text.replace(TARGET, server).replace(KEY_FILE, str(key_file)))
    config["global"]["scrape_interval"] = "1s"
    [job] = config["scrape_configs"]
    config["scrape_configs"].append({"job_name": "no key", "static_configs": job["static_configs"]})
    return yaml.safe_dump(config)


@contextlib.contextmanager
def prometheus(folder: Path, config: str) -> Iterator[Callable[..., Any]]:
    """A function that returns the data of a path of Prometheus' API."""
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
    process = subprocess.Popen(tied([*command, f"--web.listen-address={address}"]), cwd=folder)

    def get(path: str, **parameters: str) -> Any:
        reply = httpx.get(f"http://{address}/api/v1/{path}", params=parameters, timeout=240)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]

    def answers() -> bool:
        assert process.poll() is None, f"prometheus ended with {process.returncode}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://{address}/-/ready", timeout=240).status_code == 200
        return False

    try:
        wait(answers, "prometheus is not ready")
        yield get
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait(condition: Callable[[], bool], message: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.2)


def empty(dashboard: dict[str, Any], get: Callable[..., Any]) -> list[str]:
    """Expressions of the panels for which Prometheus has no sample, or one that is not a number."""
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]

    def values(expression: str) -> list[float]:
        result = get("query", query=expression.replace("$__rate_interval", "5m"))["result"]
        return [float(sample["value"][1]) for sample in result]

    results = {expression: values(expression) for expression in expressions}
    return [one for one, outcome in results.items() if not outcome or any(math.isnan(value) for value in outcome)]


def test_prometheus_has_data_for_every_panel(tmp_path: Path) -> None:
    keys, key = tmp_path / "keys.toml", tmp_path / "metrics.key"
    keys.write_text(KEYS, encoding="utf-8")
    keys.chmod(0o600)
    key.write_text("key-of-monitor\n", encoding="utf-8")
    text = (DEPLOY / "grafana" / "headrace.json").read_text(encoding="utf-8")
    dashboard = json.loads(text)
    with (
        serve("builtin", "--api-key-file", str(keys), key="key-of-monitor") as served,
        prometheus(tmp_path, configuration(urlsplit(served.url).netloc, key)) as get,
    ):

        def health() -> dict[str, tuple[str, str]]:
            targets = get("targets")["activeTargets"]
            return {one["labels"]["job"]: (one["health"], one["lastError"]) for one in targets}

        def complete_and_look() -> bool:
            body = {"model": "builtin", "prompt": "Once upon a time " * 8, "max_tokens": 4}
            headers = {"authorization": "Bearer key-of-alice"}
            reply = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=240)
            assert reply.status_code == 200, reply.text
            return empty(dashboard, get) == []

        # The job without the key is the control.
        refused = ("down", "server returned HTTP status 401 Unauthorized")
        wait(lambda: health() == {"headrace": ("up", ""), "no key": refused}, "the scrapes are others")
        # A rate needs two scrapes with a change between them.
        wait(complete_and_look, "panels without data")
        # The control: a name with a wrong letter is noticed.
        wrong = json.loads(text.replace("num_preemptions_total", "num_preemption_total"))
        assert empty(wrong, get) == ["sum(rate(headrace:num_preemption_total[$__rate_interval]))"]
