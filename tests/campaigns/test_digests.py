"""`digests compare` notices what must not pass, and the normaliser hides only what two takes can not share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.campaigns.digests import __main__ as digests
from tests.campaigns.digests.servers import Normaliser, Stream, events_of

REPLY = {"status": 200, "headers": {"content-type": "application/json"}, "body": {"text": "Once", "logprob": 1.5}}


def take(path: Path, **changes: Any) -> Path:
    """Write a take of two cases; a change to None leaves the case out."""
    record = digests.Record()
    for name, value in (
        {"http/a": REPLY, "offline/b": {"logprob": (0.5).hex(), "token_ids": [5, 6]}} | changes
    ).items():
        if value is not None:
            record.add(name, value, "cases")
    digests.write(path, {"commit": "x", "counts": dict(record.counts), "cases": record.cases})
    return path


def test_equal_takes_have_no_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert digests.main(["compare", str(take(tmp_path / "a.json.gz")), str(take(tmp_path / "b.json"))]) == 0
    assert capsys.readouterr().out == "0 differences; 2 cases at x, 2 at x\n"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offline/b": {"logprob": "0x1.0000000000001p-1", "token_ids": [5, 6]}}, ".logprob: "),
        ({"offline/b": {"logprob": (0.5).hex(), "token_ids": [5, 7]}}, ".token_ids[1]: 6 became 7"),
        ({"offline/b": {"logprob": (0.5).hex(), "token_ids": [5]}}, ".token_ids: 2 items became 1"),
        ({"offline/b": None}, "is missing in the second take"),
        ({"offline/c": 1}, "is missing in the first take"),
        ({"http/a": REPLY | {"status": 400}}, ".status: 200 became 400"),
        ({"http/a": REPLY | {"headers": {}}}, '.headers.content-type: "application/json" became nothing'),
        ({"http/a": dict(reversed(REPLY.items()))}, "keys ['status', 'headers', 'body'] became"),
        ({"http/a": REPLY | {"status": 200.0}}, ".status: 200 became 200.0"),
    ],
)
def test_a_difference_is_named(
    changes: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = take(tmp_path / "a.json"), take(tmp_path / "b.json", **changes)
    assert digests.main(["compare", str(before), str(after)]) == 1
    (name,) = changes
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == name
    assert text in lines[1]
    assert lines[2].startswith("1 differences; ")


def test_a_value_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    before, after = take(tmp_path / "a.json"), take(tmp_path / "b.json")
    document = json.loads(after.read_text())
    document["cases"]["http/a"]["value"]["status"] = 201
    after.write_text(json.dumps(document))
    assert digests.compare(before, after) == 1


def test_a_name_is_used_once() -> None:
    record = digests.Record()
    record.add("a", 1, "cases")
    with pytest.raises(ValueError, match="two cases are named a"):
        record.add("a", 2, "cases")


def test_only_drawn_and_measured_values_are_hidden() -> None:
    first, second = "0" * 32, "1" * 32
    value = {"id": f"resp_{first}", "item": f"msg_{first}", "other": f"msg_{second}", "created_at": 5,
             "prompt_ms": 0.25, "failed_at": None, "seed": 7, "text": "12 at :80", "bytes": 3}  # fmt: skip
    assert Normaliser(80).value(value) == {
        "id": "resp_<id 1>", "item": "msg_<id 1>", "other": "msg_<id 2>", "created_at": "<time>",
        "prompt_ms": "<duration>", "failed_at": None, "seed": 7, "text": "12 at :<port>", "bytes": 3,
    }  # fmt: skip


def chunks(*pieces: str, finish: str = "length") -> dict[str, Any]:
    """A stream of chat chunks with these pieces of text, the last of which ends it."""
    events = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
    for place, piece in enumerate(pieces):
        reason = finish if place == len(pieces) - 1 else None
        events.append({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": reason}]})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    stream = Stream()
    for name, event in events_of(text):
        stream.add(name, event)
    return stream.plain()


def test_the_pieces_of_a_stream_do_not_count_and_its_text_and_events_do() -> None:
    plain = chunks("a", "b", "c")
    assert chunks("ab", "c") == chunks("abc") == plain
    assert list(plain["texts"].values()) == ["abc"]
    assert [event[1] for event in plain["events"]][-1] == "[DONE]"
    assert chunks("a", "b", "d") != plain
    assert chunks("a", "b", "c", finish="stop") != plain


def test_events_out_of_order_are_noticed() -> None:
    plain = []
    for numbers in ((0, 1, 2), (0, 2, 1)):
        stream = Stream()
        for number in numbers:
            stream.add("x", {"type": "x", "sequence_number": number, "delta": "a"})
        plain.append(stream.plain())
    assert [one["in_order"] for one in plain] == [True, False]
    assert plain[0] != plain[1]
