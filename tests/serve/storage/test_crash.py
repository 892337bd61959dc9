"""R-29: files, batches and responses after a crash of the machine at any moment. The campaign C-15 tries more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.crashed_storage import URL, Scenario, recorded
from tests.support.crashes import FOLDERS, Recording, restore

from headrace.serve.storage.batch_file import answer_file
from headrace.serve.storage.batch_lines import Answerer


def halves(length: int) -> list[int]:
    return [length // 2]


def verdicts(scenario: Scenario, folder: Path, most: int) -> list[str]:
    """What is wrong after a crash at each moment, in up to `most` states each, up to the first that is."""
    result = []
    for num_ops in reversed(range(len(scenario.recording.ops) + 1)):
        for state in scenario.recording.states(num_ops, halves, most):
            result.append(scenario.judge(num_ops, state, folder))
            if result[-1]:
                return result
    return result


def test_R_29_a_crash_loses_and_doubles_nothing_that_was_seen(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    scenario = Scenario(tmp_path / "run", 1, 4)
    assert len(scenario.snapshots) > 20
    result = verdicts(scenario, tmp_path / "after", 2)
    assert set(result) == {""}
    assert len(result) > 200


@pytest.mark.parametrize("without", ["part-", "files/file-", FOLDERS])
def test_R_29_control_one_sync_less_is_noticed(tmp_path: Path, without: str) -> None:
    """New and replaced files, the lines of batches, and names."""
    (tmp_path / "run").mkdir()
    scenario = Scenario(tmp_path / "run", 1, 2, without)
    assert verdicts(scenario, tmp_path / "after", 12)[-1]


# -- run-batch


class Run:
    """A recorded run of `run-batch`. `progress` has (operations of the disk, lines done) as it went."""

    def __init__(self, folder: Path, without: str = "\n") -> None:
        self.source = folder.parent / "in"
        self.ids = [f"q{number}" for number in range(5)]
        fields = [{"custom_id": each, "method": "POST", "url": URL, "body": {"prompt": each}} for each in self.ids]
        self.source.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in fields))
        self.recording = Recording(folder, without)
        self.progress = [(0, 0)]
        self.answer(folder, self.recording, lambda done, _: self.progress.append((len(self.recording.ops), done)))

    def answer(self, folder: Path, recording: Recording, show: Any = lambda done, total: None) -> list[str]:
        """Run it. -> the prompts that were answered."""
        prompts: list[str] = []

        async def reply(body: dict[str, Any]) -> dict[str, Any]:
            prompts.append(body["prompt"])
            return {"text": body["prompt"]}

        with recorded(recording):
            asyncio.run(answer_file(self.source, folder / "out", Answerer({URL: reply}), 2, show))
        return prompts

    def verdicts(self, folder: Path) -> list[str]:
        result = []
        folder.mkdir()
        for num_ops in range(len(self.recording.ops) + 1):
            num_done = max(done for ops, done in self.progress if ops <= num_ops)
            for state in self.recording.states(num_ops, halves):
                restore(state, folder)
                prompts = self.answer(folder, Recording(folder))
                ids = [json.loads(line)["custom_id"] for line in (folder / "out").read_bytes().splitlines()]
                is_right = sorted(ids) == self.ids and len(prompts) <= len(self.ids) - num_done
                result.append("" if is_right else f"{ids}, answered again: {prompts}")
                if not is_right:
                    return result
        return result


def test_R_29_run_batch_loses_and_doubles_no_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    result = Run(tmp_path / "run").verdicts(tmp_path / "after")
    assert set(result) == {""}
    assert len(result) > 20


@pytest.mark.parametrize("without", ["out", FOLDERS])
def test_R_29_control_run_batch_without_a_sync_is_noticed(tmp_path: Path, without: str) -> None:
    (tmp_path / "run").mkdir()
    assert any(Run(tmp_path / "run", without).verdicts(tmp_path / "after"))
