"""Files of requests answered into files of outputs: what is asked, what is not, and what a broken run leaves."""

from __future__ import annotations

import asyncio
import fcntl
import json
import random
from pathlib import Path
from typing import Any

import pytest

from headrace.protocol.errors import EngineDeadError, HeadraceError, QueueFullError, RequestError
from headrace.serve.storage.batch_file import Report, answer_file, check_paths
from headrace.serve.storage.batch_lines import Answerer, Line, answers, read_line

URL = "/v1/completions"


def line(custom_id: str, **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": custom_id} | body}
    return json.dumps(fields).encode()


class Asked:
    """An answerer that echoes, and remembers what it was asked."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.prompts: list[str] = []
        self.most = self.running = 0
        self.dies_after = dies_after

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.dies_after is not None and len(self.prompts) >= self.dies_after:
            raise EngineDeadError("gone")
        self.prompts.append(body["prompt"])
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(body["seed"] % 5):
            await asyncio.sleep(0)
        self.running -= 1
        if body["prompt"].startswith("bad"):
            raise RequestError("prompt", body["prompt"], "good")
        if body["prompt"].startswith("broken"):
            raise HeadraceError("broken")
        return {"text": body["prompt"].upper(), "seed": body["seed"]}

    def run(self, source: Path, target: Path, concurrency: int = 4) -> Report:
        answerer = Answerer({URL: self.reply})
        return asyncio.run(answer_file(source, target, answerer, concurrency, lambda done, total: None))


def lines_of(path: Path) -> list[bytes]:
    return sorted(path.read_bytes().splitlines())


def test_every_line_gets_its_output(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\n".join([*(line(f"q{i}") for i in range(30)), b"", b"  ", line("last")]))
    requests = Asked()
    report = requests.run(source, target)
    assert (report.num_lines, report.num_completed, report.num_failed, report.num_known) == (31, 31, 0, 0)
    assert 1 < requests.most <= 4
    outputs = [json.loads(text) for text in lines_of(target)]
    assert {output["custom_id"] for output in outputs} == {*(f"q{i}" for i in range(30)), "last"}
    for output in outputs:
        assert output["response"]["body"]["text"] == output["custom_id"].upper()
        assert output["error"] is None
    assert len({output["response"]["body"]["seed"] for output in outputs}) == 31


def test_bad_lines_are_told_with_their_numbers(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    no_url = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/other", "body": {}}).encode()
    twice = b'{"custom_id": "a", "custom_id": "b"}'
    source.write_bytes(
        b"\n".join([line("a"), b"{", no_url, line("a", temperature=1), b"[]", twice, b"\xff", line("bad")])
    )
    report = Asked().run(source, target)
    assert (report.num_lines, report.num_completed, report.num_failed) == (8, 1, 7)
    errors = [output for output in map(json.loads, lines_of(target)) if output["response"] is None]
    assert sorted(output["line"] for output in errors) == [2, 3, 4, 5, 6, 7]
    for output in errors:
        assert output["error"]["message"].startswith(f"line {output['line']}: ")
    before = lines_of(target)
    again = Asked()
    report = again.run(source, target)
    assert again.prompts == []
    assert (report.num_known, report.num_completed, report.num_failed) == (2, 0, 7)
    assert lines_of(target) == before


@pytest.mark.parametrize("cut", [0, 1, 7, 60, None])
def test_a_torn_output_is_mended(tmp_path: Path, cut: int | None) -> None:
    source, target, whole = tmp_path / "in", tmp_path / "out", tmp_path / "whole"
    source.write_bytes(b"\n".join(line(f"q{i}") for i in range(12)))
    Asked().run(source, whole)
    # What a kill leaves: some lines, and a piece of another.
    lines = whole.read_bytes().splitlines(keepends=True)[:5]
    target.write_bytes(b"".join(lines[:4]) + (lines[4].rstrip(b"\n") if cut is None else lines[4][:cut]))
    requests = Asked()
    requests.run(source, target)
    assert lines_of(target) == lines_of(whole)
    assert len(requests.prompts) == (7 if cut is None else 8)


def test_control_a_torn_line_that_is_not_mended_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.serve.storage import batch_file

    source, target, whole = tmp_path / "in", tmp_path / "out", tmp_path / "whole"
    source.write_bytes(b"\n".join(line(f"q{i}") for i in range(3)))
    Asked().run(source, whole)
    target.write_bytes(whole.read_bytes()[:20])
    monkeypatch.setattr(batch_file, "mend", lambda path: batch_file.Known())
    Asked().run(source, target)
    assert lines_of(target) != lines_of(whole)


def test_broken_off_anywhere_it_ends_the_same(tmp_path: Path) -> None:
    source, whole = tmp_path / "in", tmp_path / "whole"
    lines = [line(f"q{i}") for i in range(20)] + [line("bad one"), b"{"]
    random.Random(1).shuffle(lines)
    source.write_bytes(b"\n".join(lines))
    Asked().run(source, whole)
    for dies_after in range(0, 21, 3):
        target = tmp_path / f"out{dies_after}"
        with pytest.raises(EngineDeadError):
            Asked(dies_after).run(source, target)
        # A line that has no answer leaves nothing behind.
        assert set(lines_of(target)) < set(lines_of(whole))
        Asked().run(source, target)
        assert lines_of(target) == lines_of(whole)


def test_the_server_s_own_failures_are_tried_again(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(line("broken") + b"\n" + line("bad") + b"\n" + line("good"))
    assert Asked().run(source, target).num_failed == 2
    requests = Asked()
    requests.run(source, target)
    assert requests.prompts == ["broken"]
    assert len(lines_of(target)) == 3


def test_a_full_queue_is_waited_for() -> None:
    full = [3]

    async def reply(body: dict[str, Any]) -> dict[str, Any]:
        full[0] -= 1
        if full[0] >= 0:
            raise QueueFullError("full")
        return {}

    result = asyncio.run(Answerer({URL: reply}).answer(read_line(line("a"), 1, (URL,))))
    assert result["response"]["status_code"] == 200
    assert full == [-1]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(line("a"))
    target.write_text("my notes\nof today\n")
    with pytest.raises(RequestError, match="line 1"):
        Asked().run(source, target)
    assert target.read_text() == "my notes\nof today\n"
    for wrong in (source, tmp_path, tmp_path / "no" / "out"):
        with pytest.raises(RequestError, match="OUTPUT"):
            check_paths(source, wrong)
    with pytest.raises(RequestError, match="INPUT"):
        check_paths(tmp_path / "none", target)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(line("a"))
    with open(target, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(HeadraceError, match="another run"):
            Asked().run(source, target)
    Asked().run(source, target)


def test_leaving_early_cancels_what_is_open() -> None:
    cancelled = []

    async def answer(requests: Line) -> dict[str, Any]:
        try:
            await asyncio.sleep(0 if requests.number == 1 else 3600)
        except asyncio.CancelledError:
            cancelled.append(requests.number)
            raise
        return {"number": requests.number}

    async def main() -> None:
        lines = [read_line(line(f"q{i}"), i, (URL,)) for i in range(1, 9)]
        result = answers(lines, answer, 3)
        async for outputs in result:
            assert outputs == [{"number": 1}]
            await asyncio.sleep(0)
            await result.aclose()

    asyncio.run(main())
    assert cancelled
    assert set(cancelled) <= {2, 3, 4}


def test_a_line_decides_its_seed() -> None:
    async def reply(body: dict[str, Any]) -> dict[str, Any]:
        return {"seed": body["seed"]}

    def seed(text: bytes) -> int:
        output = asyncio.run(Answerer({URL: reply}).answer(read_line(text, 1, (URL,))))
        return int(output["response"]["body"]["seed"])

    assert seed(line("a")) == seed(line("a"))
    assert len({seed(line("a")), seed(line("b")), seed(line("a", top_k=3))}) == 3
    assert seed(line("a", seed=7)) == 7
    # The order of the keys says nothing.
    turned = json.dumps(dict(reversed(json.loads(line("a")).items()))).encode()
    assert seed(turned) == seed(line("a"))


def test_a_batch_s_priority_is_for_lines_that_have_none() -> None:
    seen = []

    async def reply(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body.get("priority"))
        return {}

    for answerer in (Answerer({URL: reply}, priority=9), Answerer({URL: reply})):
        for text in (line("a"), line("a", priority=2)):
            asyncio.run(answerer.answer(read_line(text, 1, (URL,))))
    assert seen == [9, 2, None, 2]
