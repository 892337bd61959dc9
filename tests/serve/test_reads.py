"""Reading changes nothing: no GET, HEAD or OPTIONS of any route loads, unloads or wakes a model, in any state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.security import rig
from tests.serve.test_models_folder import Folded, write_model
from tests.support.server import HTTP, Live, inproc

from headrace.serve import loading
from headrace.serve.call.models import ModelSet
from headrace.text.tokenizer import Tokenizer

NAMES = ("a", "b:latest", "nope", "")
LOOKUPS = {"/props", "/slots", "/server_info", "/tokenizer_info"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("a", "b"):
        write_model(folder / name)
    return folder


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "ProcessClient", lambda engine, server: inproc())


def use(live: Live, name: str) -> None:
    reply = live.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})
    assert reply.status_code == 200, reply.text


def sleep(live: Live) -> None:
    assert live.post("/sleep", None).status_code == 200


STATES: dict[str, tuple[dict[str, Any], Any]] = {
    "none is loaded": ({}, lambda live: None),
    "one is loaded, and there is room for one": ({"models_max": 1}, lambda live: use(live, "a")),
    "one stays": ({"stays": True}, lambda live: None),
    "one stays and one is loaded": ({"stays": True}, lambda live: use(live, "b")),
    "all sleep": ({"stays": True}, sleep),
    "they sleep until a call comes": (
        {"stays": True, "sleep_idle_seconds": 0},
        lambda live: live.wait(lambda: bool(live.app.state.lifespan.models.is_sleeping)),
    ),
}


@pytest.fixture(params=STATES)
def live(request: pytest.FixtureRequest, root: Path, tokenizer: Tokenizer) -> Iterator[Live]:
    settings, prepare = STATES[request.param]
    with Folded(root, tokenizer, **settings) as result:
        prepare(result)
        yield result


def state(models: ModelSet) -> dict[str, Any]:
    """All of the models that a call could change."""
    names = {entry.name: (entry.stop is not None, entry.last_use) for entry in models.loaded()}
    alive = [running.client.is_alive for running in models.running]
    return {"loaded": names, "alive": alive, "is_sleeping": models.is_sleeping}


def changes(live: Live, paths: Iterable[str]) -> set[str]:
    """The routes of which some reading call changed the models."""
    models: ModelSet = live.app.state.lifespan.models
    changed = set()
    for path in sorted(paths):
        for method in ("GET", "HEAD", "OPTIONS"):
            for name in NAMES:
                before = state(models)
                target, query = re.sub(r"{\w+(?::path)?}", name or "x-1", path), f"model={name}" if name else ""
                status = rig.call(live, method, target, query=query).status_code
                assert status in (200, 400, 403, 404, 405, 501, 503), (method, path, name)
                if state(models) != before:
                    changed.add(path)
    return changed


def test_S_33_reading_loads_unloads_and_wakes_no_model(live: Live) -> None:
    assert len([path for method, path in rig.routes(live.app) if method == "GET"]) > 30
    assert changes(live, {path for _, path in rig.routes(live.app)}) == set()


def test_S_33_control_lookups_that_load_are_noticed(
    root: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = ModelSet.hold
    monkeypatch.setattr(ModelSet, "hold", lambda self, fields, wakes=True: hold(self, fields, True))
    with Folded(root, tokenizer, models_max=1) as live:
        assert changes(live, {*LOOKUPS, "/v1/models", "/v1/models/{name:path}", "/api/ps"}) == LOOKUPS


def test_a_lookup_says_that_the_model_is_not_loaded_and_answers_once_it_is(root: Path, tokenizer: Tokenizer) -> None:
    with Folded(root, tokenizer) as live:
        for path in sorted(LOOKUPS):
            reply = HTTP.get(f"{live.url}{path}?model=a")
            error = reply.json()["error"]
            # As llama-server's router has it with autoload=false.
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), path
            assert "'a' is not allowed; it must be a model that is loaded; it is not" in error["message"]
        use(live, "a")
        for path in sorted(LOOKUPS):
            assert HTTP.get(f"{live.url}{path}?model=a").status_code == 200, path


FOREIGN = [
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_S_33_a_page_of_another_place_reads_no_route(root: Path, tokenizer: Tokenizer, headers: dict[str, str]) -> None:
    with Folded(root, tokenizer, stays=True) as live:
        routes = [(method, path) for method, path in rig.routes(live.app) if method in rig.READS]
        assert {rig.call(live, *each, headers=headers).status_code for each in routes} == {403}


def test_S_33_a_link_on_any_page_leads_to_what_measures_nothing(root: Path, tokenizer: Tokenizer) -> None:
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-user": "?1"}
    with Folded(root, tokenizer, stays=True) as live:
        for path in ("/", "/inspect", "/docs", "/v1/models", "/props", "/health"):
            assert rig.call(live, "GET", path, headers=visit).status_code == 200, path
        for path in ("/inspect/live", "/inspect/limits", "/inspect/numbers", "/server_info"):
            assert rig.call(live, "GET", path, headers=visit).status_code == 403, path
        # A form is no link.
        assert rig.call(live, "POST", "/v1/completions", headers=visit).status_code == 403
        # What the reader types, and what the server's own page asks for, is answered.
        for site in ("none", "same-origin"):
            headers = visit | {"sec-fetch-site": site}
            assert rig.call(live, "GET", "/inspect/limits", headers=headers).status_code == 200
