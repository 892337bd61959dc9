"""A plugin of pytest in llama.cpp's tests: notes how each test ended, and starts fewer servers.

A test whose command line is that of the test before gets the same server, with its prefix cache emptied, unless
OWN_SERVERS is set: there each test counts from the start. It runs in the environment of those tests, without headrace.
A line of JSON for each test goes to the file that RECORD names.
"""

import json
import os
import time
import types

import pytest

PROBE_S = 0.2
"""Seconds between two probes of a server that starts."""
# What of a `ServerProcess` is not of its command line.
STATE = ("process", "external_server", "ready", "_log")
last = types.SimpleNamespace(server=None, command=None)


def pytest_collection_modifyitems():
    import utils  # of the tests

    # It would start a server for each model, to download it.
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    # A hundred probes a second, of a server that loads, would take its processor time.
    utils.time = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(max(seconds, PROBE_S)))
    if os.environ.get("OWN_SERVERS"):
        return
    begin, end = utils.ServerProcess.start, utils.ServerProcess.stop

    def start(self, *args, **more):
        if last.server is not None and last.command == command(self) and last.server.process.poll() is None:
            self.process = last.server.process
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            emptied = self.make_request("POST", "/reset_prefix_cache", headers=headers)
            assert emptied.status_code == 200, emptied.body
            utils.server_instances.add(self)
            return
        leave(end)
        begin(self, *args, **more)
        last.server, last.command = self, command(self)

    def stop(self):
        utils.server_instances.discard(self)
        if last.server is None or self.process is not last.server.process:
            end(self)

    utils.ServerProcess.start, utils.ServerProcess.stop = start, stop
    last.end = end


def command(server):
    """What a server is started with."""
    names = {*type(server).__annotations__, *vars(server)} - set(STATE)
    return {name: getattr(server, name, None) for name in names}


def leave(end):
    """End the server that was last."""
    server, last.server = last.server, None
    if server is not None:
        end(server)


def pytest_sessionfinish():
    if last.server is not None:
        leave(last.end)


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
