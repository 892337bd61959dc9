"""`ServedModel`: answers calls with one model. Every API uses it; `models.ModelSet` finds it by its name.

Calls are refused only before there is an answer, so a stream that has begun fails only by the engine's fault. Knows
calls, prompts and answers; knows no HTTP, no JSON and no API.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headrace.engine import context
from headrace.engine.fair_worker import FairWorker
from headrace.engine.generation import Generation, TextClient, in_time
from headrace.engine.tenants import salted
from headrace.protocol import bounds
from headrace.protocol.beam import KEPT
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import (
    ChildFailedError,
    ContextLengthError,
    ModelNotFoundError,
    RequestError,
    UnsupportedError,
)
from headrace.protocol.parameters import PARAMETERS
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import Picture
from headrace.protocol.step import EngineInfo
from headrace.serve.call.adapters import AdapterScale, ServedAdapters
from headrace.serve.call.call import Answer, Call, ChatCall, ModelDefaults, SamplingFields, TextCall, spelled
from headrace.serve.call.dialect import OTHER_FORM, Dialect
from headrace.serve.call.fetching import fetch
from headrace.serve.call.replies import FollowPrompt
from headrace.text.inputs import RequestOptions, draw_seed
from headrace.text.messages import ChatMessage, pictures_of, without_pictures
from headrace.text.named_templates import with_ends
from headrace.text.outputs import MessageParser
from headrace.text.pictures.reading import PictureReader
from headrace.text.reasoning import STYLES
from headrace.text.stopped_parser import StoppedParser
from headrace.text.stops import StopFinder
from headrace.text.string_bounds import bound_strings
from headrace.text.templates import ChatTemplate, shared_process
from headrace.text.tokenizer import TextRules, Tokenizer
from headrace.text.tools.choice import ToolUse

logger = logging.getLogger("headrace.server")

RENDER_OPTIONS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
DEFAULT_COMPLETION_TOKENS = 16


Explain = Callable[[list[str]], "list[Any] | UnsetType"]
"""Returns the explanations of requests that have ended, by their ids."""


def no_explanations(request_ids: list[str]) -> UnsetType:
    """Return nothing: the engine is not followed."""
    return UNSET


class ServedModel:
    """The model behind the routes.

    Args:
        name: the name that replies have; a request may name it, another of `names`, or none.
        names: all names of the model, with `name` first; `name` alone by default.
        takes_any_name: whether a request may have any other name too.
        template: None if the model has no chat template.
        trusts_templates: whether a request may contain a chat template.
        defaults: the parameters of requests that give none, as the model's makers advise or the server's flags say.
        draw: returns the seed of a request without one; the reply contains it.
        dialect: the way in which the model writes tool calls and reasoning.
    """

    def __init__(
        self,
        front: TextClient,
        name: str,
        template: ChatTemplate | None = None,
        defaults: ModelDefaults = ModelDefaults(),
        draw: Callable[[], int] = draw_seed,
        dialect: Dialect | None = None,
        names: Sequence[str] = (),
        takes_any_name: bool = False,
        trusts_templates: bool = False,
    ) -> None:
        self.front = front
        self.name = name
        self.names = tuple(names) or (name,)
        self.takes_any_name = takes_any_name
        self._trusts_templates = trusts_templates
        self.template = template
        self.defaults = defaults
        self.draw = draw
        self.dialect = Dialect() if dialect is None else dialect
        if self.dialect.reasoning is not None:
            style = STYLES[self.dialect.reasoning]
            front.marks = (style.openings[0], style.closings[0])
        self.created = int(time.time())
        # Whether it is loaded as long as the server runs. If not, `keep_alive` holds the seconds that it stays loaded
        # after its last use, from the last call that set them; None: the server's setting.
        self.stays_loaded = True
        self.keep_alive: float | None = None
        # The system message of conversations that begin with none.
        self.system = ""
        # Variables of the chat template for calls that do not set them.
        self.template_variables: dict[str, Any] = {}
        # Whether an answer continues the assistant's message that ends a conversation, where the call leaves that open.
        self.prefills = False
        # The values of --tags, for the model's card.
        self.tags: list[str] = []
        # Whether replies show their prompts, as llama-server's do with --verbose.
        self.is_verbose = False
        # Warnings about chats, until the engine has started and is known to answer.
        self.notes: list[str] = []
        # The adapters that requests may name in the model's place.
        self.adapters = ServedAdapters()
        # Returns the measured quality of the model in the form that the engine runs; None: it was not measured.
        self.quality: Callable[[EngineInfo], dict[str, Any] | None] = lambda info: None
        self.explain: Explain = no_explanations
        # These two are set from `insight.explainer`.
        self.follow_prompt: FollowPrompt | None = None
        # Returns the digest of the model's files, which it reads; empty without files.
        self.digest: Callable[[], str] = str
        self._renderer = None
        if template is not None or trusts_templates:
            self._renderer = FairWorker(shared_process() if template is None else template.process)
        self.pictures: PictureReader | None = None
        # The hosts from which pictures are fetched.
        self.media_domains: Sequence[str] = ()
        self._picture_worker: FairWorker | None = None

    @property
    def max_context(self) -> int:
        """The tokens that prompt and answer may have together."""
        return self.front.info.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `RequestError` if the engine runs without one."""
        if self.front.tokenizer is None:
            raise RequestError("prompt", "text", "token ids, for the engine runs without a tokenizer")
        return self.front.tokenizer

    @property
    def workers(self) -> list[FairWorker]:
        """The workers of the processes that render templates, build grammars and encode text, without those that were
        not needed yet."""
        return [worker for worker in self._by_task.values() if worker is not None]

    @property
    def _by_task(self) -> dict[str, FairWorker | None]:
        return {
            "templates": self._renderer,
            "grammars": self.front.worker,
            "tokenizers": self.front.encoder,
            "pictures": self._picture_worker,
        }

    def read_pictures(self, reader: PictureReader) -> None:
        """Read the pictures of chats from now on: the engine has the model's tower."""
        self.pictures, self._picture_worker = reader, FairWorker(reader.process)

    @property
    def num_helper_faults(self) -> dict[str, int]:
        """The number of failures of these processes, after which they were started again, by their task."""
        return {task: 0 if worker is None else worker.process.num_faults for task, worker in self._by_task.items()}

    def close(self) -> None:
        """End the work of these processes."""
        for worker in self.workers:
            worker.close()

    async def complete(self, call: TextCall) -> Answer:
        """Begin to complete each prompt. Raises `HeadraceError`s of all kinds."""
        with spelled(call.spelling), context.within(call.timeout, call.arrival_time):
            self.check_model(call.model)
            fields = call.engine_fields
            if call.echo and call.logprobs is not None and call.prompt_logprobs is None:
                fields = msgspec.structs.replace(fields, prompt_logprobs=call.logprobs)
            params = self._params(call, fields, None if call.fills_context else DEFAULT_COMPLETION_TOKENS)
            self.front.check_room(len(call.prompts), params, call.beam)
            await self._check_form(call, params)
            prompts = [
                await self.front.prompt_ids(
                    prompt,
                    add_special_tokens=call.add_special_tokens is not False,
                    truncate_prompt_tokens=call.truncate_prompt_tokens,
                )
                for prompt in call.prompts
            ]
            generation = await self._open([token_ids for _, token_ids in prompts], params, call)
        return Answer(generation, call, self.front.tokenizer, "cmpl", [text for text, _ in prompts])

    async def chat(self, call: ChatCall) -> Answer:
        """Begin to answer a conversation. Raises `HeadraceError`s of all kinds."""
        with spelled(call.spelling), context.within(call.timeout, call.arrival_time):
            self.check_model(call.model)
            most = self.front.info.max_logprobs
            if call.logprobs and most != -1 and not 0 <= call.logprobs <= most:
                # The field has this name in every API with chats.
                raise RequestError("top_logprobs", call.logprobs, f"from 0 to {most} (--max-logprobs)")
            use = self._bound_arguments(call.tools)
            fields = call.engine_fields
            if end_ids := self.dialect.end_ids:
                fields = msgspec.structs.replace(fields, stop_token_ids=[*(fields.stop_token_ids or ()), *end_ids])
            params = self._with_ends(call, self._params(call, fields))
            self.front.check_room(1, params, call.beam)
            text = await self.render(call)
            constraint, enforced = self.dialect.constraint(use, text, params.structured_outputs)
            is_loose = not enforced or (use.mode == "auto" and params.structured_outputs is None)
            if is_loose and any(tool["function"].get("strict") for tool in use.tools):
                call.warn(
                    "tools", "strict is not enforced with tool_choice auto, but is where it is required or a tool"
                )
            if not enforced and any(use.customs.values()):
                call.warn(
                    "tools", "a custom tool's grammar is not enforced: the model's format of calls has no place for it"
                )
            params = msgspec.structs.replace(params, structured_outputs=constraint)
            await (self._check_tools(call, params, text, is_loose) if enforced else self._check_form(call, params))
            new_parser = self.dialect.parsers(use, text, enforced)
            rules, new_parser = self._reading(call, params, new_parser)
            _, token_ids = await self.front.prompt_ids(
                text,
                add_special_tokens=bool(call.add_special_tokens),
                truncate_prompt_tokens=call.truncate_prompt_tokens,
            )
            pictures = self._placed(call, token_ids)
            generation = await self._open([token_ids], params, call, rules, pictures)
        return Answer(generation, call, self.front.tokenizer, "chatcmpl", [text], new_parser, call.include_reasoning)

    def _reading(
        self, call: ChatCall, params: SamplingParams, new_parser: Callable[[], MessageParser]
    ) -> tuple[TextRules, Callable[[], MessageParser]]:
        """Return the rules of a chat's text, and the maker of its parser. The parser finds the stop strings, unless
        they count in all of the text: in a search, or if the request sets `stop_in_reasoning`."""
        marks = self.dialect.marks(call.tools)
        kept_ids = frozenset(marks.values()) if marks or call.tools.mode != "none" else None
        stops = params.stop if call.beam is None and not call.stop_in_reasoning else None
        if not stops:
            return TextRules(kept_ids), new_parser

        def parser() -> MessageParser:
            return StoppedParser(new_parser(), StopFinder(stops, params.include_stop_str_in_output))

        return TextRules(kept_ids, finds_stops=False), parser

    async def chat_prompt(self, call: ChatCall) -> tuple[str, list[int]]:
        """Return the prompt that `chat` would send to the model: the text and its token ids. Raises `RequestError`."""
        with spelled(call.spelling), context.within(call.timeout, call.arrival_time):
            self.check_model(call.model)
            text = await self.render(call)
            return text, await self.encode(text, bool(call.add_special_tokens))

    async def render(self, call: ChatCall) -> str:
        """Return the messages, and the tools that the model may call, as one text.

        Raises `RequestError` if they do not fit the model's template, `DeadlineError`, or `ChildFailedError`.
        """
        bounds.check("messages", call.messages)
        template, renderer = self._template_for(call), self._renderer
        if template is None or renderer is None:
            raise RequestError(
                "messages", "a chat", "sent to /v1/completions as a prompt: the model has no chat template"
            )
        messages = call.messages
        if call.pictures and self.pictures is None:
            messages = without_pictures(messages, call.pictures, call.warn)
        if self.system and not (messages and messages[0].role in ("system", "developer")):
            messages = [ChatMessage(role="system", content=self.system), *messages]
        variables = dict(call.template_variables)
        for name in RENDER_OPTIONS.intersection(variables):
            raise RequestError("chat_template_kwargs", name, "a variable of the template's own")
        self.dialect.set_effort(call, variables)
        for name, value in self.template_variables.items():
            variables.setdefault(name, value)
        if variables.get("documents") and call.chat_template is None and not self.dialect.reads("documents"):
            call.warn("documents", "the model is not told of them: its chat template has no place for documents")
        if call.tools.tools and call.chat_template is None and not self.dialect.reads_shown:
            call.warn("tools", OTHER_FORM)
        opening, continues = call.add_generation_prompt, call.continue_final_message
        if opening is None:
            last = messages[-1]
            continues = continues or (
                self.prefills and last.role == "assistant" and bool(last.content) and not last.tool_calls
            )
            opening = not continues
        work = renderer.run(
            lambda: template.rendering(
                messages,
                call.tools.tools,
                add_generation_prompt=opening,
                continue_final_message=continues,
                variables=variables,
            )
        )
        rendering = await in_time(work, "its prompt was rendered")
        for change in rendering.changes:
            call.warn(change.field, change.why)
        for field in template.dropped_arguments(call.messages, bool(call.tools.tools)):
            call.warn(field, "no JSON object: the chat template gets {} in its place")
        return await self._with_pictures(call, rendering.text) if call.pictures else rendering.text

    async def _with_pictures(self, call: ChatCall, text: str) -> str:
        """Decode the pictures of a call, and return its rendered prompt with the texts that stand for them. Raises
        `RequestError`."""
        reader, worker = self.pictures, self._picture_worker
        if reader is None or worker is None:
            return text
        pictures = pictures_of(call.messages, call.pictures)
        reader.check_number(len(pictures), "messages")
        call.cuts = []
        for each in pictures:
            work = functools.partial(reader.read, each)
            if each.is_address:
                data = await in_time(fetch(each.source, each.field, self.media_domains), "its pictures were fetched")
                work = functools.partial(reader.cut, data, each.field)
            call.cuts.append(await in_time(worker.run(work), "its pictures were decoded"))
        return reader.text(text, call.cuts)

    def _placed(self, call: ChatCall, token_ids: list[int]) -> list[Picture]:
        """Return the pictures of a call with their places in its prompt. Raises `RequestError`."""
        if self.pictures is None or not call.cuts:
            return []
        row_id = self.tokenizer.token_to_id(self.pictures.form.words.token)
        return self.pictures.place(token_ids, -1 if row_id is None else row_id, call.cuts)

    def _template_for(self, call: ChatCall) -> ChatTemplate | None:
        """Return the template of a call: the model's, or the call's own. Raises `UnsupportedError`."""
        if call.chat_template is None:
            return self.template
        if not self._trusts_templates:
            instead = "start the server with --trust-request-chat-template, or set its template with --chat-template"
            raise UnsupportedError("chat_template", "a template", instead)
        # The comment differs for each holder of a key, so that no compiled template is shared between holders (S-24).
        source = f"{{#{salted('')}+#}}{call.chat_template}"
        process = None if self.template is None else self.template.process
        tokenizer = self.tokenizer
        return ChatTemplate({"default": source}, tokenizer.special_tokens, process, begin=tokenizer.begin_of_chats)

    async def encode(self, text: str, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """Return the token ids of a text; errors name it `field`. Raises `RequestError`."""
        bounds.check("text", text, field)
        tokenizer = self.tokenizer
        work = functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await in_time(self.front.encoding(len(text), work), "it was tokenised")

    async def warm_up(self) -> None:
        """Render a first chat, so that the templates' process runs before a request needs it."""
        if self.template is None:
            return
        try:
            await self.render(ChatCall(messages=[ChatMessage(role="user", content="Hello")]))
        except RequestError as error:
            # Not fatal: there are templates that need more than one plain message.
            logger.warning("the chat template does not take a plain message: %s", error)
        except ChildFailedError as error:
            # Nor is this: the process is started again, and the probes say so meanwhile.
            logger.warning("the chat template is not warm: %s", error)

    def check_model(self, name: str | None, is_request: bool = True) -> None:
        """Raise `ModelNotFoundError` unless `name` is None or the model's; a request may have any name where the server
        takes any."""
        if name is None or name in self.names or name in self.adapters or (is_request and self.takes_any_name):
            return
        label = name if len(name) <= 80 else name[:77] + "..."
        names = " or ".join(repr(each) for each in (*self.names, *self.adapters))
        raise ModelNotFoundError(f"model: {label!r} is not served here; it must be {names}")

    def true_name(self, name: str) -> str:
        """Return the model name in the reply to a request with `name`: the same if it is one of the model's."""
        return name if name in self.names or name in self.adapters else self.name

    def reply_name(self, name: str | None) -> str:
        """Return the name in replies of OpenAI's API: the model's first, or the adapter's that a request names."""
        return name if name is not None and name in self.adapters else self.name

    def adapter(self, name: str | None, lora: Sequence[AdapterScale] | None = None) -> str:
        """Return the adapter of a request, "" for none: see `ServedAdapters.of`. Raises `RequestError`."""
        return self.adapters.of(name, lora)

    def _params(self, call: Call, fields: SamplingFields, max_tokens: int | None = None) -> SamplingParams:
        """Return the parameters of a call whose own are `fields`, with the model's defaults for absent ones, and the
        API's behind them; of the defaults, a search takes only those that it allows (`KEPT`). `max_tokens` holds where
        none of them sets it. Raises `RequestError`."""
        defaults, form = self.defaults.sampling.over(call.own_defaults), self._advised_form(call)
        if call.beam is not None:
            defaults = defaults.without(PARAMETERS.keys() - KEPT)
            fields = msgspec.structs.replace(fields, n=None, best_of=None)
        if form is not None:
            # A form has an end, which the server's default must not disable.
            defaults = msgspec.structs.replace(defaults, ignore_eos=None)
        merged = fields.over(defaults)
        merged.structured_outputs = form
        return merged.params(max_tokens)

    def _with_ends(self, call: ChatCall, params: SamplingParams) -> SamplingParams:
        """Return the parameters of a chat whose answers also end at the end of a turn in its template."""
        is_own = call.chat_template is None and call.beam is None
        if self.template is None or not self.template.ends or self.front.tokenizer is None or not is_own:
            return params
        return with_ends(params, self.template, self.front.tokenizer)

    def _advised_form(self, call: Call) -> StructuredOutputs | None:
        form = call.form or (self.defaults.sampling.structured_outputs if call.beam is None else None)
        if form is None or form.json is None:
            return form
        if self.defaults.max_string_length is not None:
            schema = json.loads(str(form.json))
            bounded = bound_strings(schema, self.defaults.max_string_length)
            if bounded != schema:
                form = msgspec.structs.replace(form, json=json.dumps(bounded))
        closed = form.disable_additional_properties or self.defaults.closes_objects
        return msgspec.structs.replace(form, disable_additional_properties=closed)

    def _bound_arguments(self, use: ToolUse) -> ToolUse:
        most = self.defaults.max_string_length
        if most is None:
            return use
        return use._replace(schemas={name: bound_strings(schema, most) for name, schema in use.schemas.items()})

    async def _open(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        call: Call,
        rules: TextRules = TextRules(),
        pictures: Sequence[Picture] = (),
    ) -> Generation:
        max_tokens = call.sampling.max_tokens
        longest = max(map(len, prompts))
        room = self.max_context - longest
        if max_tokens is not None and max_tokens > room > 0:
            if not call.cuts_max_tokens:
                bound = f"at most {room} after this prompt"
                raise ContextLengthError("max_tokens", max_tokens, bound, self.max_context, longest, max_tokens)
            call.warn("max_tokens", f"{max_tokens} is more than the context has room for: {room} are generated at most")
            params = msgspec.structs.replace(params, max_tokens=room)
        is_open = max_tokens is None and self.defaults.sampling.max_tokens is None
        if is_open and isinstance(call, TextCall) and call.fills_context:
            params = msgspec.structs.replace(params, max_tokens=room)
        generation = await self.front.open(
            prompts,
            params,
            RequestOptions(
                call.priority,
                call.cache_salt,
                self.draw,
                adapter=self.adapter(call.model, call.lora),
                pictures=pictures,
            ),
            arrival_time=call.arrival_time,
            beam=call.beam,
            rules=rules,
        )
        for state in generation.states if call.only_prompts else ():
            state.only_prompt = True
        return generation

    async def _check_tools(self, call: ChatCall, params: SamplingParams, prompt: str, is_loose: bool) -> None:
        """Check that calls can be held to the tools' schemas (`is_loose`: only to the grammars of custom tools). Raises
        `RequestError` naming the schema."""
        try:
            for warning in await self.front.check(params, call.cache_salt):
                call.warn("tools", warning)
        except RequestError:
            use = call.tools
            for tool in use.tools:
                name = tool["function"]["name"]
                if name not in use.schemas or (is_loose and name not in use.customs):
                    continue
                one = use._replace(schemas={name: use.schemas[name]}, mode="required")
                constraint, _ = self.dialect.constraint(one, prompt, None)
                try:
                    await self.front.check(
                        msgspec.structs.replace(params, structured_outputs=constraint), call.cache_salt
                    )
                except RequestError as of_tool:
                    raise RequestError(use.names[name], name, of_tool.bound, of_tool.code) from None
            with spelled({"structured_outputs": "tools"}):
                raise

    async def _check_form(self, call: Call, params: SamplingParams) -> None:
        """Check that the answer can be held to its form. Raises `RequestError`."""
        if params.structured_outputs is None:
            return
        for warning in await self.front.check(params, call.cache_salt):
            call.warn("structured_outputs", warning)
