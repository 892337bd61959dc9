"""OpenAI's completions, chats and models, and vLLM's tokenize and detokenize: each takes a JSON object and returns an
answer or a reply.

Builds a `Call` of each request, its fields under OpenAI's names. `add_routes` puts the functions on an app; `storage`
calls them for the lines of batches, and `responses_input` shares the functions that read a `Sampled`. Knows no HTTP.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.applications import Starlette

from headrace.engine.generation import off_loop
from headrace.engine.library.model_facts import ModelFacts
from headrace.protocol import bounds
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.constraints import StructuredOutputs, constraint_of
from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import OPENAI
from headrace.serve import routing
from headrace.serve.apis.openai.answers import ChatAnswer, CompletionAnswer
from headrace.serve.apis.openai.reply import Detokenized, ModelCard, ModelList
from headrace.serve.call.call import Call, ChatCall, SamplingFields, TextCall, prompt_call, spelled
from headrace.serve.call.listing import NO_FACTS
from headrace.serve.call.models import ModelSet
from headrace.serve.call.replies import Tokenized, token_text
from headrace.serve.call.schema import (
    IN_ANOTHER_FORM,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
    parse,
)
from headrace.serve.call.service import ServedModel
from headrace.text.messages import read_messages
from headrace.text.pictures.marks import Pictures
from headrace.text.tools import functions
from headrace.text.tools.choice import NO_TOOLS, ToolUse

# Parameters of a beam search, with the values that have no effect without `use_beam_search`.
BEAM_FIELDS = {
    "beam_width": None,
    "length_penalty": 1,
    "early_stopping": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
}

# vLLM's older fields for a form, and llama-server's, with the fields of `StructuredOutputs` that they set.
GUIDED = {
    "json_schema": "json",
    "grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_structural_tag": "structural_tag",
}


async def complete(model: ServedModel, body: dict[str, Any]) -> CompletionAnswer:
    """OpenAI's text completions.

    Raises `HeadraceError`s of all kinds.
    """
    request = parse(CompletionRequest, body)
    model.check_model(request.model)
    call = text_call(request)
    return CompletionAnswer(await model.complete(call), call, model)


async def chat(model: ServedModel, body: dict[str, Any]) -> ChatAnswer:
    """OpenAI's chat completions.

    Raises `HeadraceError`s of all kinds.
    """
    request = parse(ChatCompletionRequest, body)
    model.check_model(request.model)
    call = chat_call(request)
    return ChatAnswer(await model.chat(call), call, model)


def text_call(request: CompletionRequest) -> TextCall:
    """Return a text completion as a call. Raises `RequestError`."""
    check_stream(request, bool(request.stream))
    form, spelling = answer_form(request)
    sampling = SamplingFields.of(request, OPENAI, but=IN_ANOTHER_FORM)
    sampling.logprobs = request.logprobs
    call = TextCall(
        model=request.model,
        sampling=sampling,
        form=form,
        beam=beam_params(request),
        stream=bool(request.stream),
        warnings=request.warnings,
        spelling=spelling,
        prompts=as_prompts(request.prompt),
        echo=bool(request.echo),
    )
    set_options(call, request)
    return call


def chat_call(request: ChatCompletionRequest) -> ChatCall:
    """Return a chat as a call. Raises `RequestError`."""
    check_stream(request, bool(request.stream))
    form, spelling = answer_form(request)
    sampling = SamplingFields.of(request, OPENAI, but=IN_ANOTHER_FORM)
    beam = beam_params(request)
    # 0 is the default, and some clients always send it.
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs", request.top_logprobs, "left out unless logprobs is true")
    if request.logprobs:
        sampling.logprobs = request.top_logprobs or 0
    if request.max_completion_tokens is not None:
        sampling.max_tokens = request.max_completion_tokens
        spelling["max_tokens"] = "max_completion_tokens"
    pictures = Pictures()
    call = ChatCall(
        model=request.model,
        sampling=sampling,
        form=form,
        beam=beam,
        stream=bool(request.stream),
        warnings=request.warnings,
        spelling=spelling,
        messages=read_messages(request.messages, request.warnings.add, pictures),
        pictures=pictures,
        tools=_tools_of(request),
        reasoning_effort=request.reasoning_effort,
        include_reasoning=request.include_reasoning is not False,
        chat_template=request.chat_template,
        template_variables=request.chat_template_kwargs or {},
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        echo=bool(request.echo),
        stop_in_reasoning=bool(request.stop_in_reasoning),
    )
    set_options(call, request)
    if request.documents:
        call.template_variables = {"documents": request.documents} | call.template_variables
    if call.echo and not call.echoed:
        call.warn("echo", "ignored: the last message is not the assistant's, or has no text")
    return call


def _tools_of(request: ChatCompletionRequest) -> ToolUse:
    """Return the tools of a chat, which OpenAI's older form has as functions. Raises `RequestError`."""
    tools, choice, parallel = request.tools, request.tool_choice, request.parallel_tool_calls is not False
    older, older_choice = request.functions, request.function_call
    if not older and older_choice in (None, "none", "auto"):
        return ToolUse.of(tools, choice, parallel) if tools or choice is not None or not parallel else NO_TOOLS
    if tools or choice not in (None, "none"):
        raise RequestError("functions", older, "left out beside tools, which replace them")
    request.warn("functions", "OpenAI's older form, read as tools; the reply has function_call")
    return functions.tool_use(older, older_choice)


