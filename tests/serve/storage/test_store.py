"""Bodies that are copied in pieces are whole, whatever their size."""

from __future__ import annotations

import pytest

from headrace.serve.storage import store as module
from headrace.serve.storage.store import Store


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("num_pieces", [0, 1, 3])
def test_a_body_in_memory_is_what_was_written(num_pieces: int, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 8)
    store = Store("file-", None, max_items=2, max_bytes=1000)
    body = bytes(range(max(0, 8 * num_pieces + more)))
    one, two = store.new_id(), store.new_id()
    store.put(one, {}, body)
    store.put(two, {}, b"abc")
    store.set_body(two, body)
    assert store.body(one) == store.body(two) == body
    for begin in {0, len(body) // 2, len(body)}:
        store.write(one, body[::-1], begin)
        assert store.body(one) == body[:begin] + body[::-1]
        store.set_body(one, body)
