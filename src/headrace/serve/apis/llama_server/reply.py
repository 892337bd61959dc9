"""The replies of llama-server's API: answers, whole or as a stream of events, descriptions of the server, and
errors."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headrace.engine.generation import off_loop, width
from headrace.protocol.errors import ContextLengthError
from headrace.protocol.parameters import LLAMA_SERVER, NO_SEED, names_in
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import TokenLogprob
from headrace.serve.apis.llama_server.request import LlamaCompletionRequest
from headrace.serve.apis.llama_server.slots import HeldSlots
from headrace.serve.call import progress
from headrace.serve.call.call import Answer
from headrace.serve.call.parsing import WarningLines
from headrace.serve.call.replies import PromptProgress, Timings, clamp, timings, token_text
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import Api, ErrorBody, event
from headrace.serve.routing import Readable, large_event
from headrace.text.outputs import RequestState, TextDelta

# Codes of errors that llama-server has for the type.
UNSERVED, NO_SLOT = "not_supported_error", "unavailable_error"
TYPES = {code: code for code in (UNSERVED, NO_SLOT)} | {"context_length_exceeded": "exceed_context_size_error"}


class LlamaErrorBody(msgspec.Struct, kw_only=True):
    """The body of an error; the last two fields are there where the prompt does not fit the context."""

    code: int
    message: str
    type: str
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class LlamaError(msgspec.Struct, kw_only=True):
    error: LlamaErrorBody


def _error(status: int, body: ErrorBody) -> LlamaError:
    """Return the error in OpenAI's shape, but with the status as its code."""
    kind = TYPES.get(body.code, body.type)
    return LlamaError(
        error=LlamaErrorBody(
            code=status, message=body.message, type=kind, n_prompt_tokens=body.n_prompt_tokens, n_ctx=body.n_ctx
        )
    )


def _overflow(error: ContextLengthError) -> str:
    """Return llama-server's own words, by which its clients detect that they must shorten the prompt."""
    size = f"{error.num_prompt + error.num_answer} tokens"
    return f"request ({size}) exceeds the available context size ({error.max_model_len} tokens), try increasing it"


COUNTERS = ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens")
"""The routes that count the tokens of chats."""
PREFIXES = (*COUNTERS, "/completion", "/props", "/slots", "/infill", "/apply-template", "/embedding", "/lora-adapters")
API = Api(LlamaError, _error, prefixes=PREFIXES, overflow=_overflow)


class LlamaTopLogprob(msgspec.Struct, kw_only=True, gc=False):
    """A token and its log-probability; with `post_sampling_probs` its probability, 0 to 1."""

    id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class LlamaTokenLogprob(LlamaTopLogprob, kw_only=True, gc=False):
    top_logprobs: tuple[LlamaTopLogprob, ...] | UnsetType = UNSET
    top_probs: tuple[LlamaTopLogprob, ...] | UnsetType = UNSET


Probabilities = list[LlamaTokenLogprob] | UnsetType


class LlamaResult(msgspec.Struct, kw_only=True):
    """POST /completion: a whole answer, or the last event of one. With `response_fields`, it has these fields alone."""

    index: int | UnsetType = UNSET
    id_slot: int | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: WarningLines = UNSET
    content: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    completion_probabilities: Probabilities = UNSET


class LlamaPart(msgspec.Struct, kw_only=True):
    """An event of /completion that is not the last one of its answer."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: Probabilities = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    warnings: WarningLines = UNSET


class LlamaPrompt(msgspec.Struct, kw_only=True):
    prompt: str
    warnings: WarningLines = UNSET


class LlamaTokens(msgspec.Struct, kw_only=True):
    """POST /chat/completions/input_tokens."""

    input_tokens: int
    warnings: WarningLines = UNSET


class LlamaVector(msgspec.Struct, kw_only=True):
    index: int
    embedding: list[list[float]]


class LlamaDefaults(msgspec.Struct, kw_only=True):
    n_ctx: int
    params: dict[str, Any]


class LlamaProps(msgspec.Struct, kw_only=True):
    default_generation_settings: LlamaDefaults
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class LlamaSuccess(msgspec.Struct, kw_only=True):
    """POST /props and /lora-adapters."""

    success: bool


class SlotTimings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Milliseconds."""

    save_ms: float | UnsetType = UNSET
    restore_ms: float | UnsetType = UNSET


