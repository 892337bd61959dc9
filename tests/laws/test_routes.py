"""docs/routes.md has every route of the server, and the reason for each that it does not serve."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from tests.laws.rules import ROOT
from tests.programs import routes

from headrace.serve import routing

PAGE = ROOT / "docs" / "routes.md"


@pytest.fixture(scope="module")
def app() -> Starlette:
    return routes.application()


def test_the_page_is_up_to_date(app: Starlette) -> None:
    assert PAGE.read_text(encoding="utf-8") == routes.page(app), "docs/routes.md is stale: make docs"


def test_every_route_has_its_row_and_its_reason(app: Starlette) -> None:
    assert routes.missing(app) == []
    text = PAGE.read_text(encoding="utf-8")
    paths = {getattr(route, "path", "").replace(":path}", "}") for route in app.routes}
    assert [path for path in paths if f" {path}`" not in text] == []


def test_control_a_route_that_is_forgotten_is_noticed(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    other = routes.application()
    routing.get(other, "/forgotten", lambda: None, summary="x")
    assert PAGE.read_text(encoding="utf-8") != routes.page(other)
    routing.post(other, "/undone", lambda: None, summary="x", unserved=True)
    assert routes.missing(other) == ["/undone has no reason"]
    monkeypatch.setitem(routes.NOT_SERVED, "/v1/models", ("OpenAI", "x"))
    assert routes.missing(app) == ["/v1/models is served"]
