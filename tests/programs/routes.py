"""The table of docs/routes.md: each route of the server, and those of other servers that are not here, with the reason.

`python -m tests.programs.routes docs/routes.md` (`make docs`) writes the page from the routes of an application with
all of its flags set. `tests/laws/test_routes.py` fails when the page is stale, or a route of `NOT_SERVED` is served.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from tests.support.server import inproc

from headrace.engine.library.model_folder import ModelFolder
from headrace.protocol.config import ServerConfig
from headrace.serve import routing
from headrace.serve.aliases import ALIASES
from headrace.serve.apis.anthropic import reply as anthropic
from headrace.serve.apis.llama_server import paths as llama_server
from headrace.serve.apis.llama_server import reply as llama_reply
from headrace.serve.apis.ollama import reply as ollama
from headrace.serve.apis.openai import responses_paths
from headrace.serve.apis.tei import paths as tei
from headrace.serve.app import create_app
from headrace.serve.errors import OPENAI, Api
from headrace.serve.gates.auth import class_of, is_public

APIS: dict[str, Api] = {
    "OpenAI, vLLM": OPENAI,
    "Anthropic": anthropic.API,
    "Ollama": ollama.API,
    "llama-server": llama_reply.API,
    "TEI": tei.API,
}
REASONS = {
    **llama_server.INSTEAD,
    "/v1/responses/compact": responses_paths.NO_COMPACTION,
    "/api/push": "models are not sent anywhere",
}
"""Why routes that reply with a 501 do so."""

TEXT_ONLY = "models write text only, and read text and pictures"
PIXELS = "rows of pictures are known by their pixels, and never go stale"
ONE_PROCESS = "one process computes the model"
NOT_SERVED: dict[str, tuple[str, str]] = {
    "/v1/audio/transcriptions": ("OpenAI, vLLM", TEXT_ONLY),
    "/v1/audio/translations": ("OpenAI, vLLM", TEXT_ONLY),
    "/v1/audio/speech": ("OpenAI", TEXT_ONLY),
    "/v1/images/generations": ("OpenAI", TEXT_ONLY),
    "/v1/images/edits": ("OpenAI", TEXT_ONLY),
    "/v1/realtime": ("OpenAI, vLLM", TEXT_ONLY),
    "/v1/moderations": ("OpenAI", "`/classify` has the classes of a classifier"),
    "/v1/fine_tuning/jobs": ("OpenAI", "models are not trained here"),
    "/v1/uploads": ("OpenAI", "files of up to 64 MiB are sent to `/v1/files` whole"),
    "/v1/vector_stores": ("OpenAI", "nothing is searched here"),
    "/v1/assistants": ("OpenAI", "OpenAI itself has replaced it by `/v1/responses`"),
    "/v1/threads": ("OpenAI", "OpenAI itself has replaced it by `/v1/conversations`"),
    "/v1/chat/completions/{completion_id}": ("OpenAI", "completions are not stored; responses are"),
    "/v1/chat/completions/render": ("vLLM", "`/apply-template` and `/tokenize` show the prompt of a chat"),
    "/v1/completions/render": ("vLLM", "`/tokenize` shows the token ids of a prompt"),
    "/inference/v1/generate": ("vLLM", "`/v1/completions` takes token ids, and returns them with `return_token_ids`"),
    "/reset_mm_cache": ("vLLM", PIXELS),
    "/reset_encoder_cache": ("vLLM", PIXELS),
    "/collective_rpc": ("vLLM", "a call can not name code to run"),
    "/start_profile": ("vLLM", "`python -m bench.tape` and `headrace bench` measure; nothing is profiled in a server"),
    "/stop_profile": ("vLLM", "as `/start_profile`"),
    "/scale_elastic_ep": ("vLLM", ONE_PROCESS),
    "/is_scaling_elastic_ep": ("vLLM", ONE_PROCESS),
    "/get_world_size": ("vLLM", ONE_PROCESS),
    "/update_weights": ("vLLM", "weights are those of the start"),
    "/v1/messages/batches": ("Anthropic", "`/v1/batches` answers files of requests"),
    "/v1/complete": ("Anthropic", "Anthropic itself has replaced it by `/v1/messages`"),
    "/models/load": ("llama-server", "a model of the folder is loaded when a call names it"),
    "/models/unload": ("llama-server", "`POST /api/generate` with the model's name and `keep_alive` 0 unloads it"),
    "/v1/chat/completions/control": ("llama-server", "the sampling of an answer is that of its request"),
    "/tools": ("llama-server", "tools are run by clients"),
    "/embed_all": ("TEI", "a text has one vector"),
    "/cors-proxy": ("llama-server", "the server fetches nothing for a client"),
}
"""Routes of other servers that there are none of here: whose they are, and why."""


def application() -> Starlette:
    """Return the server's application with all routes that a flag may add. It is not started."""
    folder = tempfile.mkdtemp(prefix="headrace-routes-")
    try:
        server = ServerConfig(slot_save_path=folder, models_dir=folder)
        return create_app(inproc(), server, "builtin", folder=ModelFolder(folder))
    finally:
        Path(folder).rmdir()


