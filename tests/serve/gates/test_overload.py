"""Under overload calls are refused by class before anything fails: the states, and a live server (R-12)."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc, lines_of
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import RequestError
from headrace.serve import shedding
from headrace.serve.gates.overload import CALM_S, ENTER, MARGIN, REFUSED_FROM, Overload, State, Work, work_of
from headrace.serve.shedding import Shedding
from headrace.text.tokenizer import Tokenizer

N, L, A, P = State
CALM = CALM_S + 0.1
# Rows of (seconds later, pressure, the state then).
RISES: dict[str, list[tuple[float, float, State]]] = {
    "nothing": [(0, 0.0, N), (1, 0.79, N)],
    "one state after the other": [(0, 0.80, L), (0.1, 0.90, A), (0.1, 0.97, P)],
    "two at once": [(0, 0.95, A)],
    "three at once": [(0, 3.0, P)],
    "from the first to the last": [(0, 0.85, L), (0.1, 1.0, P)],
    "not on the way down": [(0, 1.0, P), (0.1, 0.92, P), (0.1, 0.88, P)],
}
FALLS: dict[str, list[tuple[float, float, State]]] = {
    "not before it was calm": [(0, 0.85, L), (0.1, 0.1, L), (CALM_S - 0.1, 0.1, L)],
    "after it was calm": [(0, 0.85, L), (0.1, 0.1, L), (CALM, 0.1, N)],
    "one state for each calm time": [
        (0, 1.0, P),
        (0, 0.0, P),
        (CALM, 0.0, A),
        (1, 0.0, A),
        (CALM, 0.0, L),
        (CALM, 0, N),
    ],
    "not within the margin": [(0, 0.85, L), (CALM, 0.71, L), (CALM, 0.71, L), (CALM, 0.71, L)],
    "below the margin of its own state alone": [(0, 0.97, P), (0, 0.85, P), (CALM, 0.85, A), (CALM, 0.85, A)],
    "one look that is not calm begins the time anew": [
        (0, 0.85, L),
        (0, 0.1, L),
        (CALM_S - 0.5, 0.75, L),
        (1, 0.1, L),
        (CALM_S - 0.5, 0.1, L),
        (1, 0.1, N),
    ],
    "up again while it is calm": [(0, 0.92, A), (0, 0.1, A), (CALM, 0.1, L), (0.1, 0.91, A), (CALM_S / 2, 0.1, A)],
}


def states(rows: list[tuple[float, float, State]]) -> list[State]:
    overload, now, result = Overload(), 100.0, []
    for pause, pressure, _ in rows:
        now += pause
        overload.step({"memory": pressure, "lag": 0.0}, now)
        result.append(overload.state)
    return result


@pytest.mark.parametrize("name", [*RISES, *FALLS])
def test_R_12_the_states_follow_the_pressure(name: str) -> None:
    rows = (RISES | FALLS)[name]
    assert states(rows) == [state for *_, state in rows]


def test_the_highest_pressure_counts_and_is_named() -> None:
    overload = Overload()
    overload.step({"memory": 0.2, "open_files": 0.95, "lag": 0.85}, 0.0)
    assert (overload.state, overload.why) == (A, "its reserve of open files is at 95% of the bound")


def num_changes(seed: int) -> int:
    """How often the state changes in ten minutes of a pressure that swings around a state's beginning."""
    chance, overload, result = random.Random(seed), Overload(), 0
    middle = chance.choice(list(ENTER.values()))
    for tick in range(6000):
        before = overload.state
        overload.step({"memory": middle + chance.uniform(-MARGIN, MARGIN) * 0.9}, tick / 10)
        result += overload.state != before
    return result


def test_R_12_a_pressure_around_a_bound_does_not_flap() -> None:
    assert max(map(num_changes, range(12))) <= 3


def test_R_12_control_without_a_margin_and_a_calm_time_it_flaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serve.gates.overload.MARGIN", 0.0)
    monkeypatch.setattr("headrace.serve.gates.overload.CALM_S", 0.0)
    assert min(map(num_changes, range(12))) > 100


