"""OpenAI's routes without HTTP: a JSON object in; out comes an `Answer`, to be read whole or as a stream of events.

Everything that can be refused is refused before the `Answer` exists, so a stream that has begun fails only by the
engine's fault. Knows schemas, prompts and replies; `serve.app` does the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.engine import deadlines
from headrace.engine.generation import Front, Generation, off_loop
from headrace.protocol import bounds
from headrace.protocol.beam import KEPT
from headrace.protocol.errors import ContextLengthError, ModelNotFoundError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.serve.call import replies
from headrace.serve.call.answers import CompletionAnswer
from headrace.serve.call.beams import beam_params
from headrace.serve.call.chat_answer import ChatAnswer
from headrace.serve.call.dialect import Dialect
from headrace.serve.call.forms import form_of, told_as
from headrace.serve.call.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
    parse,
    sampling_params,
)
from headrace.text.inputs import draw_seed
from headrace.text.reasoning import STYLES
from headrace.text.templates import ChatTemplate
from headrace.text.tools.choice import ToolUse

logger = logging.getLogger("headrace.server")

RENDER_OPTIONS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
DEFAULT_COMPLETION_TOKENS = 16


class OpenAI:
    """The routes.

    Args:
        model: the name that is served; a request may name it or none.
        template: None if the model has no chat template.
        defaults: sampling parameters that the model's makers advise, for what a request does not give.
        dialect: how the model writes tool calls and reasoning.
        draw: where requests without a seed get theirs; the reply tells it.
    """

    def __init__(
        self,
        front: Front,
        model: str,
        template: ChatTemplate | None = None,
        defaults: Mapping[str, Any] | None = None,
        draw: Callable[[], int] = draw_seed,
        dialect: Dialect | None = None,
    ) -> None:
        self.front = front
        self.draw = draw
        self.model = model
        self.template = template
        self.dialect = Dialect() if dialect is None else dialect
        if self.dialect.reasoning is not None:
            style = STYLES[self.dialect.reasoning]
            front.marks = (style.openings[0], style.closings[0])
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
        prompts = as_prompts(request.prompt)
        more: dict[str, Any] = {"logprobs": request.logprobs}
        if request.max_tokens is None and "max_tokens" not in self.defaults:
            more["max_tokens"] = DEFAULT_COMPLETION_TOKENS
        if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
            more["prompt_logprobs"] = request.logprobs
        params = self._params(request, more)
        self.front.check_room(len(prompts), params)
        await self._check_form(request, params)
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
        use = ToolUse.of(request.tools, request.tool_choice, request.parallel_tool_calls is not False)
        if request.skip_special_tokens is None and self.dialect.needs_marks(use):
            more["skip_special_tokens"] = False
        params = self._params(request, more)
        self.front.check_room(1, params)
        text = await self.render(request, use.tools)
        held, enforced = self.dialect.constraint(use, text, params.structured_outputs)
        if not enforced and any(tool["function"].get("strict") for tool in use.tools):
            request.warn("tools", "strict is not enforced with tool_choice auto, but is where it is required or a tool")
        params = msgspec.structs.replace(params, structured_outputs=held)
        await (self._check_tools(request, params, use, text) if enforced else self._check_form(request, params))
        new_parser = self.dialect.parsers(use, text, enforced)
        _, token_ids = await self.front.prompt_ids(
            text,
            add_special_tokens=bool(request.add_special_tokens),
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        generation = self._open([token_ids], params, request, max_tokens, arrival, field)
        return ChatAnswer(generation, request, self.front, self.model, [text], new_parser)

    async def chat_prompt(self, body: dict[str, Any]) -> tuple[str, list[int]]:
        """What `chat` would give the model for `body`: the text and its token ids. Raises `RequestError`."""
        request = parse(ChatCompletionRequest, body)
        self._check(request)
        use = ToolUse.of(request.tools, request.tool_choice, request.parallel_tool_calls is not False)
        text = await self.render(request, use.tools)
        tokenizer = self._tokenizer()
        special = bool(request.add_special_tokens)
        return text, await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))

    async def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /tokenize."""
        request = parse(TokenizeRequest, body)
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("prompt", request.prompt, "given, or else messages, and not both")
        text = (
            request.prompt
            if request.prompt is not None
            else await self.render(request, ToolUse.of(request.tools, None, True).tools)
        )
        bounds.check("text", text, "prompt")
        special = request.messages is None if request.add_special_tokens is None else request.add_special_tokens
        tokenizer = self._tokenizer()
        token_ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))
        reply: dict[str, Any] = {"count": len(token_ids), "max_model_len": self.front.info.max_model_len}
        reply["tokens"] = token_ids
        if request.return_token_strs:
            reply["token_strs"] = [replies.token_text(tokenizer, token_id) for token_id in token_ids]
        return reply | ({"warnings": request.warnings} if request.warnings else {})

    async def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /detokenize."""
        request = parse(DetokenizeRequest, body)
        self.check_model(request.model)
        vocab_size = self.front.info.vocab_size
        for token_id in request.tokens:
            if not 0 <= token_id < vocab_size:
                raise RequestError("tokens", token_id, f"a token id from 0 to {vocab_size - 1}")
        tokenizer = self._tokenizer()
        decode = lambda: tokenizer.decode(request.tokens, skip_special_tokens=False)  # noqa: E731
        text = await off_loop(len(request.tokens), decode)
        # llama-server's name for it, too.
        return {"prompt": text, "content": text} | ({"warnings": request.warnings} if request.warnings else {})

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
        # The last three are for Anthropic's clients, who turn pages.
        pages = {"has_more": False, "first_id": self.model, "last_id": self.model}
        return {"object": "list", "data": [self.card(self.model)]} | pages

    def card(self, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME. Raises `ModelNotFoundError`."""
        self.check_model(name)
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "root": self.front.info.model,
            "parent": None,
            "max_model_len": self.front.info.max_model_len,
            # As Anthropic has it.
            "type": "model",
            "display_name": self.model,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
        }

    async def render(
        self, request: ChatCompletionRequest | TokenizeRequest, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The messages, and the tools that the model may call, as one text.

        Raises `RequestError` if they do not fit the model's template.
        """
        messages = request.messages or []
        bounds.check("messages", messages)
        template = self.template
        if template is None:
            raise RequestError(
                "messages", "a chat", "sent to /v1/completions as a prompt: the model has no chat template"
            )
        given = dict(request.chat_template_kwargs or {})
        for name in RENDER_OPTIONS.intersection(given):
            raise RequestError("chat_template_kwargs", name, "a variable of the template's own")
        if request.reasoning_effort is not None:
            self.dialect.set_effort(request, given)
        if tools and not self.dialect.shows_tools:
            request.warn("tools", "the model is not told of them: its chat template has no place for tools")
        go_on = bool(request.continue_final_message)
        opening = not go_on if request.add_generation_prompt is None else request.add_generation_prompt
        return await asyncio.get_running_loop().run_in_executor(
            self._renderer,
            lambda: template.render(
                messages, tools, add_generation_prompt=opening, continue_final_message=go_on, **given
            ),
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
                room = self.front.info.max_model_len - len(token_ids)
                if max_tokens > room:
                    raise ContextLengthError(field, max_tokens, f"at most {room} after this prompt")
        with deadlines.within(request.timeout, arrival):
            return self.front.open(
                prompts,
                params,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                arrival_time=arrival,
                draw=self.draw,
                beam=beam_params(request),
            )

    def _params(self, request: Sampled, more: Mapping[str, Any]) -> SamplingParams:
        """The parameters, with the model's own for what is not given; of these, a search takes the ends only."""
        if not request.use_beam_search:
            return sampling_params(request, self.defaults, **more)
        ends = {name: value for name, value in self.defaults.items() if name in KEPT}
        return sampling_params(request, ends, **{**more, "n": 1, "best_of": None})

    async def _check_tools(self, request: Sampled, params: SamplingParams, use: ToolUse, prompt: str) -> None:
        """Find out whether calls can be held to the tools' schemas. Raises `RequestError` naming the tool."""
        try:
            for told in await self.front.check(params):
                request.warn("tools", told)
        except RequestError as error:
            for place, tool in enumerate(use.tools):
                name = tool["function"]["name"]
                if name not in use.schemas:
                    continue
                one = use._replace(schemas={name: use.schemas[name]}, mode="required")
                held, _ = self.dialect.constraint(one, prompt, None)
                try:
                    await self.front.check(msgspec.structs.replace(params, structured_outputs=held))
                except RequestError as its:
                    raise RequestError(f"tools[{place}].function.parameters", name, its.bound, its.code) from None
            raise told_as(error, "tools") from None

    async def _check_form(self, request: Sampled, params: SamplingParams) -> None:
        """Find out whether the answer can be held to its form. Raises `RequestError`."""
        if params.structured_outputs is None:
            return
        name, _ = form_of(request)
        try:
            for told in await self.front.check(params):
                request.warn(name, told)
        except RequestError as error:
            raise told_as(error, name) from None

    def _check(self, request: Sampled) -> None:
        self.check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options", "an object", "left out unless stream is true")
        if request.stream and request.best_of is not None and request.best_of > (request.n or 1):
            raise RequestError("best_of", request.best_of, "left out of a stream, or n: the best are known at the end")

    def check_model(self, name: str | None) -> None:
        """Raises `ModelNotFoundError` unless `name` is what is served, or None."""
        if name is not None and name != self.model:
            shown = name if len(name) <= 80 else name[:77] + "..."
            raise ModelNotFoundError(f"model: {shown!r} is not served here; it must be {self.model!r}")

    def _tokenizer(self) -> Any:
        if self.front.tokenizer is None:
            raise RequestError("prompt", "text", "token ids, for the engine runs without a tokenizer")
        return self.front.tokenizer


def as_prompts(prompt: str | list[Any], field: str = "prompt") -> list[str | list[int]]:
    """One prompt or many, each a text or a list of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return [prompt]
    bounds.check("prompt_list", prompt, field)
    for index, item in enumerate(prompt):
        ids = isinstance(item, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in item)
        if not isinstance(item, str) and not ids:
            raise RequestError(f"{field}[{index}]", item, "a string or a list of token ids")
    return list(prompt)
