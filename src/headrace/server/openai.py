"""OpenAI's routes without HTTP: a JSON object in; out comes an `Answer`, to be read whole or as a stream of events.

Everything that can be refused is refused before the `Answer` exists, so a stream that has begun fails only by the
engine's fault. Knows schemas, prompts and replies; `server.http` does the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from headrace import __version__, bounds
from headrace.errors import ContextLengthError, ModelNotFoundError, RequestError
from headrace.sampling.params import SamplingParams
from headrace.server import replies
from headrace.server.chat import ChatTemplate
from headrace.server.generation import Front, Generation, off_loop
from headrace.server.inputs import draw_seed, max_context, new_request_id
from headrace.server.outputs import Piece, RequestState
from headrace.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
    parse,
    sampling_params,
)

logger = logging.getLogger("headrace.server")

RENDER_OPTIONS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
DONE = b"data: [DONE]\n\n"
DEFAULT_COMPLETION_TOKENS = 16


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Answer(ABC):
    """A call that was accepted. Read it by `whole` or by `events`, once; `close` aborts what still runs."""

    name: str
    chunk_name: str
    prefix: str

    def __init__(
        self, generation: Generation, request: Sampled, front: Front, model: str, texts: list[str | None]
    ) -> None:
        self.generation = generation
        self.request = request
        self.tokenizer = front.tokenizer
        self.groups = [generation.of_prompt(place) for place in range(len(texts))]
        self.texts = texts
        self.id = f"{self.prefix}-{request.request_id or new_request_id()}"
        info = front.info
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"headrace-{__version__}-{info.backend}-{info.dtype}",
            "seed": generation.states[0].request.params.seed,
        }

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    async def whole(self) -> dict[str, Any]:
        """The reply. Raises what the engine failed with."""
        async with self.generation:
            async for _ in self.generation:
                pass
        choices = [self._choice(place, state) for place, state in enumerate(self.generation.states)]
        counts = {"usage": replies.usage(self.groups), "timings": replies.timings(self.groups)}
        return self._head | {"object": self.name, "choices": choices} | counts | self._prompt_fields()

    async def events(self) -> AsyncIterator[bytes]:
        """The reply as events, `[DONE]` last. Raises what the engine failed with: then there is no `[DONE]`."""
        options = self.request.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        head = self._head | {"object": self.chunk_name}
        num_open = len(self.generation.states)
        begun: set[int] = set()
        async with self.generation:
            async for pieces in self.generation:
                for place, piece in pieces:
                    state = self.generation.states[place]
                    if not piece.token_ids and state.finish is None:
                        continue
                    chunks = [] if place in begun else self._opening(place, state)
                    begun.add(place)
                    if piece.text or state.finish or self._tells_tokens(piece):
                        chunks.append(self._piece(place, state, piece))
                    num_open -= state.finish is not None
                    for number, choice in enumerate(chunks, 1):
                        chunk = head | {"choices": [choice]}
                        if with_usage:
                            chunk["usage"] = replies.usage(self.groups) if continuous else None
                        if not num_open and not with_usage and number == len(chunks):
                            chunk["timings"] = replies.timings(self.groups)
                        yield event(chunk)
        if with_usage:
            counts = {"usage": replies.usage(self.groups), "timings": replies.timings(self.groups)}
            yield event(head | {"choices": []} | counts)
        yield DONE

    def close(self) -> None:
        self.generation.close()

    def _tells_tokens(self, piece: Piece) -> bool:
        wanted = self.generation.states[0].request.params.logprobs is not None or self.request.return_token_ids
        return bool(wanted and piece.token_ids)

    def _ending(self, state: RequestState, token_ids: Sequence[int]) -> dict[str, Any]:
        """What every choice carries, whole or chunk."""
        finish = state.finish
        fields: dict[str, Any] = {
            "finish_reason": finish.reason if finish else None,
            "stop_reason": finish.stop_reason if finish else None,
            "seed": state.request.params.seed,
        }
        if self.request.return_token_ids:
            fields["token_ids"] = list(token_ids)
        return fields

    def _prompt_fields(self) -> dict[str, Any]:
        """What the reply as a whole tells of the prompt."""
        return {}

    @abstractmethod
    def _choice(self, place: int, state: RequestState) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def _piece(self, place: int, state: RequestState, piece: Piece) -> dict[str, Any]:
        """A part of an answer."""

    @abstractmethod
    def _opening(self, place: int, state: RequestState) -> list[dict[str, Any]]:
        """What comes before an answer's first part."""