def test_each_state_refuses_what_the_one_before_refuses_and_more() -> None:
    overload, refused = Overload(), []
    for state in State:
        overload.state = state
        refused.append({work for work in Work if overload.refuses(work)})
    assert refused == [set(), {Work.LATER}, {Work.LATER, Work.ANSWER}, set(Work)]
    assert all(before < after for before, after in itertools.pairwise(refused))
    assert set(REFUSED_FROM) == set(Work)


CLASSES: dict[Work | None, list[tuple[str, str]]] = {
    None: [
        ("GET", "/health/live"),
        ("GET", "/health/ready"),
        ("GET", "/ping"),
        ("GET", "/metrics"),
        ("GET", "/load"),
        ("GET", "/"),
        ("GET", "/inspect/live"),
        ("POST", "/sleep"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/fleet/update"),
    ],
    Work.LATER: [
        ("POST", "/v1/files"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/conversations"),
        ("POST", "/v1/conversations/conv_1/items"),
        ("POST", "/slots/0"),
    ],
    Work.ANSWER: [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
        ("POST", "/api/chat"),
        ("POST", "/completion"),
        ("POST", "/tokenize"),
        ("PUT", "/v1/a-route-that-is-new"),
    ],
    Work.READ: [
        ("GET", "/v1/models"),
        ("GET", "/api/tags"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/files/file-1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/batches/batch_1/cancel"),
    ],
}


@pytest.mark.parametrize("work", CLASSES, ids=str)
def test_calls_belong_to_classes(work: Work | None) -> None:
    assert {call: work_of(*call) for call in CLASSES[work]} == dict.fromkeys(CLASSES[work], work)


# -- a live server


class Pressed(Live):
    """A server whose pressures are those of `pressure`."""

    pressure = 0.0

    def __init__(self, tokenizer: Tokenizer, delay: float = 0.002, **settings: Any) -> None:
        super().__init__(inproc(delay=delay), tokenizer, ServerConfig(log_stats_interval=0, **settings))
        self.shedding: Shedding = self.app.state.lifespan.shedding
        self.shedding.pressures = lambda: {"memory": self.pressure}  # type: ignore[method-assign]

    def press(self, pressure: float, state: State) -> None:
        self.pressure = pressure
        self.wait(lambda: self.shedding.overload.state is state)


@pytest.fixture
def pressed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pressed]:
    monkeypatch.setattr("headrace.serve.gates.overload.CALM_S", 0.2)
    with Pressed(tokenizer) as live:
        yield live


PROMPT = {"prompt": "x", "max_tokens": 2}
CHAT = [{"role": "user", "content": "x"}]
ANSWERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "OpenAI": ("/v1/completions", PROMPT, lambda body: (body["error"]["code"], body["error"]["message"])),
    "Anthropic": (
        "/v1/messages",
        {"model": "fake", "max_tokens": 2, "messages": CHAT},
        lambda body: ("overloaded" if body["error"]["type"] == "overloaded_error" else "", body["error"]["message"]),
    ),
    "Ollama": ("/api/chat", {"model": "fake", "messages": CHAT}, lambda body: ("overloaded", body["error"])),
    "llama-server": (
        "/completion",
        {"prompt": "x", "n_predict": 2},
        lambda body: ("overloaded" if body["error"]["code"] == 503 else "", body["error"]["message"]),
    ),
}
WHY = "the server is overloaded: its memory is at "


def test_R_12_calls_are_refused_by_class_and_open_streams_go_on(pressed: Pressed) -> None:
    stream = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with HTTP.stream("POST", pressed.url + "/v1/completions", json=stream, timeout=240) as reply:
        events = lines_of(reply)
        next(events)
        pressed.press(0.85, L)
        later = pressed.post("/v1/conversations", {})
        assert (later.status_code, later.headers["retry-after"], later.json()["error"]["code"]) == (
            503,
            "5",
            "overloaded",
        )
        assert later.json()["error"]["message"].startswith(WHY + "85% of the bound; batches, files, ")
        background = pressed.post("/v1/responses", {"input": "x", "max_output_tokens": 2, "background": True})
        assert (background.status_code, background.json()["error"]["code"]) == (503, "overloaded")
        stored = pressed.post("/v1/responses", {"input": "x", "max_output_tokens": 2}).json()
        assert (stored["status"], stored["store"]) == ("incomplete", False)
        assert stored["warnings"] == [f"store: the response is not kept: {WHY}85% of the bound; {Work.LATER.value} are "
                                      "refused until there is less"]  # fmt: skip
        assert pressed.post("/v1/completions", PROMPT).status_code == 200
        pressed.press(0.92, A)
        for path, body, error_of in ANSWERS.values():
            refused = pressed.post(path, body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            code, message = error_of(refused.json())
            assert code == "overloaded"
            assert message == f"{WHY}92% of the bound; new answers are refused until there is less"
        assert HTTP.get(pressed.url + "/v1/models").status_code == 200
        pressed.press(1.2, P)
        assert HTTP.get(pressed.url + "/v1/models").status_code == 503
        for path in ("/health/live", "/health/ready", "/health/serving", "/ping", "/metrics", "/", "/inspect/live"):
            assert HTTP.get(pressed.url + path).status_code == 200, path
        assert pressed.post("/reset_prefix_cache", {}).status_code == 200
        assert pressed.metric("overload_state") == 3
        assert pressed.metric("overload_pressure", resource="memory") == 1.2
        num = {
            name: pressed.metric("overload_refused_total", **{"class": name}) for name in ("later", "answer", "read")
        }
        assert num == {"later": 3, "answer": 4, "read": 1}
        state = next(each for each in HTTP.get(pressed.url + "/inspect/live").text.split("\n\n") if "overload" in each)
        assert json.loads(state.removeprefix("data: "))["overload"] == {
            "state": "probes_only",
            "pressures": {"memory": 1.2},
            "why": "its memory is at 120% of the bound",
            "refused": Work.READ.value,
        }
        # The stream began before, and ends as if nothing had been.
        assert sum(each.startswith("data: {") for each in events) > 20
    pressed.press(0.0, N)
    assert pressed.post("/v1/completions", PROMPT).status_code == 200
    assert pressed.post("/v1/conversations", {}).status_code == 200


@pytest.mark.parametrize(
    ("pressure", "state", "refused"),
    [(0.0, N, None), (0.85, L, Work.LATER), (0.92, A, Work.ANSWER), (1.2, P, Work.READ)],
)
def test_R_12_the_probes_and_top_show_that_calls_are_refused(
    pressure: float, state: State, refused: Work | None, pressed: Pressed
) -> None:
    pressed.press(pressure, state)
    for path in ("/health/ready", "/health", "/ping", "/health/serving"):
        reply = HTTP.get(pressed.url + path)
        assert reply.status_code == 200
        assert reply.json().get("overload") == (state.word if refused else None), path
    printed = CliRunner().invoke(app, ["top", pressed.url, "--once"]).stdout.splitlines()[0]
    why = f" · overloaded: its memory is at {pressure:.0%} of the bound; {refused.value} are refused" if refused else ""
    assert printed == f"headrace · fake · ready{why}"


def test_what_is_refused_takes_nothing_of_a_rate(tokenizer: Tokenizer) -> None:
    with Pressed(tokenizer, max_requests_per_minute=2) as live:
        live.press(0.95, A)
        assert {live.post("/v1/completions", PROMPT).status_code for _ in range(5)} == {503}
        live.shedding.overload.state, live.pressure = N, 0.0
        assert [live.post("/v1/completions", PROMPT).status_code for _ in range(3)] == [200, 200, 429]


def test_R_12_lines_of_batches_wait_until_the_pressure_is_lower(pressed: Pressed) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": PROMPT}
    files = {"file": ("a", json.dumps(line).encode())}
    file_id = HTTP.post(pressed.url + "/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    storage = pressed.app.state.lifespan.storage
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    by_overload, storage.batches.is_held_back = storage.batches.is_held_back, lambda: True
    batch = pressed.post("/v1/batches", body).json()["id"]
    pressed.press(0.85, L)
    storage.batches.is_held_back = by_overload

    def state() -> Any:
        return HTTP.get(f"{pressed.url}/v1/batches/{batch}").json()

    pressed.wait(lambda: state()["status"] == "in_progress")
    assert state()["request_counts"]["completed"] == 0
    pressed.pressure = 0.0
    pressed.wait(lambda: state()["status"] == "completed")


class Memory:
    """Memory that answers take while they run; beyond the bound one fails."""

    def __init__(self, live: Pressed, most: int) -> None:
        self.live, self.most, self.num_failed = live, most, 0
        live.shedding.pressures = lambda: {"memory": live.client.num_unfinished / most}  # type: ignore[method-assign]

    def flood(self, num: int) -> None:
        """Open streams one after the other."""
        with contextlib.ExitStack() as stack:
            for _ in range(num):
                body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
                stack.enter_context(HTTP.stream("POST", self.live.url + "/v1/completions", json=body, timeout=240))
                # As often as the server measures.
                self.live.wait(
                    lambda: (
                        self.live.shedding.overload.pressures.get("memory")
                        == self.live.client.num_unfinished / self.most
                    )
                )
                self.num_failed += self.live.client.num_unfinished > self.most


@pytest.mark.parametrize("is_on", [True, False])
def test_R_12_nothing_goes_beyond_its_bound_and_control_without_states_it_does(
    is_on: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_on:
        monkeypatch.setattr(Overload, "check", lambda self, work: None)
    with Pressed(tokenizer, delay=0.05) as live:
        memory = Memory(live, 10)
        memory.flood(14)
        assert (memory.num_failed > 0) is not is_on
        assert (live.shedding.overload.num_refused[Work.ANSWER] > 0) is is_on


def test_R_12_one_long_delay_of_the_loop_is_no_overload_and_a_lasting_one_is() -> None:
    sheds = Shedding({"lag_seconds": 1.0, "memory_bytes": 2**60})
    sheds.sample(30.0)
    sheds.sample(0.0)
    assert sheds.overload.state is N
    for _ in range(shedding.NUM_LAGS):
        sheds.sample(0.95)
    assert sheds.overload.state is A
    assert sheds.overload.why == "its event loop's delay is at 95% of the bound"


def test_what_is_measured_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # In a process in which nothing else frees memory meanwhile.
    code = "from headrace.serve import shedding; before = shedding.private_bytes(); ballast = bytearray(b'x') * 2**26"
    code += "; print(shedding.private_bytes() - before)"
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 2**25 < int(grown) < 2**27
    num = shedding.num_open_files()
    with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
        assert shedding.num_open_files() == num + 2
    assert shedding.usable_memory() > 2**20
    limit = tmp_path / "limit"
    monkeypatch.setattr(shedding, "CGROUP_LIMIT", limit)
    for text, expected in (("max\n", None), ("1048576\n", 2**20)):
        limit.write_text(text)
        assert (shedding.usable_memory() == 2**20) is (expected is not None)
    # Connections alone leave the reserve, which is half of the scale.
    sheds = Shedding()
    monkeypatch.setattr(shedding.resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr("headrace.serve.gates.connection.resource.getrlimit", lambda _: (1024, 1024))
    for num_open, pressure in ((100, 0.0), (960, 0.5), (1000, 0.8125), (1024, 1.0)):
        monkeypatch.setattr(shedding, "num_open_files", lambda num=num_open: num)
        assert sheds.pressures()["open_files"] == pressure

    def fails() -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shedding, "num_open_files", fails)
    sheds.sample(0.0)
    assert sheds.overload.state is P


@pytest.mark.parametrize("bounds", [{"memory": 1}, {"memory_bytes": 0}, {"lag_seconds": "1"}, {"lag_seconds": True}])
def test_bounds_that_make_no_sense_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="overload_config: .* memory_bytes, lag_seconds"):
        ServerConfig(overload_config=bounds)


def test_R_12_an_administrator_passes_where_keys_are_set(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with Pressed(tokenizer, api_key_file=rig.write_keys(tmp_path)) as live:
        live.press(2.0, P)
        root, alice = rig.bearer(rig.ROOT), rig.bearer(rig.ALICE)
        assert HTTP.get(live.url + "/inspect/requests", headers=root).status_code == 200
        assert HTTP.get(live.url + "/health/ready", headers=alice).status_code == 200
        assert HTTP.get(live.url + "/v1/models", headers=alice).status_code == 503
