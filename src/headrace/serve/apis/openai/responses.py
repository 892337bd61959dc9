"""OpenAI's /v1/responses: a chat as items and typed events, stored for a while, and continued by its id.

A request becomes a `ChatCall` in `responses_input`; its answer becomes items and events in `responses_events`. Stored
responses live in `serve.storage.store`, bounded, the oldest giving way. Raises `HeadraceError`s; `add_routes` puts the
routes on an app.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.engine.generation import off_loop
from headrace.protocol.errors import ContextLengthError, HeadraceError, RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.files import PAGE, NotFoundError, page
from headrace.serve.apis.openai.responses_events import Output, encode
from headrace.serve.apis.openai.responses_input import (
    NamedItem,
    ResponsesRequest,
    chat_call,
    input_items,
    messages_of,
    read,
)
from headrace.serve.call import replies, reply_forms
from headrace.serve.call.answers import Answer
from headrace.serve.call.call import ChatCall
from headrace.serve.call.parsing import Warnings
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import error_body, json_response
from headrace.serve.storage.store import StorageError, Store, StoreFullError
from headrace.text.parts import Content, MessagePart

logger = logging.getLogger("headrace.server")

MAX_BACKGROUND = 256
DEFAULT_PAGE = 20
RUNNING = ("queued", "in_progress")


class ResponseAnswer:
    """A response that was accepted. Read it once, by `whole` or by `events`; `close` aborts what still runs."""

    def __init__(self, api: Responses, request: ResponsesRequest, chat: Answer, response: dict[str, Any]) -> None:
        self.api, self.request, self.chat, self.response = api, request, chat, response
        self.output = Output(response)
        self._num_told = 0
        self._num_reasoning = 0
        self._logprobs: list[dict[str, Any]] = []

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    async def whole(self) -> dict[str, Any]:
        """The response object at its end. Raises what the engine failed with."""
        try:
            async for _, parts in self.chat.parts():
                self._take(parts)
        except HeadraceError as error:
            self._fail(error)
            raise
        await self._count_reasoning()
        self._finish()
        return self.response

    async def events(self) -> AsyncIterator[bytes]:
        """The response as events. What the engine fails with becomes `response.failed`."""
        yield encode(self.output.whole("created"))
        yield encode(self.output.whole("in_progress"))
        try:
            async for _, parts in self.chat.parts():
                for event in self._take(parts):
                    yield encode(event)
        except HeadraceError as error:
            self._fail(error)
            yield encode(self.output.whole("failed"))
            return
        await self._count_reasoning()
        for event in self._finish():
            yield encode(event)

    def close(self) -> None:
        """Abort. A stored response that had not ended is "cancelled" then."""
        self.chat.close()
        if self.response["status"] in RUNNING:
            self.output.end("incomplete")
            self.response["status"] = "cancelled"
            self.api.keep(self.response)

    def _take(self, parts: list[MessagePart]) -> list[dict[str, Any]]:
        """The events of new parts. Log-probabilities of tokens go with the next text that comes."""
        state = self.chat.generation.states[0]
        fresh, self._num_told = state.logprobs[self._num_told :], len(state.logprobs)
        if self.chat.call.logprobs is not None:
            self._logprobs += replies.chat_logprobs(self.chat.tokenizer, fresh)["content"]
        events = self.output.take(parts, self._logprobs)
        if any(isinstance(part, Content) for part in parts):
            self._logprobs = []
        return events

    async def _count_reasoning(self) -> None:
        """Tokens of the reasoning's text. How the text came in pieces must not matter, so it is tokenised again."""
        texts = [item["content"][0]["text"] for item in self.output.items if item["type"] == "reasoning"]
        tokenizer = self.chat.tokenizer
        if texts and tokenizer is not None:
            count = lambda: sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)  # noqa: E731
            self._num_reasoning = await off_loop(sum(map(len, texts)), count)

    def _finish(self) -> list[dict[str, Any]]:
        """Close the response: its status, its usage, its place in the store."""
        cut = self.chat.finish_reason(0) == "length"
        if not self.output.items:
            # The answer is empty; clients still look for a message.
            events = self.output.take([Content("")], [])
        else:
            events = []
        events += self.output.end("incomplete" if cut else "completed")
        response = self.response
        response["status"] = "incomplete" if cut else "completed"
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = self._usage()
        response["timings"] = replies.timings(self.chat.groups)
        self.api.keep(response)
        return [*events, self.output.whole(response["status"])]

    def _fail(self, error: HeadraceError) -> None:
        _, body = error_body(error)
        self.output.end("incomplete")
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": body["error"]["message"]}
        self.api.keep(self.response)

    def _usage(self) -> dict[str, Any]:
        counts = replies.usage(self.chat.groups)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(self._num_reasoning, counts["completion_tokens"])},
            "total_tokens": counts["total_tokens"],
        }


