"""`headrace doctor`'s verdicts: what can be wrong is noticed, with a remedy, and a sound machine is sound."""

from __future__ import annotations

import copy
import json
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import doctor
from headrace.cli import checkup
from headrace.cli.checkup import Check, check_all, is_bad

SOUND: dict[str, Any] = {
    "cpu": {"cores_allowed": 4, "load_1min": 0.1},
    "memory": {"total_bytes": 2**34, "available_bytes": 2**33},
    "native": {"isas": ["scalar", "avx2"], "threads": 4},
    "backends": {"models": ["llama", "qwen2"]},
    "model": {"name": "m", "model_type": "llama", "weight_bytes": 2**30, "num_parameters": 5, "tokenizer": True},
    "hub": {"offline": False},
}


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    for name in ("HEADRACE_ISA", "HEADRACE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(checkup, "CGROUP", tmp_path)
    monkeypatch.setattr(checkup, "GOVERNOR", tmp_path / "governor")
    monkeypatch.setattr(
        checkup.resource, "getrlimit", lambda what: (65536, 65536) if what == resource.RLIMIT_NOFILE else (-1, -1)
    )
    monkeypatch.setattr("psutil.swap_memory", lambda: type("Swap", (), {"total": 0, "used": 0}))


def found(name: str, **changed: dict[str, Any]) -> Check:
    report = copy.deepcopy(SOUND)
    for section, values in changed.items():
        report[section] = report[section] | values
    return next(check for check in check_all(report, "127.0.0.1", 0) if check.name == name)


def test_a_sound_machine_is_sound() -> None:
    checks = check_all(SOUND, "127.0.0.1", 0)
    assert [check for check in checks if check.verdict != "ok"] == []
    assert {check.name for check in checks} >= {"native kernels", "memory", "model", "port", "open files", "disk"}
    assert not is_bad(checks)


@pytest.mark.parametrize(
    ("name", "verdict", "changed", "advice"),
    [
        ("native kernels", "bad", {"native": {"problem": "no native kernels"}}, "compiler"),
        (
            "native kernels",
            "warn",
            {"native": {"problem": "no native kernels"}, "backends": {"default": "cuda"}},
            "--backend cpu: install a C++17",
        ),
        ("instruction set", "warn", {"native": {"isas": ["scalar"]}}, "AVX2"),
        ("load", "warn", {"cpu": {"load_1min": 3.5}}, "top"),
        ("memory", "bad", {"model": {"weight_bytes": 2**34}}, "--quantization"),
        ("memory", "warn", {"memory": {"available_bytes": 2**30 + 5}}, "--kv-cache-memory-bytes"),
        ("memory", "bad", {"memory": {"cgroup_limit_bytes": 2**29}}, "--quantization"),
        ("model", "bad", {"model": {"problem": "no such directory"}}, "directory"),
        ("model", "bad", {"model": {"model_type": "gpt5"}}, "llama, qwen2"),
        ("model", "bad", {"model": {"weight_bytes": 0}}, "safetensors"),
        ("tokenizer", "warn", {"model": {"tokenizer": False}}, "--tokenizer"),
        ("HF_HUB_OFFLINE", "warn", {"hub": {"offline": True}, "model": {"problem": "none"}}, "fetched"),
    ],
)
def test_what_the_report_shows_is_judged(name: str, verdict: str, changed: dict[str, Any], advice: str) -> None:
    check = found(name, **changed)
    assert check.verdict == verdict
    assert advice in check.advice
    assert found(name).verdict == "ok" if name != "HF_HUB_OFFLINE" else True


def test_quotas_frequency_and_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "governor").write_text("powersave\n")
    assert "--num-threads 1" in found("processors").advice
    assert found("frequency").verdict == "warn"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert found("processors").verdict == "ok"
    monkeypatch.setenv("HEADRACE_DEBUG", "2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("HEADRACE_ISA", "avx2")
    assert {found(name).verdict for name in ("HEADRACE_DEBUG", "OMP_WAIT_POLICY", "instruction set")} == {"warn"}
    monkeypatch.setenv("HEADRACE_DEBUG", "much")
    assert "could not be found out" in found("settings").found


def test_limits_swap_and_crashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkup.resource, "getrlimit", lambda what: (100, 100))
    assert (found("open files").verdict, found("processes").verdict) == ("bad", "bad")
    assert "unlimited" in found("address space").advice
    assert "LimitNOFILE" in found("open files").advice
    monkeypatch.setattr(checkup.resource, "getrlimit", lambda what: (100, 4096))
    check = found("open files")
    assert (check.verdict, check.found) == ("ok", "4096 open files, 4032 clients")
    monkeypatch.setattr(checkup.resource, "getrlimit", lambda what: (100, 100))
    monkeypatch.setattr("psutil.swap_memory", lambda: type("Swap", (), {"total": 2**32, "used": 2**31}))
    assert found("swap").verdict == "warn"
    folder = tmp_path / ".cache" / "headrace" / "crash-reports"
    folder.mkdir(parents=True)
    report = folder / "crash-1.json"
    report.write_text("{}")
    assert str(report) in found("crashes").advice
    os.utime(report, (time.time() - 1e6,) * 2)
    assert found("crashes").verdict == "ok"


def test_a_port_that_is_taken_or_is_no_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        [check] = checkup.listening("127.0.0.1", server.getsockname()[1])
    assert check.verdict == "warn"
    assert "--port" in check.advice
    [check] = checkup.listening("192.0.2.1", 8000)
    assert "--host" in check.advice

    def refused(self: object, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    [check] = checkup.listening("127.0.0.1", 80)
    assert (check.verdict, "1024" in check.advice) == ("bad", True)


def test_the_verdicts_are_printed_and_decide_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli.main import main

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["headrace", "doctor", *words, "--port", "0"])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    monkeypatch.setattr(doctor, "examine", lambda model: copy.deepcopy(SOUND))
    assert run() == 0
    printed = capsys.readouterr().out
    assert "ok   model: m: llama" in printed
    monkeypatch.setattr(doctor, "examine", lambda model: SOUND | {"native": {"problem": "no compiler"}})
    assert run() == 1
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0] == "bad  native kernels: no compiler"
    assert last[1].startswith("     -> install a C++17 compiler")
    assert run("--json") == 1
    assert {"name": "native kernels", "verdict": "bad"}.items() <= json.loads(capsys.readouterr().out)["checks"][
        0
    ].items()
