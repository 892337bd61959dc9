"""llama-server's API.

The batch has `max_num_seqs` places, and every prompt finds its prefix in the cache wherever it runs, so a slot is a
place that holds no cache. A request can name one to have the tokens there for a session file (`slots`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from headrace import __version__
from headrace.engine.generation import off_loop
from headrace.protocol import bounds
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import LLAMA_SERVER, NONES, spelling_of
from headrace.serve.apis.llama_server import reply
from headrace.serve.apis.llama_server.reply import NO_SLOT, LlamaAnswer, settings
from headrace.serve.apis.llama_server.request import (
    IGNORED,
    MAX_PIECES,
    MAX_PROMPTS,
    EmbeddingRequest,
    LlamaCompletionRequest,
    Prompt,
    TemplateRequest,
    are_many,
    text_in,
)
from headrace.serve.apis.llama_server.slots import Slots
from headrace.serve.call.call import SamplingFields, TextCall, prompt_call, spelled
from headrace.serve.call.embedding import VectorOptions, vectors
from headrace.serve.call.parsing import convert
from headrace.serve.call.replies import Tokenized, TokenPiece
from headrace.serve.call.schema import TokenizeRequest
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import CallError
from headrace.text.tokenizer import Tokenizer
from headrace.text.vectors import prompted

OWN = SamplingFields.own_defaults(LLAMA_SERVER)
TOKEN_ID = re.compile("-?[0-9]{1,20}")


class LlamaServer:
    """The routes without HTTP."""

    def __init__(self, model: ServedModel, slots: Slots | None = None) -> None:
        self.model, self.saved = model, slots

    async def completion(self, body: dict[str, Any]) -> LlamaAnswer:
        """llama-server's completion."""
        request = convert(LlamaCompletionRequest, body, IGNORED)
        return await self.answer(request, await self._prompts(request.prompt), are_many(request.prompt))

    async def answer(
        self,
        request: LlamaCompletionRequest,
        prompts: list[list[int]],
        many: bool = False,
        stop_token_ids: Sequence[int] = (),
    ) -> LlamaAnswer:
        """Start a completion of each of `prompts`; the request's own fields hold no prompt. `many`: the reply is a
        list. An answer also ends at one of `stop_token_ids`. Raises `HeadraceError`s of all kinds."""
        if self.saved is not None:
            self.saved.check_id(request.id_slot)
        elif request.id_slot is not None:
            request.warn("id_slot", "ignored: a prefix is found wherever it was computed; see --slot-save-path")
        call = await self._call(request, prompts)
        if stop_token_ids:
            call.sampling.stop_token_ids = [*(call.sampling.stop_token_ids or ()), *stop_token_ids]
        answer = await self.model.complete(call)
        places = None if self.saved is None else self.saved.take(len(answer.generation.states), request.id_slot)
        return LlamaAnswer(answer, request, self.model, many, places)

    async def _call(self, request: LlamaCompletionRequest, prompts: list[list[int]]) -> TextCall:
        sampling = SamplingFields.of(request, LLAMA_SERVER, but=("logit_bias",))
        spelling = spelling_of(LLAMA_SERVER)
        if request.n_predict is None:
            spelling["max_tokens"] = "max_tokens"
            if request.max_tokens is not None and request.max_tokens not in NONES[LLAMA_SERVER]["max_tokens"]:
                sampling.max_tokens = request.max_tokens
        if request.n_probs == 0:
            sampling.logprobs = None
        if request.logit_bias is not None:
            sampling.logit_bias = await self._logit_bias(request.logit_bias)
        if request.grammar and request.json_schema is not None:
            raise RequestError("grammar", "given", "left out when there is a json_schema")
        form = None
        spelling["structured_outputs"] = "grammar" if request.grammar else "json_schema"
        with spelled(spelling):
            if request.grammar:
                form = StructuredOutputs(grammar=request.grammar)
            elif request.json_schema is not None:
                form = StructuredOutputs(json=request.json_schema)
        return TextCall(
            model=request.model,
            lora=request.lora,
            prompts=list(prompts),
            # Without a length an answer may fill the context.
            fills_context=True,
            cuts_max_tokens=True,
            sampling=sampling,
            own_defaults=OWN,
            form=form,
            stream=bool(request.stream),
            cache_salt=secrets.token_hex(16) if request.cache_prompt is False else "",
            warnings=request.warnings,
            spelling=spelling,
        )

    async def _prompts(self, prompt: Prompt, field: str = "prompt") -> list[list[int]]:
        prompts = prompt if are_many(prompt) else [prompt]
        if not prompts or len(prompts) > MAX_PROMPTS:
            raise RequestError(field, len(prompts), f"1 to {MAX_PROMPTS} prompts")
        return [
            await self._ids(each, f"{field}[{index}]" if prompts is prompt else field)
            for index, each in enumerate(prompts)
        ]

    async def _ids(self, prompt: Any, field: str) -> list[int]:
        """Return the token ids of a prompt: a text, an object with a text, or a mixed list of token ids and texts."""
        if isinstance(prompt, dict):
            prompt, field = text_in(prompt, field), f"{field}.prompt_string"
        if isinstance(prompt, str):
            return await self.model.encode(prompt, True, field)
        if not isinstance(prompt, list) or not prompt:
            raise RequestError(field, prompt, "a text, or a list of token ids and texts")
        if set(map(type, prompt)) == {int}:
            return prompt
        if sum(isinstance(piece, str) for piece in prompt) > MAX_PIECES:
            raise RequestError(field, len(prompt), f"at most {MAX_PIECES} texts between token ids")
        token_ids: list[int] = []
        for index, piece in enumerate(prompt):
            if isinstance(piece, str):
                # Only the first piece begins a text.
                token_ids += await self.model.encode(piece, index == 0, f"{field}[{index}]")
            elif isinstance(piece, int) and not isinstance(piece, bool):
                token_ids.append(piece)
            else:
                raise RequestError(f"{field}[{index}]", piece, "a token id or a text")
        return token_ids

    async def _logit_bias(self, biases: list[list[Any]] | dict[str, Any]) -> dict[int, float]:
        """Return the biases by token id. All tokens of a text get its bias; false forbids a token."""
        pairs = list(biases.items()) if isinstance(biases, dict) else biases
        if len(pairs) > 1024:
            raise RequestError("logit_bias", len(pairs), "a length from 0 to 1024")
        by_id: dict[int, float] = {}
        for index, pair in enumerate(pairs):
            if len(pair) != 2 or not isinstance(pair[0], (int, str)) or isinstance(pair[0], bool):
                raise RequestError(f"logit_bias[{index}]", pair, "a token id or a text, and a number or false")
            token, bias = pair
            if bias is False:
                bias = -100.0
            if isinstance(bias, bool) or not isinstance(bias, (int, float)):
                raise RequestError(f"logit_bias[{index}]", bias, "a number, or false")
            bounds.check("logit_bias_value", bias, "logit_bias")
            is_id = isinstance(token, int) or TOKEN_ID.fullmatch(token)
            token_ids = [int(token)] if is_id else await self.model.encode(token, False, f"logit_bias[{index}]")
            by_id |= dict.fromkeys(token_ids, float(bias))
        return by_id

    async def apply_template(self, body: dict[str, Any]) -> reply.LlamaPrompt:
        """The prompt that the template makes of a chat."""
        request = convert(TemplateRequest, body)
        text, _ = await self._chat_prompt(request)
        return reply.LlamaPrompt(prompt=text, warnings=request.warnings.reply())

    async def count_tokens(self, body: dict[str, Any]) -> reply.LlamaTokens:
        """The number of tokens in a chat's prompt."""
        request = convert(TemplateRequest, body)
        _, token_ids = await self._chat_prompt(request)
        return reply.LlamaTokens(input_tokens=len(token_ids), warnings=request.warnings.reply())

    async def _chat_prompt(self, request: TemplateRequest) -> tuple[str, list[int]]:
        call = prompt_call(request, request.tool_choice, request.parallel_tool_calls)
        return await self.model.chat_prompt(call)

    async def embedding(self, body: dict[str, Any]) -> list[reply.LlamaVector]:
        """Vectors of texts.

        The reply is a list, which has no place for warnings.
        """
        request = convert(EmbeddingRequest, body)
        self.model.check_model(request.model)
        if request.embd_normalize not in (None, -1, 2):
            raise RequestError("embd_normalize", request.embd_normalize, "2 (length 1) or -1 (as they are)")
        info, content = self.model.front.info, request.content
        if info.vectors.prompt_name:
            several = content if are_many(content) else [content]
            texts = [text_in(each, "content") if isinstance(each, dict) else each for each in several]
            content = prompted(texts, None, info)
        prompts = await self._prompts(content, "content")
        with spelled({"prompt": "content"}):
            adapter = self.model.adapter(request.model)
            options = VectorOptions(normalize=request.embd_normalize != -1, adapter=adapter)
            embedded = await vectors(self.model.front, prompts, options, "content")
        return [reply.LlamaVector(index=index, embedding=[row]) for index, row in enumerate(embedded.rows)]

    def props(self, query: Mapping[str, str]) -> reply.LlamaProps:
        """The served model, and the defaults of its requests."""
        self.model.check_model(query.get("model"))
        info, tokenizer = self.model.front.info, self.model.front.tokenizer
        names = tokenizer.special_tokens if tokenizer is not None else {}
        params = self.model.defaults.sampling.over(OWN).params()
        return reply.LlamaProps(
            default_generation_settings=reply.LlamaDefaults(
                n_ctx=self.model.max_context, params=settings(params, info.eos_token_ids)
            ),
            total_slots=info.max_num_seqs,
            model_alias=self.model.name,
            model_path=info.model,
            modalities={"vision": bool(info.pictures), "audio": False},
            chat_template=self.model.template.sources[0] if self.model.template is not None else "",
            bos_token=names.get("bos_token", ""),
            eos_token=names.get("eos_token", ""),
            build_info=f"headrace-{__version__}",
            is_sleeping=False,
        )

    def slots(self, query: Mapping[str, str]) -> list[reply.LlamaSlot]:
        """The places of the batch.

        Places in use come first. Raises `CallError` if all are in use and `query` has `fail_on_no_slot`.
        """
        self.model.check_model(query.get("model"))
        client, info = self.model.front.client, self.model.front.info
        num_busy = min(client.stats.num_running, info.max_num_seqs)
        if query.get("fail_on_no_slot", "0") not in ("", "0") and num_busy == info.max_num_seqs:
            raise CallError(503, NO_SLOT, "no slot is available")
        return [
            reply.LlamaSlot(id=place, n_ctx=self.model.max_context, speculative=False, is_processing=place < num_busy)
            for place in range(info.max_num_seqs)
        ]


async def tokenize(model: ServedModel, request: TokenizeRequest) -> Tokenized:
    """POST /tokenize as llama-server has it: `content` to token ids, with their texts if `with_pieces`."""
    model.check_model(request.model)
    with spelled({"prompt": "content"}):
        token_ids = await model.encode(request.content or "", bool(request.add_special))
    if request.parse_special is False:
        request.warn("parse_special", "ignored: special tokens in a text are always read as such")
    tokens: Sequence[int | TokenPiece] = token_ids
    if request.with_pieces:
        tokenizer = model.tokenizer
        pieces = lambda: [TokenPiece(id=i, piece=_piece(tokenizer, i)) for i in token_ids]  # noqa: E731
        tokens = await off_loop(len(token_ids), pieces)
    return Tokenized(
        count=len(token_ids),
        max_model_len=model.max_context,
        tokens=tokens,
        warnings=request.warnings.reply(),
    )


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """Return a token as text, or as bytes where it is a part of a character."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
