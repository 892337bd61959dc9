"""What an engine died of is in a file, and no word, token or key of anybody's is in there."""

from __future__ import annotations

import asyncio
import itertools
import json
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.test_client import read, request
from tests.support import deadly

from headrace.engine.client import EngineClient, ProcessClient
from headrace.engine.links import ProcessLink
from headrace.engine.records import crash_reports
from headrace.engine.records.black_box import MAX_CHUNKS, NUM_SLOTS, BlackBox, StepShape
from headrace.engine.records.crash_reports import CrashReports, plain_reason
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import HeadraceError
from headrace.protocol.step import Stats
from headrace.protocol.watchdog import Watchdog

WORDS = ("xyzzy-of-a-client", "sk-secret-of-the-server", "sk-of-the-administrator", "salt-of-a-tenant")
PROMPT = [203, 151, 97, 188, 149, 211, 163]


def leaks(report: Any) -> list[str]:
    """Words that must not be in a report, and places where two tokens of the prompt follow each other."""
    text = json.dumps(report)
    words = [word for word in WORDS if word in text]
    pairs = set(itertools.pairwise(PROMPT))

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            numbers = [each for each in value if isinstance(each, int)]
            words.extend(f"tokens {pair}" for pair in itertools.pairwise(numbers) if pair in pairs)
            for each in value:
                walk(each)

    walk(report)
    return words


def die(folder: Path, kind: int) -> dict[str, Any]:
    """The report of an engine that a request has killed in mid-answer, beside another one."""
    engine = EngineConfig(model="fake", max_num_seqs=7)
    server = ServerConfig(api_key=[WORDS[1]], admin_api_key=WORDS[2], port=8123)
    client = EngineClient(ProcessLink(engine, deadly.command(0.001)))
    client.replicas[0].watchdog = Watchdog(0.5)
    client.replicas[0].reports = CrashReports(str(folder / "made" / "here"), engine, server)
    killer = request([kind, 6, *PROMPT], max_tokens=50, stop=[WORDS[0]])
    other = msgspec.structs.replace(request([*PROMPT, *PROMPT], max_tokens=300), cache_salt=WORDS[3])

    async def work() -> None:
        await client.start()
        try:
            streams = client.submit([killer]), client.submit([other])
            for ended in await asyncio.gather(*map(read, streams), return_exceptions=True):
                assert isinstance(ended, HeadraceError)
        finally:
            await client.close()

    asyncio.run(work())
    [path] = (folder / "made" / "here").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data: dict[str, Any] = json.loads(path.read_bytes())
    return data


@pytest.mark.parametrize(
    ("kind", "reason", "place"),
    [
        (deadly.KILL, "exit status -9", ""),
        (deadly.SEGV, "exit status -11", "Fatal Python error: Segmentation fault"),
        (deadly.RAISE, "RuntimeError", "in die"),
        (deadly.FREEZE, "frozen", "in die"),
    ],
)
def test_a_death_is_reported_without_what_anybody_said(tmp_path: Path, kind: int, reason: str, place: str) -> None:
    report = die(tmp_path, kind)
    assert leaks(report) == []
    assert report["reason"].startswith(reason)
    assert deadly.CANARY not in json.dumps(report), "an exception's message may quote a request"
    assert place in "\n".join(report["stacks"])
    assert report["config"]["engine"] == {"model": "fake", "max_num_seqs": 7}
    assert report["config"]["server"] == {"api_key": "set", "admin_api_key": "set", "port": 8123}
    assert report["versions"]["msgspec"]
    # The deadly step is there, as a shape, and it is the last.
    steps = report["steps"]
    assert [step["step_id"] for step in steps] == list(range(steps[0]["step_id"], steps[-1]["step_id"] + 1))
    assert report["unfinished_step"] == steps[-1]["step_id"]
    opened = {entry["request_id"]: entry for entry in report["open"]}
    assert set(steps[-1]["request_ids"]) == set(opened)
    assert sorted(entry["num_prompt_tokens"] for entry in opened.values()) == [2 + len(PROMPT), 2 * len(PROMPT)]
    assert report["num_open"] == 2
    assert min(entry["num_delivered"] for entry in opened.values()) >= 5
    assert report["total"]["num_generated_tokens"] >= 10


