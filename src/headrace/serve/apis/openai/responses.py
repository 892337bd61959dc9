"""OpenAI's /v1/responses: a chat as items and typed events, which is stored for a while and can be continued by its id.

A request becomes a `ChatCall` in `responses_input`; its answer becomes items and events in `responses_events`. Stored
responses live in `serve.storage.store`, bounded, the oldest giving way. Raises `HeadraceError`s. Knows no HTTP;
`responses_paths` has the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from starlette.responses import Response

from headrace.engine.generation import off_loop, width
from headrace.protocol.errors import ContextLengthError, HeadraceError, RequestError
from headrace.serve import errors
from headrace.serve.apis.openai import responses_replay as replay
from headrace.serve.apis.openai.conversations import Conversations
from headrace.serve.apis.openai.files import NotFoundError, size_of
from headrace.serve.apis.openai.reply import Deleted
from headrace.serve.apis.openai.responses_ends import Ends, is_not_kept
from headrace.serve.apis.openai.responses_events import (
    CachedTokens,
    Event,
    IncompleteDetails,
    InputTokens,
    Output,
    ReasoningTokens,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    response_object,
)
from headrace.serve.apis.openai.responses_input import (
    OUTPUTS,
    REFERENCE,
    NamedItem,
    ResponsesRequest,
    chat_call,
    conversation_of,
    input_items,
    messages_of,
    read,
    response_of_item,
    without_hosted,
)
from headrace.serve.apis.openai.responses_stored import StoredResponses, past_item, written_entry
from headrace.serve.apis.openai.responses_tools import ClientTools
from headrace.serve.call.call import Answer, ChatCall, spelled
from headrace.serve.call.parsing import Warnings
from headrace.serve.call.replies import ChatTokenLogprob, chat_logprobs, timings, usage
from headrace.serve.call.service import Explain, ServedModel, no_explanations
from headrace.serve.gates.overload import Overload, OverloadError, Work
from headrace.serve.routing import Readable, free_lists, json_in_parts, json_pieces, large_event, large_response
from headrace.serve.storage.space import StorageError
from headrace.serve.storage.store import Store, StoreFullError
from headrace.serve.storage.writers import Writers
from headrace.text.outputs import Content, MessagePart, TextDelta
from headrace.text.pictures.marks import Pictures

logger = logging.getLogger("headrace.server")

MAX_BACKGROUND = 256


class ResponseAnswer(Readable):
    """The answer to an accepted request for a response."""

    answer: Answer

    def __init__(
        self, api: Responses, request: ResponsesRequest, chat: Answer, entry: replay.StoredResponse, tools: ClientTools
    ) -> None:
        super().__init__(chat, bool(request.stream))
        self.api, self.request, self.entry, self.response = api, request, entry, entry.response
        response = entry.response
        self.id = response.id
        self.output = Output(response, tools)
        entry.cuts = self.output.cuts
        self.change = asyncio.Event()
        self.explain: Explain = no_explanations
        self.encoding: Callable[[int, Callable[[], int]], Awaitable[int]] = off_loop
        self._num_reasoning = 0
        self._logprobs: list[ChatTokenLogprob] = []
        # The readers of the response: the answer itself, and the streams of one in the background.
        self._num_readers = 1

    async def whole(self) -> ResponseObject:
        try:
            async for _, piece, parts in self.answer.parts():
                await self._take(piece, parts)
        except Exception as error:
            await self._fail(error)
            raise
        await self._count_reasoning()
        await self._finish()
        return self.response

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as events. An error of the engine becomes `response.failed`."""
        yield await self._encode(self.output.whole("created"))
        yield await self._encode(self.output.whole("in_progress"))
        try:
            async for _, piece, parts in self.answer.parts():
                for event in await self._take(piece, parts):
                    yield await self._encode(event)
        except HeadraceError as error:
            await self._fail(error)
            yield await self._encode(self.output.whole("failed"))
            return
        await self._count_reasoning()
        for event in await self._finish():
            yield await self._encode(event)
        encoded = await off_loop(self.answer.size, lambda: b"".join(json_pieces(self.response)))
        yield await self._encode(self.output.whole(self.response.status, encoded))

    async def _encode(self, event: Event) -> bytes:
        """Return one server-sent event, named after its type."""
        rows = event.logprobs or []
        size = self.answer.size if event.delta is UNSET else len(rows) * width(rows)
        return await large_event(event, size, b"event: %b\ndata: " % event.type.encode(), keeps_body=True)

    def close(self) -> None:
        """Abort. A stored response that had not ended is "cancelled" then."""
        super().close()
        if self.response.status in replay.RUNNING:
            self.output.end("incomplete")
            self.response.status = "cancelled"
            self._wake()
            self.api.ends.keep_later(self)
        # The task of a response in the background leaves it itself, and a whole reply is freed when it is sent.
        if not self.request.background and (self.stream or self.response.status not in ("completed", "incomplete")):
            self.leave()

    def follow(self, after: int = -1) -> replay.StoredStream:
        """Return the events of a response that runs in the background."""
        self._num_readers += 1
        return replay.StoredStream(self.response, self.output.cuts, after, lambda: self.change, self.leave)

    def leave(self) -> None:
        """Note the end of a reader, the answer or a stream. The last frees a stored response in slices, on a thread."""
        self._num_readers -= 1
        if not self._num_readers:
            keeping, loop = self.api.ends.tasks.get(self.id), asyncio.get_running_loop()
            if keeping is None:
                loop.run_in_executor(None, free_lists, self.response)
            else:
                keeping.add_done_callback(lambda _: loop.run_in_executor(None, free_lists, self.response))

    def _wake(self) -> None:
        """Wake the readers of the response while it runs."""
        self.change.set()
        self.change = asyncio.Event()

    async def _take(self, piece: TextDelta, parts: list[MessagePart]) -> list[Event]:
        """Return the events of new parts. The log-probability of a token goes with the next text that comes; with
        log-probabilities a piece has one token at most, so the cut of the answer into pieces does not matter."""
        if self.answer.call.logprobs is not None:
            wide = len(piece.logprobs) * width(piece.logprobs)
            self._logprobs += await off_loop(wide, lambda: chat_logprobs(self.answer.tokenizer, piece.logprobs))
        events = self.output.take(parts, self._logprobs)
        if any(isinstance(part, Content) for part in parts):
            self._logprobs = []
        self._wake()
        return events

    async def _count_reasoning(self) -> None:
        """Count the tokens of the reasoning, whose text is tokenised again: its cut into pieces must not matter. There
        are 0 where the tokenizer takes too long."""
        texts = [item.part.text for item in self.output.items if item.type == "reasoning"]
        tokenizer = self.answer.tokenizer
        if texts and tokenizer is not None:
            count = lambda: sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)  # noqa: E731
            with contextlib.suppress(HeadraceError):
                self._num_reasoning = await self.encoding(sum(map(len, texts)), count)

    async def _finish(self) -> list[Event]:
        """Close the response: its status, its usage, its place in the store. Returns the events that close items."""
        cut = self.answer.finish_reason(0) == "length"
        events: list[Event] = []
        # An empty answer has a message too, for clients expect one. The log-probabilities of tokens without text, such
        # as the one that ends an answer, go with an empty text, as in a chat.
        if not self.output.items or (self._logprobs and self.output.is_in_message):
            events = self.output.take([Content("")], self._logprobs)
        events += self.output.end("incomplete" if cut else "completed")
        response = self.response
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            response.completed_at = int(time.time())
        response.usage = self._usage()
        response.timings = timings(self.answer.groups)
        if self.answer.call.explain:
            states = self.answer.generation.states
            response.explain = self.explain([state.request.request_id for state in states])
        self._wake()
        await self.api.ends.add_to_conversation(self)
        await self.api.ends.keep(self)
        return events

    async def _fail(self, error: Exception) -> None:
        _, body = errors.error_body(error)
        self.output.end("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseError(code="server_error", message=body.message)
        self._wake()
        await self.api.ends.keep(self)

    def warn(self, field: str, why: str) -> None:
        """Add a warning to the response."""
        warnings = self.answer.call.warnings
        warnings.add(field, why)
        self.response.warnings = warnings.reply()

    def _usage(self) -> ResponseUsage:
        counts = usage(self.answer.groups)
        num_cached = counts.prompt_tokens_details.cached_tokens
        num_reasoning = min(self._num_reasoning, counts.completion_tokens)
        return ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=CachedTokens(cached_tokens=num_cached, cache_write_tokens=0),
            output_tokens=counts.completion_tokens,
            output_tokens_details=ReasoningTokens(reasoning_tokens=num_reasoning),
            total_tokens=counts.total_tokens,
        )