def rows(app: Starlette) -> list[tuple[str, ...]]:
    """Return the cells of each route of an application: methods and path, API, class of keys, and what it does."""
    cells = []
    names = {id(api): name for name, api in APIS.items()}
    by_path: dict[tuple[str, str], list[routing.Operation]] = {}
    for operation in routing.operations(app):
        by_path.setdefault((operation.path, operation.summary), []).append(operation)
    for (path, summary), operations in sorted(by_path.items()):
        first = operations[0]
        methods = ", ".join(operation.method for operation in operations)
        access = "none" if is_public(path) else class_of(first.method, path)
        text = summary.rstrip(".").replace("|", "\\|")
        if path in ALIASES:
            text = f"another name of `{ALIASES[path]}`"
        if first.unserved:
            text = f"**501**: {REASONS[path]}"
        plain_path = re.sub(r":\w+}", "}", path)
        cells.append((f"`{methods} {plain_path}`", names[id(first.api)], access, text))
    return cells


def missing(app: Starlette) -> list[str]:
    """Return what of the tables does not fit an application: routes without a reason, and reasons without a route."""
    unserved = {operation.path for operation in routing.operations(app) if operation.unserved}
    served = {operation.path for operation in routing.operations(app)}
    # The route of slots is there with its flag.
    wrong = [f"{path} has no reason" for path in unserved - set(REASONS)]
    wrong += [f"{path} is not there" for path in set(REASONS) - served]
    return wrong + [f"{path} is served" for path in set(NOT_SERVED) & (served - unserved)]


def page(app: Starlette) -> str:
    """Return the text of docs/routes.md."""
    table: list[Any] = ["| route | API | key | what it does |", "|---|---|---|---|"]
    table += [f"| {' | '.join(row)} |" for row in rows(app)]
    others = ["| route | of | why not |", "|---|---|---|"]
    others += [f"| `{path}` | {source} | {reason} |" for path, (source, reason) in sorted(NOT_SERVED.items())]
    return "\n".join(
        [
            "# Routes",
            "",
            "Every route of the server, and the routes of other servers that it does not have. Written by `make docs`;",
            "a test fails when the page is stale. `key` is the class of keys that opens a route",
            "([security](security.md#keys)); GET goes with HEAD. `POST /slots/{slot_id}` is a 501 without",
            "`--slot-save-path`; without `--models-dir`, so are the routes that change models, or there are none. The",
            "bodies and replies are in `/openapi.json` and, for people, in `/docs`.",
            "",
            *table,
            "",
            "## Not here",
            "",
            "A call of one of these is a 404 that names the closest route.",
            "",
            *others,
            "",
        ]
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(application()), encoding="utf-8")