class LlamaSlotAction(msgspec.Struct, kw_only=True):
    """POST /slots/{slot_id}: tokens saved and bytes written, tokens restored and bytes read, or tokens erased."""

    id_slot: int
    filename: str | UnsetType = UNSET
    n_saved: int | UnsetType = UNSET
    n_written: int | UnsetType = UNSET
    n_restored: int | UnsetType = UNSET
    n_read: int | UnsetType = UNSET
    n_erased: int | UnsetType = UNSET
    timings: SlotTimings | UnsetType = UNSET
    warnings: WarningLines = UNSET


class LlamaSlot(msgspec.Struct, kw_only=True):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class LlamaAnswer(Readable):
    """A call's results, one for each prompt.

    Args:
        many: the request has several prompts, so that the reply is a list.
        places: the slots of the answers; None where there are none.
    """

    answer: Answer

    def __init__(
        self,
        answer: Answer,
        request: LlamaCompletionRequest,
        model: ServedModel,
        many: bool,
        places: HeldSlots | None = None,
    ) -> None:
        super().__init__(answer, bool(request.stream))
        self._request = request
        self._model = model
        self._many = many
        self._places = places
        self._follow = model.follow_prompt if request.return_progress else None

    def close(self) -> None:
        """Abort the requests that still run, and free the slots with the tokens that are in them."""
        if self._places is not None:
            self._places.give_back(self.answer.generation.states)
        super().close()

    def _slot(self, place: int) -> int:
        return -1 if self._places is None else self._places.ids[place]

    async def whole(self) -> Any:
        await self.answer.collect()
        if self._places is not None:
            self._places.give_back(self.answer.generation.states)
        return await off_loop(self.answer.size, self._whole)

    def _whole(self) -> Any:
        results = []
        for place, state in enumerate(self.answer.generation.states):
            result = self._result(place, state)
            result.content = state.text
            result.tokens = list(state.token_ids) if self._request.return_tokens else []
            result.completion_probabilities = self._probabilities(state)
            results.append(self._selected(result))
        return results if self._many else results[0]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield parts of the results, the last one of each with "stop": true. Raises the engine's errors."""
        warnings = self.answer.call.warnings.reply()
        async for place, piece, _ in progress.parts(self.answer, self._follow):
            state = self.answer.generation.states[place]
            if isinstance(piece, progress.Progressed):
                part = self._part(place, state)
                part.prompt_progress = piece.progress
                part.timings = piece.timings if self._request.timings_per_token else UNSET
                yield event(part)
                continue
            part = self._part(place, state, piece.text, piece.token_ids)
            wide = len(piece.logprobs) * width(piece.logprobs)
            part.completion_probabilities = await off_loop(wide, functools.partial(self._probabilities, piece))
            part.timings = timings([[state]]) if self._request.timings_per_token else UNSET
            part.warnings = warnings
            if piece.token_ids or piece.text:
                yield await large_event(part, wide)
                warnings = UNSET
            if state.finish is not None:
                yield event(self._selected(self._result(place, state)))

    def _part(self, place: int, state: RequestState, text: str = "", token_ids: Sequence[int] = ()) -> LlamaPart:
        return LlamaPart(
            index=place,
            content=text,
            tokens=list(token_ids),
            stop=False,
            id_slot=self._slot(place),
            tokens_predicted=len(state.token_ids),
            tokens_evaluated=len(state.request.prompt_token_ids),
        )

    def _result(self, place: int, state: RequestState) -> LlamaResult:
        """Return the last event of an answer."""
        finish = state.finish
        word = finish.stop_reason if finish is not None and isinstance(finish.stop_reason, str) else ""
        reason = finish.reason if finish is not None else ""
        kind = "word" if word else {"length": "limit", "stop": "eos"}.get(reason, "none")
        num_tokens = len(state.request.prompt_token_ids) + len(state.token_ids)
        text = self.answer.texts[place]
        if text is None and self.answer.tokenizer is not None:
            text = self.answer.tokenizer.decode(state.request.prompt_token_ids, False, True)
        return LlamaResult(
            index=place,
            id_slot=self._slot(place),
            stop=True,
            model=self._model.reply_name(self.answer.call.model),
            tokens_predicted=len(state.token_ids),
            tokens_evaluated=len(state.request.prompt_token_ids),
            generation_settings=settings(state.request.params, self._model.front.info.eos_token_ids)
            | ({"n_predict": 0} if state.only_prompt else {}),
            prompt=text or "",
            has_new_line="\n" in state.text,
            truncated=reason == "length" and num_tokens >= self._model.max_context,
            stop_type=kind,
            stopping_word=word,
            tokens_cached=len(state.request.prompt_token_ids) + max(len(state.token_ids) - 1, 0),
            timings=timings([[state]]),
            warnings=UNSET if self.stream else self.answer.call.warnings.reply(),
            content="",
            tokens=[],
        )

    def _probabilities(self, source: RequestState | TextDelta) -> Probabilities:
        return [self._entry(entry) for entry in source.logprobs] if self._request.n_probs else UNSET

    def _entry(self, entry: TokenLogprob) -> LlamaTokenLogprob:
        is_after = self.answer.generation.states[0].request.params.post_sampling_probs
        # After the samplers there are the tokens that they keep, as in llama-server, and no others.
        left = [(token_id, logprob) for token_id, logprob in entry.top if not is_after or math.exp(logprob) > 0.0]
        top = tuple(self._top(token_id, logprob, is_after) for token_id, logprob in left)
        chosen = self._top(entry.token_id, entry.logprob, is_after)
        return LlamaTokenLogprob(
            id=chosen.id,
            token=chosen.token,
            bytes=chosen.bytes,
            logprob=chosen.logprob,
            prob=chosen.prob,
            top_logprobs=UNSET if is_after else top,
            top_probs=top if is_after else UNSET,
        )

    def _top(self, token_id: int, logprob: float, is_after: bool) -> LlamaTopLogprob:
        tokenizer = self.answer.tokenizer
        return LlamaTopLogprob(
            id=token_id,
            token=token_text(tokenizer, token_id),
            bytes=tuple(b"" if tokenizer is None else tokenizer.token_bytes(token_id)),
            logprob=UNSET if is_after else clamp(logprob),
            prob=math.exp(logprob) if is_after else UNSET,
        )

    def _selected(self, result: LlamaResult) -> LlamaResult | dict[str, Any]:
        """Return the fields that `response_fields` names ("a/b" is b within a), or all if the request names none. The
        client chooses the fields and thus the shape, so they are a dict."""
        if not self._request.response_fields:
            return result
        fields = msgspec.to_builtins(result)
        selected: dict[str, Any] = {}
        for path in self._request.response_fields:
            value: Any = fields
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                selected[path] = value
        return selected | ({"warnings": fields["warnings"]} if "warnings" in fields else {})


def settings(params: SamplingParams, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling parameters under llama-server's names. A bias of None is minus infinity."""
    biases: dict[int, float | None] = dict(params.logit_bias or {})
    if params.ignore_eos:
        biases |= dict.fromkeys(eos_token_ids)
    stop: Sequence[str] = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return {name: getattr(params, field) for field, name in names_in(LLAMA_SERVER).items()} | {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": NO_SEED if params.seed is None else params.seed,
        "stop": list(stop),
        "samplers": list(params.order),
        "logit_bias": [{"token": token_id, "bias": bias} for token_id, bias in biases.items()],
        "n_probs": params.logprobs or 0,
    }
