"""A plugin of pytest in llama.cpp's tests: loads no models beforehand, and notes how each test ended.

It runs in the environment of those tests, without headrace. A line of JSON for each goes to the file that the variable
RECORD names.
"""

import json
import os
import time
import types

import pytest

PROBE_S = 0.2
"""Seconds between two probes of a server that starts."""


def pytest_collection_modifyitems() -> None:
    import utils  # of the tests

    # It would start a server for each model, to download it.
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    # A hundred probes a second, of a server that loads, would take its processor time.
    utils.time = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(max(seconds, PROBE_S)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else str(report.longrepr or "")
        if call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception):
            message = str(call.excinfo.value)
        output = "".join(text for _, text in report.sections)
        left_out = sorted({line.split()[3] for line in output.splitlines() if line.startswith("stand-in: left out")})
        line = {"id": item.nodeid, "outcome": report.outcome, "message": message, "left_out": left_out}
        with open(os.environ["RECORD"], "a") as file:
            file.write(json.dumps(line) + "\n")