class Responses:
    """The routes. `store` keeps the responses: the metadata is empty, the body holds object, input and history. Ids are
    made by the store: a caller's name for its request never names an entry. `conversations`: None where none are
    kept."""

    def __init__(
        self,
        store: Store,
        writers: Writers,
        conversations: Conversations | None = None,
        overload: Overload | None = None,
    ) -> None:
        self.conversations = conversations
        self._overload = overload or Overload()
        self.store, self.writers = store, writers
        self._stored = StoredResponses(store)
        self.ends = Ends(store, writers, conversations)
        self._background: dict[str, tuple[ResponseAnswer, asyncio.Task[None]]] = {}
        for response_id in store:
            self._settle(response_id)

    async def create(self, model: ServedModel, body: dict[str, Any]) -> ResponseAnswer:
        """Accept a response. Raises `HeadraceError`s of all kinds."""
        request, shared = read(body)
        model.check_model(request.model)
        stored = request.store is not False
        if request.background:
            self._overload.check(Work.LATER)
        response_id = self.store.new_id()
        if not stored and shared.request_id is not None:
            # The line of a batch gets the same id again when the batch is continued.
            digest = hashlib.blake2b(shared.request_id.encode("utf-8", "replace"), digest_size=16)
            response_id = self.store.prefix + digest.hexdigest()
        num_running = sum(running_id in self.store for running_id in self._background)
        if request.background and num_running >= MAX_BACKGROUND:
            raise StoreFullError(f"background: {MAX_BACKGROUND} responses run there; wait for one")
        items = await self._referenced(input_items(request, response_id.partition("_")[2]))
        history, named = await self._named(request, items)
        call, tools = chat_call(request, shared)
        chat = await self._chat(model, request, call, without_hosted(named, call.warnings), size_of(history))
        response = response_object(model.reply_name(request.model), request, chat, response_id)
        entry = replay.StoredResponse(response=response, input=items, history=history)
        answer = ResponseAnswer(self, request, chat, entry, tools)
        answer.explain, answer.encoding = model.explain, model.front.encoding
        if stored:
            try:
                if not request.background:
                    self._overload.check(Work.LATER)
                entry = answer.entry
                await self.writers.run(lambda: self.store.put(response_id, {}, written_entry(entry)))
            except (StorageError, StoreFullError, OverloadError) as error:
                if request.background:  # whose caller could not read it
                    answer.close()
                    raise
                is_not_kept(answer, error)
            except BaseException:
                answer.close()
                raise
        return answer

    async def count(self, model: ServedModel, body: dict[str, Any]) -> InputTokens:
        """The number of tokens in a response's prompt."""
        request, shared = read(body)
        history, named = await self._named(request, await self._referenced(input_items(request, "0")))
        call, _ = chat_call(request, shared)
        items = without_hosted(named, call.warnings)
        pictures = Pictures()
        work = functools.partial(messages_of, request.instructions, items, call.warnings, pictures)
        call = msgspec.structs.replace(call, messages=await off_loop(size_of(history), work), pictures=pictures)
        with spelled(call.spelling):
            # The parameters of the answer are checked, though no answer is made.
            call.engine_fields.params()
        _, token_ids = await model.chat_prompt(call)
        return InputTokens(input_tokens=len(token_ids), warnings=call.warnings.reply())

    async def _named(
        self, request: ResponsesRequest, items: list[dict[str, Any]]
    ) -> tuple[list[msgspec.Raw], list[NamedItem]]:
        """Return the items that came before a request's own, and all of them with their names in errors."""
        previous_id, conversation_id = request.previous_response_id, conversation_of(request)
        written: list[msgspec.Raw] = []
        if conversation_id is not None:
            if self.conversations is None:
                raise RequestError("conversation", conversation_id, "left out: none are kept here")
            written = await self.conversations.items(conversation_id)
        elif previous_id is not None:
            written = await self.writers.run(self._history, previous_id)
        field = "conversation" if previous_id is None else "previous_response_id"

        def earlier() -> tuple[list[msgspec.Raw], list[NamedItem]]:
            read = [past_item(item) for item in written]
            history = [msgspec.Raw(msgspec.json.encode(item)) for item in read]
            return history, [NamedItem(field, item) for item in read]

        history, named = await off_loop(size_of(written), earlier)
        return history, [*named, *(NamedItem(f"input[{index}]", item) for index, item in enumerate(items))]

    def run_in_background(self, answer: ResponseAnswer) -> ResponseObject:
        """Go on with an answer when its caller is gone. -> the response object as it is now."""

        async def run() -> None:
            try:
                await answer.whole()
            except HeadraceError as error:
                logger.info("response %s failed: %s", answer.id, error)
            except asyncio.CancelledError:
                raise
            except BaseException:  # pyo3 raises a panic as a BaseException
                logger.exception("response %s failed", answer.id)
            finally:
                answer.close()
                self._background.pop(answer.id, None)
                answer.leave()

        self._background[answer.id] = answer, asyncio.ensure_future(run())
        return answer.response

    async def close(self) -> None:
        """End the responses that run in the background."""
        tasks = [task for _, task in self._background.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self.ends.tasks.values(), return_exceptions=True)

    def _running(self, response_id: str) -> ResponseAnswer | None:
        """Return the answer if it runs in the background. A caller that may not see a stored response may not see it
        running."""
        if response_id in self._background and response_id in self.store:
            return self._background[response_id][0]
        return None

    async def read(self, response_id: str) -> Response:
        """Return a response as it is now, a stored one as it was written. Raises `NotFoundError`, `StorageError`."""
        answer = self._running(response_id)
        if answer is not None:
            return await large_response(replay.snapshot(answer.response), answer.answer.size)
        return json_in_parts(await self.writers.run(self._stored.parts, response_id))

    async def stream(self, response_id: str, starting_after: str | None) -> replay.StoredStream:
        """Return the events of a response after the one with a number. Raises the errors of `read`, and
        `RequestError`."""
        if starting_after is not None and not re.fullmatch("[0-9]{1,9}", starting_after):
            raise RequestError("starting_after", starting_after, "the sequence_number of an event")
        after = -1 if starting_after is None else int(starting_after)
        answer = self._running(response_id)
        if answer is not None:
            return answer.follow(after)
        entry = await self.writers.run(self._stored.entry, response_id)
        if entry.response.status in replay.RUNNING:
            raise RequestError("stream", "true", "false: the call that made this response has its stream")
        return replay.StoredStream(entry.response, entry.cuts, after)

    async def items(self, response_id: str) -> list[msgspec.Raw]:
        """Return the input of a response, oldest first, without the items of earlier responses. Raises
        `NotFoundError`."""
        items = await self.writers.run(self._stored.items, response_id)
        return items.input

    async def cancel(self, response_id: str) -> Response:
        """End a response that runs in the background.

        Raises `NotFoundError`, `RequestError`.
        """
        running = self._running(response_id)
        items = None if running else await self.writers.run(self._stored.items, response_id)
        if items is not None and not items.response.background:
            raise RequestError("response_id", response_id, "that of a response in the background")
        if response_id in self._background:
            answer, task = self._background[response_id]
            if answer.response.status in replay.RUNNING:  # else it has ended, and waits for the disk
                task.cancel()
                answer.close()
        if response_id in self.ends.tasks:
            await asyncio.wait({self.ends.tasks[response_id]})
        return await self.read(response_id)

    async def delete(self, response_id: str) -> Deleted:
        """Delete a stored response.

        One that runs in the background is ended. Raises `NotFoundError`.
        """
        if response_id not in self.store:
            raise NotFoundError("response", response_id)
        if response_id in self._background:
            await self.cancel(response_id)
        await self.writers.run(self.store.delete, response_id)
        return Deleted(id=response_id, object="response", deleted=True)

    async def _chat(
        self, model: ServedModel, request: ResponsesRequest, call: ChatCall, items: list[NamedItem], size: int
    ) -> Answer:
        """Return the chat's answer; `size` is the size of the items. With truncation "auto", the oldest items go until
        the rest fits."""
        while True:
            warnings, pictures = Warnings(call.warnings), Pictures()
            work = functools.partial(messages_of, request.instructions, items, warnings, pictures)
            messages = await off_loop(size, work)
            attempt = msgspec.structs.replace(call, messages=messages, warnings=warnings, pictures=pictures)
            try:
                return await model.chat(attempt)
            except RequestError as error:
                if not isinstance(error, ContextLengthError) or request.truncation != "auto" or len(items) < 2:
                    raise
                items = items[max(1, len(items) // 8) :]
                # The output of a tool call must go with its call.
                while len(items) > 1 and items[0].item.get("type") in OUTPUTS:
                    items = items[1:]

    async def _referenced(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return items with the stored ones in place of references. Raises `RequestError` for one that is not there."""
        stored: dict[str, dict[str, Any]] = {}
        for response_id in {response_of_item(item["id"]) for item in items if item["type"] == REFERENCE} - {None}:
            with contextlib.suppress(NotFoundError):
                stored |= await self.writers.run(self._items, f"{self.store.prefix}{response_id}")
        for index, item in enumerate(items):
            if item["type"] == REFERENCE and item["id"] not in stored:
                raise RequestError(f"input[{index}].id", item["id"], "the id of an item of a stored response")
        return [stored[item["id"]] if item["type"] == REFERENCE else item for item in items]

    def _items(self, response_id: str) -> dict[str, dict[str, Any]]:
        """Return the input and output items of a response, by their ids. Raises `NotFoundError`."""
        entry = self._stored.items(response_id)
        return {item["id"]: item for item in map(past_item, [*entry.input, *entry.response.output])}

    def _history(self, response_id: str) -> list[msgspec.Raw]:
        """Return the input and output of a response, and of the responses before it. Raises `NotFoundError`, and
        `RequestError` if it still runs."""
        entry = self._stored.items(response_id)
        if entry.response.status in replay.RUNNING or response_id in self._background:
            raise RequestError("previous_response_id", response_id, "that of a response which has ended")
        return [*entry.history, *entry.input, *entry.response.output]

    def _settle(self, response_id: str) -> None:
        """Mark a response that an earlier server did not finish as failed."""
        try:
            entry = self._stored.entry(response_id)
        except (NotFoundError, StorageError):
            return  # the log has the reason
        if entry.response.status in replay.RUNNING:
            error = ResponseError(code="server_error", message="the server ended before this response did")
            self.ends.settle(replace(entry, response=replace(entry.response, status="failed", error=error)))
