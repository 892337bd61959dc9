"""`GET /v1/requests/{id}/explain`: where the time of a call went; for its caller and for administrators."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.applications import Starlette

from headrace.insight.explain import Explanation
from headrace.serve import routing
from headrace.serve.errors import CallError


class Explanations(msgspec.Struct, kw_only=True):
    """One explanation for each answer of the call."""

    object: str = "list"
    data: list[Explanation]


def add_routes(app: Starlette, of_call: Callable[[str], list[Explanation]]) -> None:
    """Add the route. `of_call` is `Explainers.of_call`."""

    def explain(name: str) -> Explanations:
        """Where the time of a call went."""
        data = of_call(name)
        if not data:
            raise CallError(404, "not_found", f"no call {name[:80]!r} of this caller is among the last that ended")
        return Explanations(data=data)

    routing.get(app, "/v1/requests/{name}/explain", explain, gives=Explanations)
