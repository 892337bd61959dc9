"""A recorded schedule whose folder is gone: nobody who is served notices (R-28)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tests.support.server import HTTP, Live, lines_of

from headrace.engine.client import EngineClient
from headrace.engine.links import ProcessLink
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.text.tokenizer import Tokenizer

# The engine's process as it is, but for the model.
SCRIPT = """
import sys, time
from headrace.engine import build as composition
from headrace.engine.child import main
from tests.support import fake

def build(config, is_restart):
    core = fake.build(config, 0.005)
    make = composition.recorded(config, config.record_schedule, core.info, None, None, is_restart)
    return make(core.scheduler, core.executor, core.info, time.monotonic)

sys.exit(main(int(sys.argv[1]), build))
"""


def test_R_28_an_engine_whose_recording_has_no_folder_any_more_is_restarted(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    config = EngineConfig(model="fake", record_schedule=str(folder / "log"))
    link = ProcessLink(config, (sys.executable, "-c", SCRIPT), logs_stderr=True)
    body = {"prompt": "x", "max_tokens": 30, "seed": 3, "ignore_eos": True, "temperature": 0.8}
    with Live(EngineClient(link, max_restarts=1), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        whole = live.post("/v1/completions", body).json()["choices"][0]["text"]
        assert live.metric("schedule_recordings_ended_total") == 0
        with HTTP.stream("POST", live.url + "/v1/completions", json=body | {"stream": True}) as reply:
            events = lines_of(reply)
            data = [json.loads(next(events)[6:])]
            shutil.rmtree(folder)
            assert link.pid is not None
            os.kill(link.pid, signal.SIGKILL)
            data += [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in data if event["choices"]) == whole
        assert live.post("/v1/completions", body).json()["choices"][0]["text"] == whole
        assert live.metric("engine_restarts_total") == live.metric("schedule_recordings_ended_total") == 1
    # The engine's process logs in the form that the server reads.
    [told_once] = [record for record in caplog.records if "the recording of the schedule has failed" in record.msg]
    assert (told_once.levelname, told_once.name) == ("ERROR", "headrace.engine")
    assert told_once.msg.startswith("the recording")
