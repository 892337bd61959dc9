"""The second names of routes: the paths under which other servers offer a route that has another path here.

`add_routes` puts them on an application that has all other routes. Called by `serve.app`.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from headrace.serve import routing

ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/score": "/v1/score",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/v1/health": "/health",
}
"""Each alias (llama-server's, vLLM's and Cohere's), and the path that it stands for. `/completions` and `/embeddings`
are not aliases: there llama-server has an API with other bodies; nor is `/rerank`, where TEI has one."""


def add_routes(app: Starlette) -> None:
    """Add the aliases, with the methods, the bodies and the replies of their targets. Raises KeyError for a target that
    is not there."""
    routes = {route.path: route for route in app.routes if isinstance(route, Route)}
    for alias, path in ALIASES.items():
        route = routes[path]
        app.add_route(alias, route.endpoint, sorted(route.methods or ()))
        operations = routing.operations(app)
        operations += [each._replace(path=alias) for each in operations if each.path == path]
