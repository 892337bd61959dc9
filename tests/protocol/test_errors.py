"""The words of errors: a refusal of a file can be sent, and is short, whatever a stranger wrote in the file."""

from __future__ import annotations

from headrace.protocol.errors import CheckpointError


def test_S_28_a_refusal_is_text_of_bounded_length() -> None:
    long = str(CheckpointError(f"config.json: hidden_size: {'9' * 500_000} is not allowed; it must be at least 1"))
    assert len(long) <= CheckpointError.most_letters
    assert long.startswith("config.json: hidden_size: 999")
    assert long.endswith("999 is not allowed; it must be at least 1")
    assert " ... " in long
    assert str(CheckpointError("a name of \ud800")).encode() == rb"a name of \ud800"


def test_S_28_control_a_short_refusal_stays_as_it_is() -> None:
    for text in ("ä.json is missing", "a" * CheckpointError.most_letters):
        assert str(CheckpointError(text)) == text