class Responses:
    """The routes. `store` keeps the responses: `about` is empty, the body holds object, input and history."""

    def __init__(self, model: ServedModel, store: Store) -> None:
        self.model = model
        self.store = store
        self._background: dict[str, tuple[ResponseAnswer, asyncio.Task[None]]] = {}
        for response_id in store:
            self._settle(response_id)

    async def create(self, body: dict[str, Any]) -> ResponseAnswer:
        """Accept a response. Raises `HeadraceError`s of all kinds."""
        request, shared = read(body)
        self.model.check_model(request.model)
        stored = request.store is not False
        response_id = self.store.new_id()
        if not stored and shared.request_id is not None:
            response_id = self.store.prefix + shared.request_id
        if request.background and len(self._background) >= MAX_BACKGROUND:
            raise StoreFullError(f"background: {MAX_BACKGROUND} responses run there; wait for one")
        items = input_items(request, response_id.partition("_")[2])
        history = [] if request.previous_response_id is None else self._history(request.previous_response_id)
        earlier = [NamedItem("previous_response_id", item) for item in history]
        new = [NamedItem(f"input[{index}]", item) for index, item in enumerate(items)]
        chat = await self._chat(request, chat_call(request, shared), [*earlier, *new])
        response = self._object(request, chat, response_id)
        answer = ResponseAnswer(self, request, chat, response)
        if stored:
            try:
                self.store.put(response_id, {}, _encode(response, items, history))
            except BaseException:
                chat.close()
                raise
        return answer

    async def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """Create a response and read it to its end, as batches do: not stored unless the request says so."""
        answer = await self.create({"store": False} | body)
        try:
            return await answer.whole()
        except BaseException:
            answer.close()
            raise

    def run_in_background(self, answer: ResponseAnswer) -> dict[str, Any]:
        """Go on with an answer when its caller is gone. -> the response object as it is now."""

        async def run() -> None:
            try:
                await answer.whole()
            except HeadraceError as error:
                logger.info("response %s failed: %s", answer.id, error)
            except Exception:
                logger.exception("response %s failed", answer.id)
            finally:
                answer.close()
                self._background.pop(answer.id, None)

        self._background[answer.id] = answer, asyncio.ensure_future(run())
        return answer.response

    async def close(self) -> None:
        """End what runs in the background."""
        tasks = [task for _, task in self._background.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def get(self, response_id: str) -> dict[str, Any]:
        """Raises `NotFoundError`."""
        # A caller that may not see what is stored does not see what runs.
        if response_id in self._background and response_id in self.store:
            return self._background[response_id][0].response
        response: dict[str, Any] = self._entry(response_id)["response"]
        return response

    def items(self, response_id: str) -> list[dict[str, Any]]:
        """The input of a response, oldest first, without what came before it. Raises `NotFoundError`."""
        items: list[dict[str, Any]] = self._entry(response_id)["input"]
        return items

    def cancel(self, response_id: str) -> dict[str, Any]:
        """End a response that runs in the background. Raises `NotFoundError`, `RequestError`."""
        response = self.get(response_id)
        if not response["background"]:
            raise RequestError("response_id", response_id, "that of a response in the background")
        if response_id in self._background:
            answer, task = self._background[response_id]
            task.cancel()
            answer.close()
        return self.get(response_id)

    def delete(self, response_id: str) -> None:
        """Forget a response; one that runs in the background is ended. Raises `NotFoundError`."""
        if response_id not in self.store:
            raise NotFoundError("response", response_id)
        if response_id in self._background:
            self.cancel(response_id)
        self.store.delete(response_id)

    def keep(self, response: dict[str, Any]) -> None:
        """Store what became of a response, if it is stored and still there."""
        if response["id"] not in self.store:
            return
        try:
            entry = self._entry(response["id"])
            self.store.put(response["id"], {}, _encode(response, entry["input"], entry["history"]))
        except (StoreFullError, StorageError, NotFoundError) as error:
            # The caller gets its answer; what would be read again later is not the whole of it.
            logger.warning("response %s is not kept: %s", response["id"], error)
            self.store.discard(response["id"])

    async def _chat(self, request: ResponsesRequest, call: ChatCall, items: list[NamedItem]) -> Answer:
        """The chat that answers. With truncation "auto", the oldest items go until the rest fits."""
        while True:
            messages = messages_of(request.instructions, items)
            attempt = msgspec.structs.replace(call, messages=messages, warnings=Warnings(call.warnings))
            try:
                return await self.model.chat(attempt)
            except RequestError as error:
                if not isinstance(error, ContextLengthError) or request.truncation != "auto" or len(items) < 2:
                    raise
                items = items[max(1, len(items) // 8) :]
                # The output of a call that is gone has nothing to answer to.
                while len(items) > 1 and items[0].item.get("type") == "function_call_output":
                    items = items[1:]

    def _history(self, response_id: str) -> list[dict[str, Any]]:
        """Return the input and output of a response. Raises `NotFoundError`, `RequestError` if it still runs."""
        entry = self._entry(response_id)
        if entry["response"]["status"] in RUNNING or response_id in self._background:
            raise RequestError("previous_response_id", response_id, "that of a response which has ended")
        return [*entry["history"], *entry["input"], *entry["response"]["output"]]

    def _entry(self, response_id: str) -> dict[str, Any]:
        if response_id not in self.store:
            raise NotFoundError("response", response_id)
        try:
            entry: dict[str, Any] = msgspec.json.decode(self.store.body(response_id))
        except (FileNotFoundError, msgspec.DecodeError) as error:
            logger.warning("the stored response %s can not be read: %s", response_id, error)
            raise NotFoundError("response", response_id) from error
        return entry

    def _settle(self, response_id: str) -> None:
        """A response that an earlier server left unfinished stays so."""
        try:
            response = self._entry(response_id)["response"]
        except (NotFoundError, StorageError):
            return  # the log has why
        if response["status"] in RUNNING:
            error = {"code": "server_error", "message": "the server ended before this response did"}
            self.keep(response | {"status": "failed", "error": error})

    def _object(self, request: ResponsesRequest, chat: Answer, response_id: str) -> dict[str, Any]:
        params = chat.generation.states[0].request.params
        form = {"type": "text"} if request.text is None or request.text.format is None else request.text.format
        reasoning = request.reasoning
        response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": bool(request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": self.model.name,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": params.temperature,
            "text": {"format": msgspec.to_builtins(form), "verbosity": "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_shown_tool(tool) for tool in request.tools or []],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
            "seed": params.seed,
        }
        return response | chat.call.warnings.reply()


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": False, "parameters": None} | tool


def _encode(response: dict[str, Any], items: list[dict[str, Any]], history: list[dict[str, Any]]) -> bytes:
    return msgspec.json.encode({"response": response, "input": items, "history": history})


def add_routes(app: FastAPI, responses: Responses) -> None:
    """/v1/responses."""

    async def create(request: Request) -> Any:
        """OpenAI's responses: items in, items or typed events out."""
        answer = await responses.create(await routing.body(request))
        if answer.request.background:
            return json_response(responses.run_in_background(answer))
        return await routing.deliver(request, answer)

    async def get(request: Request) -> Response:
        """A stored response."""
        if request.query_params.get("stream", "false") != "false":
            raise RequestError("stream", request.query_params["stream"], "false: a stored response is read whole")
        return json_response(responses.get(request.path_params["response_id"]))

    async def delete(request: Request) -> Response:
        """Delete a stored response."""
        response_id = request.path_params["response_id"]
        responses.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        """End a response that runs in the background."""
        return json_response(responses.cancel(request.path_params["response_id"]))

    async def input_items(request: Request) -> Response:
        """What a stored response was asked."""
        items = responses.items(request.path_params["response_id"])
        return json_response(page(items, request, DEFAULT_PAGE))

    form, one = reply_forms.ResponseObject, "/v1/responses/{response_id}"
    routing.post(app, "/v1/responses", create, takes=ResponsesRequest, gives=form, streams="text/event-stream")
    routing.get(app, one, get, gives=form, query=("stream",))
    routing.add(app, one, delete, ("DELETE",), gives=reply_forms.Deleted)
    routing.post(app, f"{one}/cancel", cancel, gives=form)
    routing.get(app, f"{one}/input_items", input_items, gives=reply_forms.InputItems, query=PAGE)