async def tokenize(model: ServedModel, body: dict[str, Any]) -> Tokenized:
    """POST /tokenize. Raises `RequestError`."""
    request = parse(TokenizeRequest, body)
    model.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("prompt", request.prompt, "given, or else messages, and not both")
    text = request.prompt
    if text is None:
        text = await model.render(prompt_call(request))
    elif request.chat_template is not None:
        request.warnings.add("chat_template", "ignored: a prompt goes through no template")
    special = request.messages is None if request.add_special_tokens is None else request.add_special_tokens
    token_ids = await model.encode(text, special)
    texts: list[str] | UnsetType = UNSET
    if request.return_token_strs:
        tokenizer = model.tokenizer
        texts = await off_loop(len(token_ids), lambda: [token_text(tokenizer, token_id) for token_id in token_ids])
    return Tokenized(
        count=len(token_ids),
        max_model_len=model.max_context,
        tokens=token_ids,
        token_strs=texts,
        warnings=request.warnings.reply(),
    )


async def detokenize(model: ServedModel, body: dict[str, Any]) -> Detokenized:
    """Token ids to text.

    Raises `RequestError`.
    """
    request = parse(DetokenizeRequest, body)
    model.check_model(request.model)
    vocab_size = model.front.info.vocab_size
    for token_id in () if bounds.are_ids(request.tokens, vocab_size - 1) else request.tokens:
        if not 0 <= token_id < vocab_size:
            raise RequestError("tokens", token_id, f"a token id from 0 to {vocab_size - 1}")
    tokenizer = model.tokenizer
    decode = lambda: tokenizer.decode(request.tokens, skip_special_tokens=False)  # noqa: E731
    text = await off_loop(len(request.tokens), decode)
    return Detokenized(prompt=text, content=text, warnings=request.warnings.reply())


async def model_list(models: ModelSet) -> ModelList:
    """The models that are served, loaded or not."""
    cards = [_card_of(models, name, facts) for name, facts in (await models.listed()).items()]
    first_id, last_id = (cards[0].id, cards[-1].id) if cards else (None, None)
    return ModelList(data=cards, has_more=False, first_id=first_id, last_id=last_id)


async def model_card(models: ModelSet, name: str) -> ModelCard:
    """One model.

    Raises `ModelNotFoundError`.
    """
    name = models.true_name(name)
    return _card_of(models, name, NO_FACTS if models.running_as(name) else await models.facts(name))


def _card_of(models: ModelSet, name: str, facts: ModelFacts) -> ModelCard:
    running = models.running_as(name)
    if running is None:
        created, root, context, measured = int(facts.modified), name, facts.context_length, None
        activations, tags, names, parent = "", list[str](), tuple[str, ...](), None
    else:
        model, info = running.served, running.client.info
        # The path of the folder must not reach a client.
        root = info.model if model.stays_loaded else name
        created, context, measured = model.created, info.max_model_len, model.quality(info)
        activations, tags, names = info.activations, model.tags, model.names
        parent = model.name if name in model.adapters else None
        if parent is not None:
            root, names, measured = name, (), None
    return ModelCard(
        id=name,
        created=created,
        root=root,
        parent=parent,
        max_model_len=context,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).isoformat(),
        aliases=list(names) if len(names) > 1 else UNSET,
        activations=activations or UNSET,
        quality=UNSET if measured is None else measured,
        tags=tags or UNSET,
    )


def check_stream(request: Sampled, stream: bool) -> None:
    """Raise `RequestError` for a field that does not go with the kind of the reply: a stream, or a whole one."""
    if request.stream_options is not None and not stream:
        raise RequestError("stream_options", "an object", "left out unless stream is true")
    if stream and request.best_of is not None and request.best_of > (request.n or 1):
        raise RequestError("best_of", request.best_of, "left out of a stream, or n: the best are known at the end")