class CompletionAnswer(Answer):
    name = chunk_name = "text_completion"
    prefix = "cmpl"
    request: CompletionRequest

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        num_top = self.request.logprobs
        self._logprobs = (
            None
            if num_top is None
            else [
                replies.CompletionLogprobs(self.tokenizer, num_top, state.request, self._echoed(place, state))
                for place, state in enumerate(self.generation.states)
            ]
        )

    def _echoed(self, place: int, state: RequestState) -> str | None:
        """The prompt as text under `echo`: as it was given, or decoded if it was given as ids or was cut."""
        if not self.request.echo:
            return None
        text, params = self.texts[place // self.generation.n], state.request.params
        if text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(
                state.request.prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        return text or ""

    def _choice(self, place: int, state: RequestState) -> dict[str, Any]:
        fields = self._opening_fields(place, state)
        text = fields.pop("text", "") + state.text
        logprobs = fields.pop("logprobs", None)
        if self._logprobs is not None:
            added = self._logprobs[place].add(state.token_ids, state.logprobs)
            logprobs = {key: logprobs[key] + added[key] for key in added} if logprobs else added
        return {"index": place, "text": text, "logprobs": logprobs} | self._ending(state, state.token_ids) | fields

    def _piece(self, place: int, state: RequestState, piece: Piece) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs[place].add(piece.token_ids, piece.logprobs)
        return {"index": place, "text": piece.text, "logprobs": logprobs} | self._ending(state, piece.token_ids)

    def _opening(self, place: int, state: RequestState) -> list[dict[str, Any]]:
        fields = self._opening_fields(place, state)
        empty = {"index": place, "text": "", "logprobs": None, "finish_reason": None}
        return [empty | fields] if fields else []

    def _opening_fields(self, place: int, state: RequestState) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        token_ids = state.request.prompt_token_ids
        if self.request.echo:
            fields["text"] = self._echoed(place, state) or ""
            if self._logprobs is not None:
                fields["logprobs"] = self._logprobs[place].add(token_ids, [None, *state.prompt_logprobs])
        if self.request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = replies.prompt_logprobs(self.tokenizer, state)
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = token_ids
        return fields


class ChatAnswer(Answer):
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl"
    request: ChatCompletionRequest

    def _choice(self, place: int, state: RequestState) -> dict[str, Any]:
        logprobs = replies.chat_logprobs(self.tokenizer, state.logprobs) if self.request.logprobs else None
        message = {"role": "assistant", "content": state.text, "refusal": None}
        return {"index": place, "message": message, "logprobs": logprobs} | self._ending(state, state.token_ids)

    def _piece(self, place: int, state: RequestState, piece: Piece) -> dict[str, Any]:
        logprobs = replies.chat_logprobs(self.tokenizer, piece.logprobs) if self.request.logprobs else None
        return {"index": place, "delta": {"content": piece.text}, "logprobs": logprobs} | self._ending(
            state, piece.token_ids
        )

    def _opening(self, place: int, state: RequestState) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": place, "delta": delta, "logprobs": None, "finish_reason": None} | self._prompt_fields()]

    def _prompt_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        state = self.generation.states[0]
        if self.request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = replies.prompt_logprobs(self.tokenizer, state)
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = state.request.prompt_token_ids
        return fields


class OpenAI:
    """The routes.

    Args:
        model: the name that is served; a request may name it or none.
        template: None if the model has no chat template.
        defaults: sampling parameters that the model's makers advise, for what a request does not give.
        draw: where requests without a seed get theirs; the reply tells it.
    """

    def __init__(
        self,
        front: Front,
        model: str,
        template: ChatTemplate | None = None,
        defaults: Mapping[str, Any] | None = None,
        draw: Callable[[], int] = draw_seed,
    ) -> None:
        self.front = front
        self.draw = draw
        self.model = model
        self.template = template
        self.defaults = dict(defaults or {})
        self.created = int(time.time())
        # Templates run one at a time in a process of their own; whoever waits for it must not fill up the threads
        # that tokenise.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="headrace-template")

    async def completion(self, body: dict[str, Any]) -> CompletionAnswer:
        """POST /v1/completions. Raises `HeadraceError`s of all kinds."""
        arrival = time.monotonic()
        request = parse(CompletionRequest, body)
        self._check(request)
        prompts = _prompts(request.prompt)
        more: dict[str, Any] = {"logprobs": request.logprobs}
        if request.max_tokens is None and "max_tokens" not in self.defaults:
            more["max_tokens"] = DEFAULT_COMPLETION_TOKENS
        if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
            more["prompt_logprobs"] = request.logprobs
        params = sampling_params(request, self.defaults, **more)
        special = request.add_special_tokens is not False
        made = [
            await self.front.prompt_ids(
                prompt, add_special_tokens=special, truncate_prompt_tokens=request.truncate_prompt_tokens
            )
            for prompt in prompts
        ]
        generation = self._open([token_ids for _, token_ids in made], params, request, request.max_tokens, arrival)
        return CompletionAnswer(generation, request, self.front, self.model, [text for text, _ in made])

    async def chat(self, body: dict[str, Any]) -> ChatAnswer:
        """POST /v1/chat/completions. Raises `HeadraceError`s of all kinds."""
        arrival = time.monotonic()
        request = parse(ChatCompletionRequest, body)
        self._check(request)
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        # 0 asks for nothing, and there are clients that always send it.
        if request.top_logprobs:
            if not request.logprobs:
                raise RequestError("top_logprobs", request.top_logprobs, "left out unless logprobs is true")
            most = self.front.info.max_logprobs
            if most != -1 and not 0 <= request.top_logprobs <= most:
                raise RequestError("top_logprobs", request.top_logprobs, f"from 0 to {most} (--max-logprobs)")
        more: dict[str, Any] = {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
        if max_tokens is not None or "max_tokens" not in self.defaults:
            more["max_tokens"] = max_tokens
        params = sampling_params(request, self.defaults, **more)
        text = await self.render(request)
        _, token_ids = await self.front.prompt_ids(
            text,
            add_special_tokens=bool(request.add_special_tokens),
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        generation = self._open([token_ids], params, request, max_tokens, arrival, field)
        return ChatAnswer(generation, request, self.front, self.model, [text])

    async def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /tokenize."""
        request = parse(TokenizeRequest, body)
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("prompt", request.prompt, "given, or else messages, and not both")
        text = request.prompt if request.prompt is not None else await self.render(request)
        bounds.check("text", text, "prompt")
        special = request.messages is None if request.add_special_tokens is None else request.add_special_tokens
        tokenizer = self._tokenizer()
        token_ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))
        reply: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_context(self.front.info)}
        reply["tokens"] = token_ids
        if request.return_token_strs:
            reply["token_strs"] = [replies.token_text(tokenizer, token_id) for token_id in token_ids]
        return reply

    async def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /detokenize."""
        request = parse(DetokenizeRequest, body)
        self._check_model(request.model)
        vocab_size = self.front.info.vocab_size
        for token_id in request.tokens:
            if not 0 <= token_id < vocab_size:
                raise RequestError("tokens", token_id, f"a token id from 0 to {vocab_size - 1}")
        tokenizer = self._tokenizer()
        decode = lambda: tokenizer.decode(request.tokens, skip_special_tokens=False)  # noqa: E731
        return {"prompt": await off_loop(len(request.tokens), decode)}

    async def warm_up(self) -> None:
        """Render a first chat, so that the templates' process is there before somebody waits for it."""
        if self.template is None:
            return
        try:
            await self.render(TokenizeRequest(messages=[{"role": "user", "content": "Hello"}]))
        except RequestError as error:
            # Not fatal: there are templates that want more than one plain message.
            logger.warning("the chat template does not take a plain message: %s", error)

    def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self.card(self.model)]}

    def card(self, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME. Raises `ModelNotFoundError`."""
        self._check_model(name)
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "root": self.front.info.model,
            "parent": None,
            "max_model_len": max_context(self.front.info),
        }

    async def render(self, request: ChatCompletionRequest | TokenizeRequest) -> str:
        """The messages as one text. Raises `RequestError` if they do not fit the model's template."""
        messages = request.messages or []
        bounds.check("messages", messages)
        template = self.template
        if template is None:
            raise RequestError(
                "messages", "a chat", "sent to /v1/completions as a prompt: the model has no chat template"
            )
        given = request.chat_template_kwargs or {}
        for name in RENDER_OPTIONS.intersection(given):
            raise RequestError("chat_template_kwargs", name, "a variable of the template's own")
        go_on = bool(request.continue_final_message)
        opening = not go_on if request.add_generation_prompt is None else request.add_generation_prompt
        return await asyncio.get_running_loop().run_in_executor(
            self._renderer,
            lambda: template.render(messages, add_generation_prompt=opening, continue_final_message=go_on, **given),
        )

    def _open(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        request: Sampled,
        max_tokens: int | None,
        arrival: float,
        field: str = "max_tokens",
    ) -> Generation:
        if max_tokens is not None:
            for token_ids in prompts:
                room = max_context(self.front.info) - len(token_ids)
                if max_tokens > room:
                    raise ContextLengthError(field, max_tokens, f"at most {room} after this prompt")
        return self.front.open(
            prompts,
            params,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            arrival_time=arrival,
            draw=self.draw,
        )

    def _check(self, request: Sampled) -> None:
        self._check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options", "an object", "left out unless stream is true")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            shown = name if len(name) <= 80 else name[:77] + "..."
            raise ModelNotFoundError(f"model: {shown!r} is not served here; it must be {self.model!r}")

    def _tokenizer(self) -> Any:
        if self.front.tokenizer is None:
            raise RequestError("prompt", "text", "token ids, for the engine runs without a tokenizer")
        return self.front.tokenizer


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt or many, each a text or a list of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return [prompt]
    bounds.check("prompt_list", prompt, "prompt")
    for index, item in enumerate(prompt):
        ids = isinstance(item, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in item)
        if not isinstance(item, str) and not ids:
            raise RequestError(f"prompt[{index}]", item, "a string or a list of token ids")
    return list(prompt)
