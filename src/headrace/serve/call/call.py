"""`Call`, a request to the model with the sampling parameters that it gives, and `Answer`, its result; the same for all
APIs, without HTTP and JSON.

The request module of each API builds a `ChatCall` or a `TextCall` from its own JSON, `serve.call.service` makes the
`Answer` of it, and the reply module of the API reads that. An API with other names for the engine's fields maps them in
`spelling`, and errors and warnings about the fields use its names. The parser that splits an answer's text is an
argument: nothing here knows a model's format.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from headrace.engine import context
from headrace.engine.generation import Generation, width
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import LEAST_SHARE, NONES, OWN_DEFAULTS, SHARES, names_in
from headrace.protocol.params import SamplingParams, Watermark
from headrace.serve.call.adapters import AdapterScale
from headrace.serve.call.parsing import Warnings
from headrace.serve.call.schema import StreamOptions
from headrace.text.messages import ChatMessage, read_messages, without_billing
from headrace.text.outputs import ContentParser, MessageBuilder, MessageParser, MessagePart, Reasoning, TextDelta
from headrace.text.pictures.marks import Pictures
from headrace.text.pictures.reading import Cut
from headrace.text.stopped_parser import StoppedParser
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.choice import NO_TOOLS, ToolUse

FOR_JSON = frozenset(("max_string_length", "disable_additional_properties"))
"""Names of generation_config.json that concern JSON, and are no sampling parameters."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """The parameters that a caller gives, of those in the table; None: not given, so that a default holds. `params`
    checks them."""

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    post_sampling_probs: bool | None = None
    logit_bias: dict[int, float] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    no_repeat_ngram_size: int | None = None
    thinking_token_budget: int | None = None
    trace_decode_token_ids: list[int] | None = None
    watermark: Watermark | Mapping[str, Any] | bool | None = None
    samplers: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: bool | None = None

    @classmethod
    def own_defaults(cls, api: str) -> SamplingFields:
        """Return the defaults that `api` has in place of the table's."""
        return cls(**OWN_DEFAULTS.get(api, {}))  # type: ignore[arg-type]  # names and values of the table

    @classmethod
    def of(cls, body: object, api: str, prefix: str = "", but: Collection[str] = ()) -> SamplingFields:
        """Return the parameters in the attributes of a request's body, or of the object in it that `prefix` names;
        the attributes have the API's names. `but` are fields that the body has in another form. Raises
        `RequestError`."""
        fields = cls()
        for field, name in names_in(api).items():
            if field not in but:
                setattr(fields, field, getattr(body, name, None))
        return fields.translated(api, prefix)

    def translated(self, api: str, prefix: str = "") -> SamplingFields:
        """Return the fields as the engine has them: without the values by which `api` means "none".

        Raises `RequestError` for a value below the API's least one, with `prefix` before the API's name.
        """
        fields = copy.copy(self)
        for field in SHARES:
            if getattr(fields, field) == 0:
                setattr(fields, field, LEAST_SHARE)
        for field, nones in NONES.get(api, {}).items():
            value = getattr(fields, field)
            if value is not None and value < min(nones):
                raise RequestError(prefix + names_in(api)[field], value, f"{min(nones)} or more")
            if value in nones:
                setattr(fields, field, None)
        return fields

    def over(self, defaults: SamplingFields) -> SamplingFields:
        """Return the fields, with `defaults` for those that are not given."""
        fields = copy.copy(self)
        for name in self.__struct_fields__:
            if getattr(fields, name) is None:
                setattr(fields, name, getattr(defaults, name))
        return fields

    def without(self, names: Collection[str]) -> SamplingFields:
        """Return the fields but for these names."""
        fields = copy.copy(self)
        for name in names:
            setattr(fields, name, None)
        return fields

    def params(self, max_tokens: int | None = None) -> SamplingParams:
        """Return the parameters of a request. `max_tokens` holds where the fields have none; None is the rest of the
        context. Raises `RequestError` naming the field, the value and the bound."""
        present = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return SamplingParams(**{"max_tokens": max_tokens} | present)


class ModelDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of requests that give none, from a model's files and the server's flags. For JSON,
    `max_string_length` bounds a string whose schema has no bound, and `closes_objects` is
    `disable_additional_properties` of `StructuredOutputs`. `names` are the names in `sampling`, in the order in which
    they were given, for descriptions."""

    sampling: SamplingFields = msgspec.field(default_factory=SamplingFields)
    max_string_length: int | None = None
    closes_objects: bool = False
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelDefaults:
        """Return defaults that are checked already: the values of generation_config.json, of headrace.json and of
        `sampling_defaults`, under the names here."""
        sampling = SamplingFields()
        names = tuple(name for name in values if name not in FOR_JSON)
        for name in names:
            setattr(sampling, name, values[name])
        return cls(
            sampling=sampling,
            max_string_length=values.get("max_string_length"),
            closes_objects=values.get("disable_additional_properties", False),
            names=names,
        )

    def shown(self) -> dict[str, Any]:
        """Return the sampling parameters by name, in the order in which they were given."""
        return {name: getattr(self.sampling, name) for name in self.names}


class Call(msgspec.Struct, kw_only=True):
    """The fields that chats and text completions have in common.

    `sampling` are the sampling parameters that the request gives; others take the model's defaults, and then
    `own_defaults`, which the API has. `lora`: llama-server's scales of adapters. `form` is the form
    of the answer. `add_special_tokens` None: as the kind of prompt usually has them. `timeout` is in seconds from
    `arrival_time`, which is monotonic. `spelling` maps names of the engine's fields to the request's.
    `cuts_max_tokens`: a max_tokens beyond the context is cut to it, with a warning; otherwise it is an error.
    """

    model: str | None = None
    lora: list[AdapterScale] | None = None
    sampling: SamplingFields = msgspec.field(default_factory=SamplingFields)
    own_defaults: SamplingFields = msgspec.field(default_factory=SamplingFields)
    form: StructuredOutputs | None = None
    beam: BeamSearchParams | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    explain: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    verbose: bool = False
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    cuts_max_tokens: bool = False
    request_id: str | None = None
    warnings: Warnings = msgspec.field(default_factory=Warnings)
    spelling: Mapping[str, str] = {}
    arrival_time: float = msgspec.field(default_factory=context.arrival)

    @property
    def only_prompts(self) -> bool:
        """Return whether the answers are empty, for max_tokens is 0."""
        return self.sampling.max_tokens == 0 and self.beam is None

    @property
    def engine_fields(self) -> SamplingFields:
        """Return the sampling parameters for the engine, which makes at least one token: an empty answer drops it."""
        return msgspec.structs.replace(self.sampling, max_tokens=1) if self.only_prompts else self.sampling

    @property
    def logprobs(self) -> int | None:
        """Return the number of alternatives in the reply at each token; None: no log-probabilities."""
        return self.sampling.logprobs

    @property
    def prompt_logprobs(self) -> int | None:
        """Return the number of alternatives at each token of the prompt; None: no log-probabilities."""
        return self.sampling.prompt_logprobs

    def warn(self, field: str, why: str) -> None:
        """Add a warning: `field` (the engine's name) is in the request and has no effect."""
        self.warnings.add(spell(field, self.spelling), why)


class TextCall(Call, kw_only=True):
    """Texts, or lists of token ids, that the answers continue. `fills_context`: without max_tokens an answer may fill
    the context after the longest prompt."""

    prompts: list[str | list[int]]
    echo: bool = False
    fills_context: bool = False


class ChatCall(Call, kw_only=True):
    """A conversation that the answer continues. `chat_template` is a Jinja source in place of the model's template, and
    `template_variables` are further variables of it. `add_generation_prompt` None: unless the final message is
    continued. `thinks`: whether there is reasoning before the answer, where the template can choose. `echo`: the reply
    repeats the last message before the answer, if that is the assistant's. `stop_in_reasoning`: stop strings end the
    answer wherever they stand, not in its content alone. `pictures` are those whose marks stand in the messages; once
    the prompt is rendered, `cuts` has them decoded."""

    messages: list[ChatMessage]
    pictures: Pictures = msgspec.field(default_factory=Pictures)
    cuts: list[Cut] = []
    tools: ToolUse = NO_TOOLS
    reasoning_effort: str | None = None
    thinks: bool | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    template_variables: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    echo: bool = False
    stop_in_reasoning: bool = False

    def __post_init__(self) -> None:
        messages = without_billing(self.messages)
        if messages is not self.messages:
            self.messages = messages
            self.warn(
                "messages", "the line for billing is left out: it is not for the model, and changes with each call"
            )

    @property
    def echoed(self) -> str:
        """Return the text that the reply repeats before the answer."""
        content = self.messages[-1].content if self.echo and self.messages[-1].role == "assistant" else ""
        return "\n".join(content) if isinstance(content, list) else content or ""


class PromptRequest(Protocol):
    """The fields of OpenAI's that shape a chat's prompt."""

    @property
    def model(self) -> str | None: ...
    @property
    def messages(self) -> list[dict[str, Any]] | None: ...
    @property
    def tools(self) -> list[dict[str, Any]] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def warnings(self) -> Warnings: ...


def prompt_call(
    request: PromptRequest, tool_choice: str | dict[str, Any] | None = None, parallel_tool_calls: bool | None = None
) -> ChatCall:
    """Return the chat of a request that needs its prompt alone. Raises `RequestError`."""
    pictures = Pictures()
    return ChatCall(
        model=request.model,
        messages=read_messages(request.messages or [], request.warnings.add, pictures),
        pictures=pictures,
        tools=ToolUse.of(request.tools, tool_choice, parallel_tool_calls is not False),
        reasoning_effort=request.reasoning_effort,
        chat_template=request.chat_template,
        template_variables=request.chat_template_kwargs or {},
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        warnings=request.warnings,
    )


def spell(field: str, spelling: Mapping[str, str]) -> str:
    """Return the request's name for a field of the engine's, or for the object that the field is in."""
    whole = field.partition(".")[0]
    name = spelling.get(field) or spelling.get(whole, whole)
    return field if name == whole else name


@contextlib.contextmanager
def spelled(spelling: Mapping[str, str]) -> Iterator[None]:
    """In the block, a `RequestError` about a field of the engine's is raised under the name of the request's field."""
    try:
        yield
    except RequestError as error:
        name = spell(error.field, spelling)
        if name == error.field:
            raise
        raise error.renamed(name) from error


class Answer:
    """The result of a call. Read it once, by `parts` or `collect`; `message` and `finish_reason` return the state so
    far. `close` aborts the requests that still run.

    Args:
        prefix: begins the id; the rest is the caller's request id, or a fresh one.
        texts: the texts of the prompts; None for a prompt of token ids.
        new_parser: makes the parser that splits an answer's text into parts.
    """

    def __init__(
        self,
        generation: Generation,
        call: Call,
        tokenizer: Tokenizer | None,
        prefix: str,
        texts: list[str | None],
        new_parser: Callable[[], MessageParser] = ContentParser,
        include_reasoning: bool = True,
    ) -> None:
        self.generation = generation
        self.call = call
        self.tokenizer = tokenizer
        self.groups = [generation.of_prompt(place) for place in range(len(texts))]
        self.texts = texts
        request_id = generation.states[0].request.request_id
        self.id = f"{prefix}-{call.request_id or context.fresh_id() or request_id}"
        self._include_reasoning = include_reasoning
        self._parsers = [new_parser() for _ in generation.states]
        self._messages = [MessageBuilder() for _ in generation.states]

    async def parts(self) -> AsyncIterator[tuple[int, TextDelta, list[MessagePart]]]:
        """Yield the place of an answer, its new text and tokens, and the parts that have become certain, until all
        answers have ended. The last ones of a place may be empty. Raises the engine's errors."""
        async with self.generation:
            async for pieces in self.generation:
                for place, piece in pieces:
                    yield place, piece, self._take(place, piece.text)

    async def collect(self) -> None:
        """Read to the end. Raises the engine's errors."""
        async for _ in self.parts():
            pass

    def _take(self, place: int, text: str) -> list[MessagePart]:
        """Add an answer's next text; return its new parts."""
        parser, state = self._parsers[place], self.generation.states[place]
        if isinstance(parser, StoppedParser):
            parser.exempt = len(state.token_ids) <= state.request.params.min_tokens
        finish = state.finish
        is_cut = finish is not None and (finish.reason == "length" or isinstance(finish.stop_reason, str))
        parts = parser.feed(text, finish is not None, is_cut)
        if not self._include_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        for part in parts:
            self._messages[place].add(part)
        if parser.ended:
            self.generation.end(place, parser.stop_reason if isinstance(parser, StoppedParser) else None)
        return parts

    def message(self, place: int) -> MessageBuilder:
        """Return the parts of an answer so far."""
        return self._messages[place]

    def finish_reason(self, place: int) -> str | None:
        """Return the reason why an answer ended: the engine's, or "tool_calls"; None if it has not ended."""
        finish = self.generation.states[place].finish
        if finish is None:
            return None
        return "tool_calls" if finish.reason == "stop" and self._messages[place].calls else finish.reason

    @property
    def size(self) -> int:
        """Return an estimate of the number of tokens and log-probabilities in a reply."""
        num = 0
        for state in self.generation.states:
            num += len(state.request.prompt_token_ids) + len(state.token_ids)
            num += sum(len(rows) * (1 + width(rows)) for rows in (state.logprobs, state.prompt_logprobs))
        return num

    def close(self) -> None:
        """Abort the requests that still run, and free the data that only a reply needs."""
        self.generation.release()


def arguments_object(text: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object. Arguments of a call that was cut off may be no object; they stay
    text."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"_incomplete": text}