def test_control_a_leak_would_be_seen() -> None:
    assert leaks({"open": [{"request": {"stop": WORDS[0]}}]}) == [WORDS[0]]
    assert leaks({"steps": [{"ids": [1, *PROMPT[2:5], 2]}]}) == ["tokens (97, 188)", "tokens (188, 149)"]
    assert leaks({"config": {"server": msgspec.to_builtins(ServerConfig(api_key=WORDS[1]))}}) == [WORDS[1]]


def test_the_newest_are_kept_and_none_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_reports, "MAX_REPORTS", 3)
    box = BlackBox.make()
    names = [f"{i:064d}" for i in range(MAX_CHUNKS)]
    numbers = [2**31] * MAX_CHUNKS
    for step_id in range(1, 2 * NUM_SLOTS):
        box.begin(StepShape(step_id, 0.5, 10**6, names, numbers, numbers, numbers, 0, 0))
        box.end(step_id)
    assert [step.step_id for step in box.steps()] == list(range(NUM_SLOTS, 2 * NUM_SLOTS))
    assert box.unfinished() is None
    (tmp_path / "mine.txt").write_text("not a report")
    reports = CrashReports(str(tmp_path), EngineConfig(), ServerConfig())
    paths = [reports.write("exit status -9", box, [], None, Stats(), Stats(), i) for i in range(5)]
    assert {*tmp_path.glob("crash-*")} == {*paths[2:]}
    assert (tmp_path / "mine.txt").exists()
    for path in paths[2:]:
        assert path is not None
        assert path.stat().st_size <= crash_reports.MAX_REPORT_BYTES
        assert json.loads(path.read_bytes())["steps"][-1]["step_id"] == 2 * NUM_SLOTS - 1
    box.close()


def test_a_step_too_large_for_its_slot_loses_its_columns() -> None:
    box = BlackBox.make()
    box.begin(StepShape(7, 0.5, 3, ["x" * 9000], [1], [2], [3], 0, 0))
    assert [(step.step_id, step.num_chunks, step.request_ids) for step in box.steps()] == [(7, 3, [])]
    assert box.unfinished() == 7
    # A step may begin beside another.
    box.begin(StepShape(8, 0.6, 1, ["a"], [1], [2], [3], 0, 0))
    assert box.unfinished() == 7
    box.end(7)
    assert box.unfinished() == 8
    box.end(8)
    assert box.unfinished() is None
    box.close()


def test_where_none_can_be_written_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    reports = CrashReports(str(tmp_path / "file"), EngineConfig(), ServerConfig())
    assert reports.write("exit status -9", None, [], None, Stats(), Stats(), 0) is None
    assert "no report of the death was written" in caplog.text


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("exit status -11", "exit status -11"),
        ("frozen: no step for 1.2 s, no processor time for 1.0 s of them", None),
        ("ValueError: 'the prompt' is not allowed", "ValueError"),
        ("TypeError in the server: the prompt", "TypeError in the server"),
        ("the engine's process ended while it started (exit status -9)", None),
        ("the engine did not start within 12 s", None),
        ("the prompt of a client", "an exception"),
    ],
)
def test_a_reason_quotes_nobody(text: str, output: str | None) -> None:
    assert plain_reason(text) == (output or text)


def test_a_server_writes_them_unless_told_not_to(tmp_path: Path) -> None:
    client = ProcessClient(EngineConfig(model="fake"), ServerConfig(crash_report_dir=str(tmp_path)))
    assert client.replicas[0].reports is not None
    assert client.replicas[0].reports.folder == tmp_path
    assert ProcessClient(EngineConfig(model="fake"), ServerConfig(crash_report_dir="")).replicas[0].reports is None


def test_what_an_engine_writes_to_stderr_is_logged_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    code = "import os, sys; os.write(2, b'one\\ntwo \\x1b[2J\\n' + 70000 * b'y' + b'\\nthree'); sys.exit(3)"
    link = ProcessLink(EngineConfig(), (sys.executable, "-c", code), logs_stderr=True)

    async def work() -> None:
        with pytest.raises(HeadraceError, match="exit status 3"):
            await link.start(lambda message: None, lambda reason: None)
        await link.close()

    asyncio.run(work())
    lines = [record.getMessage() for record in caplog.records]
    assert (lines[0], lines[1], lines[-1]) == ("one", "two \x1b[2J", "three")
    assert sum(line.count("y") for line in lines) == 70000
