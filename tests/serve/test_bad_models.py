"""A folder with models whose files can not be read, behind a live server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.serve.test_models_folder import Folded, simulated, write_model  # noqa: F401
from tests.support.server import HTTP

from headrace.text.tokenizer import Tokenizer


def test_S_28_files_that_can_not_be_read_are_left_out_of_lists_and_harm_no_other(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("good", "sizes", "pipe"):
        write_model(tmp_path / name)
    header = b'{"w":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b",".join([b"9" * 4299] * 1500) + b"]}}"
    (tmp_path / "sizes" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "pipe" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "pipe" / "model.safetensors")
    with Folded(tmp_path, tokenizer) as live:
        assert [card["id"] for card in HTTP.get(live.url + "/v1/models").json()["data"]] == ["good"]
        assert [card["name"] for card in HTTP.get(live.url + "/api/tags").json()["models"]] == ["good:latest"]
        for name, words in (("sizes", "a number of more than 20 digits"), ("pipe", "no regular file")):
            reply = live.post("/api/show", {"model": name})
            assert reply.status_code == 500
            assert words in reply.json()["error"]
            assert f"{name} is not listed" in caplog.text
        assert live.post("/api/generate", {"model": "good", "prompt": "a"}).status_code == 200
