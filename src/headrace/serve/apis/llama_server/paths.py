"""The routes of llama-server's API, and replies that name an alternative for routes that are not served."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

from msgspec import UNSET
from starlette.applications import Starlette
from starlette.responses import Response

from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.llama_server import reply
from headrace.serve.apis.llama_server.infill import Infill
from headrace.serve.apis.llama_server.reply import API, COUNTERS, UNSERVED
from headrace.serve.apis.llama_server.request import (
    EmbeddingRequest,
    InfillRequest,
    LlamaCompletionRequest,
    SlotRequest,
    TemplateRequest,
)
from headrace.serve.apis.llama_server.service import LlamaServer
from headrace.serve.apis.llama_server.slots import Folder, Slots
from headrace.serve.call.adapters import AdapterCard, AdapterScale, ServedAdapters, scales_in
from headrace.serve.call.models import ModelSet
from headrace.serve.call.parsing import convert
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import CallError

INSTEAD = {
    "/slots/{slot_id}": "start the server with --slot-save-path FOLDER, where session files are kept",
    "/slots": "start the server without --no-slots",
}
"""The alternative to each route that is not served. The route of slots is served with the flag."""
ACTIONS = ("save", "restore", "erase")
KEPT = (
    "n_erased: the slot has no tokens any more, but the prefix cache, which all slots share, keeps their blocks until "
    "it needs the room; a request with cache_prompt false finds none there, and leaves none for others"
)


def add_routes(app: Starlette, models: ModelSet, folder: Folder | None = None, shows_slots: bool = True) -> None:
    """Add `/completion`, `/infill`, `/embedding`, `/apply-template`, the counters of chats, `/props`, `/slots`
    and `/lora-adapters`. `folder` keeps the session files of slots, None if there are none; `shows_slots`: `GET /slots`
    is served."""
    slots: WeakKeyDictionary[ServedModel, Slots] = WeakKeyDictionary()

    def slots_of(model: ServedModel) -> Slots | None:
        if folder is not None and model not in slots:
            slots[model] = Slots(model.front.client, folder, model.digest)
        return slots.get(model)

    def llama_of(model: ServedModel) -> LlamaServer:
        return LlamaServer(model, slots_of(model))

    llama = models.bind(LlamaServer, llama_of)
    sleeping = models.bind(LlamaServer, llama_of, wakes=False)
    infill = models.bind(Infill, lambda model: Infill(llama_of(model)))

    def unserved(path: str, *parameters: str) -> Response:
        """Not done by this server."""
        raise CallError(
            501, UNSERVED, f"{path.format(slot_id=''.join(parameters))}: not supported here; {INSTEAD[path]}"
        )

    async def props(query: Mapping[str, str]) -> reply.LlamaProps:
        """The served model, and the defaults of its requests."""
        described: reply.LlamaProps = await cast(Any, sleeping.props)(query)
        described.is_sleeping = models.is_sleeping
        return described

    def adapters() -> list[AdapterCard]:
        """The adapters that are loaded, with their scales for requests that name the model itself."""
        return [] if models.default is None else models.default.served.adapters.cards()

    async def set_scales(body: list[Any]) -> reply.LlamaSuccess:
        """Set the scales of adapters, for later requests that name the model itself."""
        entries = scales_in(body, "body")
        (ServedAdapters() if models.default is None else models.default.served.adapters).set_scales(entries, "body")
        return reply.LlamaSuccess(success=True)

    async def set_props(body: dict[str, Any]) -> reply.LlamaSuccess:
        """Change settings of the server; there are none yet, as in llama-server."""
        for name, value in body.items():
            raise RequestError(name[:80], value, "left out: settings are flags of headrace serve")
        return reply.LlamaSuccess(success=True)

    completion: dict[str, Any] = {
        "gives": reply.LlamaResult | list[reply.LlamaResult],
        "streams": routing.EVENT_STREAM,
        "chunks": (reply.LlamaPart, reply.LlamaResult),
    }
    for path in ("/completion", "/completions"):
        routing.post(app, path, llama.completion, API, takes=LlamaCompletionRequest, **completion)
    routing.post(app, "/infill", infill.create, API, takes=InfillRequest, **completion)
    for path in ("/embedding", "/embeddings"):
        routing.post(app, path, llama.embedding, API, takes=EmbeddingRequest, gives=list[reply.LlamaVector])
    routing.post(app, "/apply-template", llama.apply_template, API, takes=TemplateRequest, gives=reply.LlamaPrompt)
    for path in COUNTERS:
        routing.post(app, path, llama.count_tokens, API, takes=TemplateRequest, gives=reply.LlamaTokens)
    routing.get(app, "/props", props, API, gives=reply.LlamaProps, query=("model",))
    routing.post(app, "/props", set_props, API, takes=dict[str, Any], gives=reply.LlamaSuccess)
    if shows_slots:
        routing.get(app, "/slots", sleeping.slots, API, gives=list[reply.LlamaSlot], query=("model", "fail_on_no_slot"))
    else:
        routing.get(app, "/slots", functools.partial(unserved, "/slots"), API, unserved=True)
    routing.get(app, "/lora-adapters", adapters, API, gives=list[AdapterCard])
    listed: dict[str, Any] = {"takes": list[AdapterScale], "read": functools.partial(routing.body, is_list=True)}
    routing.post(app, "/lora-adapters", set_scales, API, gives=reply.LlamaSuccess, **listed)
    if folder is None:
        path = "/slots/{slot_id}"
        routing.post(app, path, functools.partial(unserved, path), API, unserved=True)
    else:
        _add_slot_actions(app, models, slots_of)


def _add_slot_actions(app: Starlette, models: ModelSet, slots_of: Callable[[ServedModel], Slots | None]) -> None:
    async def act(
        model: ServedModel, slot_id: str, body: dict[str, Any], query: Mapping[str, str]
    ) -> reply.LlamaSlotAction:
        """Save the tokens of a slot to a session file, restore them from one, or erase them."""
        slots = cast(Slots, slots_of(model))
        action = query.get("action", "")
        if action not in ACTIONS:
            raise RequestError("action", action, "one of " + ", ".join(ACTIONS))
        if not re.fullmatch("[0-9]{1,6}", slot_id):
            raise RequestError("id_slot", slot_id[:80], f"a slot from 0 to {slots.num - 1}")
        place = int(slot_id)
        slots.check_id(place)
        filename = convert(SlotRequest, body).filename
        if action == "erase":
            num = slots.erase(place)
            return reply.LlamaSlotAction(id_slot=place, n_erased=num, warnings=[KEPT] if num else UNSET)
        moved, spent = await (slots.save if action == "save" else slots.restore)(place, filename)
        done = reply.LlamaSlotAction(id_slot=place, filename=filename or "")
        if action == "save":
            done.n_saved, done.n_written = len(moved.token_ids), moved.num_bytes
            done.timings = reply.SlotTimings(save_ms=spent)
        else:
            done.n_restored, done.n_read = len(moved.token_ids), moved.num_bytes
            done.timings = reply.SlotTimings(restore_ms=spent)
        return done

    about: dict[str, Any] = {"takes": SlotRequest, "gives": reply.LlamaSlotAction, "query": ("action",)}
    # An erase needs no file, and comes without a body.
    read = functools.partial(routing.body, may_lack=True)
    routing.post(app, "/slots/{slot_id}", models.bound(act), API, read=read, **about)
