"""The campaign of hostile files notices what is planted, and has nothing against sound files."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
from tests.campaigns import hostile, hostile_files, hostile_server
from tests.campaigns.hostile import Case

CASE = Case("config", "config.json", "number")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    hostile.sound(folder)
    return folder


def test_a_mutation_can_be_made_again(base: Path, tmp_path: Path) -> None:
    changed = Counter[str]()
    for kind in hostile.KINDS:
        for number in range(6) if kind != "stored" else ():
            cases, texts = [], []
            for name in ("one", "two"):
                folder = tmp_path / f"{kind}-{number}-{name}"
                cases.append(hostile.mutate(base, folder, kind, 1, number))
                path = folder / cases[-1].file
                texts.append(path.read_bytes() if path.is_file() else b"")
            assert cases[0] == cases[1]
            assert texts[0] == texts[1]
            sound = base / hostile.KINDS[kind][0] / cases[0].file
            changed[kind] += texts[0] != sound.read_bytes() or len(list(folder.iterdir())) > len(
                list(sound.parent.iterdir())
            )
    assert all(changed[kind] >= 3 for kind in hostile.KINDS if kind != "stored"), changed


@pytest.mark.parametrize("is_bounded", [True, False])
def test_a_mutation_takes_bounded_memory(is_bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "WORDS", ("",))
    monkeypatch.setattr(hostile, "PLACES", ("1",))
    monkeypatch.setattr(hostile, "MAX_GROWN", 10_000 if is_bounded else 10**9)
    sizes = [len(hostile.json_text({"a": ["x" * 100]}, random.Random(f"{seed}"))[0]) for seed in range(60)]
    assert (max(sizes) < 500_000) is is_bounded


@pytest.mark.parametrize(
    ("status", "text", "is_fault"),
    [
        (200, "{}", False),
        (200, '{"a":', True),
        (404, '{"error": "config.json: hidden_size: 0 is not allowed"}', False),
        (500, '{"error": "config.json: KeyError: hidden_size"}', True),
        (500, '{"error": "internal error; the server\'s log has more"}', True),
        (400, '{"error": "Traceback (most recent call last) of config.json"}', True),
        (400, "no", True),
        (400, "lm_head.weight is missing from the checkpoint", False),
        (400, '{"error": "config.json: ' + "x" * 9_000 + '"}', True),
        (400, '{"error": "messages: the template says; it says: TypeError: no loader"}', False),
    ],
)
def test_replies_are_judged_by_their_words(status: int, text: str, is_fault: bool) -> None:
    assert bool(hostile.fault_of(CASE, status, text)) is is_fault


class Slow(BaseHTTPRequestHandler):
    """Answers its first call late."""

    num = 0

    def do_GET(self) -> None:
        Slow.num += 1
        if Slow.num == 1:
            time.sleep(2 * hostile_server.PROBE_S)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_late_probe_is_the_servers_fault_unless_it_waits_for_a_core(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count(step=10) if is_busy else repeat(0)
    monkeypatch.setattr(hostile_server, "run_delay", lambda *pids: next(steps))
    Slow.num = 0
    with HTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        probes = hostile_server.Probes(f"http://127.0.0.1:{server.server_port}", os.getpid())
        probes.start()
        while probes.num < 2 and probes.is_alive():
            time.sleep(0.01)
        probes.is_over.set()
        probes.join(30)
        server.shutdown()
    assert probes.failures == []
    assert (probes.longest > hostile_server.PROBE_S) is not is_busy


def test_the_wait_for_a_core_is_measured() -> None:
    assert hostile_server.run_delay(os.getpid()) >= 0.0
    assert hostile_server.run_delay(2**30) == 0.0, "a process that is gone"


def test_hostile_settings_and_entries_are_refused_in_words(base: Path) -> None:
    counts, problems = hostile_files.through_workers(base, 12, 7, ["settings", "stored", "config"])
    assert problems == []
    assert counts["cases"] == 12


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        ("key-error", "internal error"),
        ("spin", "s of processor time"),
        pytest.param("memory", "internal error", marks=pytest.mark.slow),
        pytest.param("leak", "memory grew by", marks=pytest.mark.slow),
    ],
)
def test_control_a_planted_fault_is_noticed(
    plant: str, words: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_files, "CPU_S", 1.5 if plant == "spin" else 20.0)
    _, problems = hostile_files.through_workers(base, 1, 7, ["settings"], plant)
    assert any(words in problem for problem in problems), problems