def set_options(call: Call, request: Sampled) -> None:
    """Set the fields of a call that concern its way through the server and the extent of its reply."""
    call.add_special_tokens = request.add_special_tokens
    call.truncate_prompt_tokens = request.truncate_prompt_tokens
    call.priority = request.priority or 0
    call.timeout = request.timeout
    call.cache_salt = request.cache_salt or ""
    call.lora = request.lora
    call.request_id = request.request_id
    call.stream_options = request.stream_options
    call.return_token_ids = bool(request.return_token_ids)
    call.explain = bool(request.explain)
    call.return_progress = bool(request.return_progress)
    call.timings_per_token = bool(request.timings_per_token)
    call.verbose = bool(request.verbose)


def answer_form(request: Sampled) -> tuple[StructuredOutputs | None, dict[str, str]]:
    """Return the form that a request requires, and the spelling by which errors about it name its field.

    Raises `RequestError` for an invalid form, and for more than one.
    """
    forms: dict[str, dict[str, Any]] = {}
    for name, kind in GUIDED.items():
        value = getattr(request, name)
        if value not in (None, False):
            forms[name] = {kind: value, "whitespace_pattern": request.guided_whitespace_pattern}
    if request.structured_outputs is not None:
        forms["structured_outputs"] = request.structured_outputs
    fields = _of_response_format(request.response_format)
    if fields is not None:
        forms["response_format"] = fields
    if not forms:
        if request.guided_whitespace_pattern is not None:
            raise RequestError("guided_whitespace_pattern", request.guided_whitespace_pattern, "beside guided_json")
        return None, {}
    name, *others = forms
    if others:
        raise RequestError(others[0], getattr(request, others[0]), f"left out: {name} says what form the answer has")
    spelling = {"structured_outputs": name}
    with spelled(spelling):
        return constraint_of(forms[name]), spelling


def _of_response_format(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of a `StructuredOutputs`; None for plain text."""
    if response_format is None:
        return None
    field = "response_format"
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            # The fields in which llama-server and TGI take a schema.
            schema = response_format.get("schema") or response_format.get("value")
            return {"json": schema} if schema else {"json_object": True}
        case "json_schema":
            inner = response_format.get("json_schema", response_format)
            if not isinstance(inner, Mapping):
                raise RequestError(f"{field}.json_schema", inner, "an object with a schema")
            schema = inner.get("schema")
            if schema is None:
                raise RequestError(f"{field}.json_schema.schema", None, "given")
            return {"json": schema}
        case "structural_tag":
            return {"structural_tag": msgspec.json.encode(response_format).decode()}
        case other:
            raise RequestError(f"{field}.type", other, "text, json_object, json_schema or structural_tag")


def beam_params(request: Sampled) -> BeamSearchParams | None:
    """Return the beam search of a request: as wide as `beam_width`, or `best_of`, or `n` (as vLLM has it), with the
    best `n` in the reply. Raises `RequestError`; also for its parameters without `use_beam_search`."""
    if not request.use_beam_search:
        for name, neutral in BEAM_FIELDS.items():
            value = getattr(request, name)
            if value is not None and value != neutral:
                raise RequestError(name, value, "left out unless use_beam_search is true")
        return None
    num_answers = 1 if request.n is None else request.n
    width = request.beam_width
    return BeamSearchParams(
        n=num_answers,
        beam_width=(request.best_of or num_answers) if width is None else width,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=False if request.early_stopping is None else request.early_stopping,
        num_beam_groups=1 if request.num_beam_groups is None else request.num_beam_groups,
        diversity_penalty=request.diversity_penalty or 0.0,
    )


def as_prompts(prompt: str | list[Any], field: str = "prompt") -> list[str | list[int]]:
    """Return one prompt or many, each a text or a list of ids, as a list. Raises `RequestError`."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and set(map(type, prompt)) == {int}:
        return [prompt]
    bounds.check("prompt_list", prompt, field)
    for index, item in enumerate(prompt):
        ids = isinstance(item, list) and set(map(type, item)) <= {int}
        if not isinstance(item, str) and not ids:
            raise RequestError(f"{field}[{index}]", item, "a string or a list of token ids")
    return list(prompt)


def add_routes(app: Starlette, models: ModelSet) -> None:
    """Add `/v1/completions`, `/v1/chat/completions`, `/detokenize` and `/v1/models`."""
    for path, function, request_type, reply_type in (
        ("/v1/completions", complete, CompletionRequest, CompletionAnswer),
        ("/v1/chat/completions", chat, ChatCompletionRequest, ChatAnswer),
    ):
        routing.post(
            app,
            path,
            models.bound(function),
            takes=request_type,
            gives=reply_type.reply_type,
            streams=routing.EVENT_STREAM,
            chunks=(reply_type.chunk_type,),
        )
    routing.post(app, "/detokenize", models.bound(detokenize), takes=DetokenizeRequest, gives=Detokenized)
    routing.get(app, "/v1/models", functools.partial(model_list, models), gives=ModelList)
    routing.get(app, "/v1/models/{name:path}", functools.partial(model_card, models), gives=ModelCard)
