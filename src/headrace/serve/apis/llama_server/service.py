"""llama-server's API without HTTP.

There are no slots here: the batch has `max_num_seqs` places, and every prompt finds its prefix in the cache
wherever it runs, so `/slots` shows places and no request can name one.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from headrace import __version__
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.serve.apis.llama_server.errors import NoSlotError
from headrace.serve.apis.llama_server.reply import Results, settings
from headrace.serve.apis.llama_server.request import (
    FORMS,
    IGNORED,
    MAX_PIECES,
    EmbeddingRequest,
    LlamaCompletionRequest,
    TemplateRequest,
    _are_many,
)
from headrace.serve.apis.openai.completions import OpenAI
from headrace.serve.apis.openai.embeddings import Embeddings
from headrace.serve.call import translation
from headrace.serve.call.parsing import convert
from headrace.serve.call.schema import TokenizeRequest
from headrace.text.tokenizer import Tokenizer


class LlamaServer:
    """The routes without HTTP."""

    def __init__(self, api: OpenAI) -> None:
        self.api = api
        self.embeddings = Embeddings(api)

    async def completion(self, body: dict[str, Any]) -> Results:
        """POST /completion."""
        asked = convert(LlamaCompletionRequest, body, IGNORED)
        prompts = await self._prompts(asked.prompt)
        made = {"model": asked.model, "stream": bool(asked.stream)} | translation.sampling(asked)
        if asked.max_tokens is not None and asked.n_predict is None:
            made["max_tokens"] = asked.max_tokens
        # Without a length an answer may fill the context; at least one, so that a prompt without room is told so.
        room = self.api.front.info.max_model_len - max(len(token_ids) for token_ids in prompts)
        made.setdefault("max_tokens", max(room, 1))
        if asked.n_probs:
            made["logprobs"] = asked.n_probs
        if asked.post_sampling_probs:
            asked.warn("post_sampling_probs", "ignored: probabilities are the model's, before samplers")
        if asked.cache_prompt is False:
            made["cache_salt"] = secrets.token_hex(16)
        if asked.logit_bias is not None:
            made["logit_bias"] = await self._logit_bias(asked.logit_bias)
        if asked.grammar and asked.json_schema is not None:
            raise RequestError("grammar", "given", "left out when there is a json_schema")
        if asked.grammar:
            made["structured_outputs"] = {"grammar": asked.grammar}
        elif asked.json_schema is not None:
            made["structured_outputs"] = {"json": asked.json_schema}
        form = "grammar" if asked.grammar else "json_schema"
        names = FORMS | {"structured_outputs": form, "logprobs": "n_probs"}
        if asked.n_predict is not None:
            names["max_tokens"] = "n_predict"
        with translation.told_as(names):
            answer = await self.api.completion(made | {"prompt": prompts})
        return Results(answer, asked, self.api.model, many=_are_many(asked.prompt))

    async def _prompts(self, prompt: str | list[Any], field: str = "prompt") -> list[list[int]]:
        given = prompt if _are_many(prompt) else [prompt]
        if not given or len(given) > 256:
            raise RequestError(field, len(given), "1 to 256 prompts")
        return [
            await self._ids(each, f"{field}[{index}]" if given is prompt else field) for index, each in enumerate(given)
        ]

    async def _ids(self, prompt: Any, field: str) -> list[int]:
        """One prompt: a text, or a list of token ids and texts mixed."""
        if isinstance(prompt, str):
            return await self._encode(prompt, True)
        if not isinstance(prompt, list) or not prompt:
            raise RequestError(field, prompt, "a text, or a list of token ids and texts")
        if sum(isinstance(piece, str) for piece in prompt) > MAX_PIECES:
            raise RequestError(field, len(prompt), f"at most {MAX_PIECES} texts between token ids")
        made: list[int] = []
        for index, piece in enumerate(prompt):
            if isinstance(piece, str):
                # Only the first begins a text.
                made += await self._encode(piece, index == 0)
            elif isinstance(piece, int) and not isinstance(piece, bool):
                made.append(piece)
            else:
                raise RequestError(f"{field}[{index}]", piece, "a token id or a text")
        return made

    async def _encode(self, text: str, add_special: bool) -> list[int]:
        told = await self.api.tokenize({"prompt": text, "add_special_tokens": add_special})
        tokens: list[int] = told["tokens"]
        return tokens

    async def _logit_bias(self, given: list[list[Any]] | dict[str, Any]) -> dict[str, float]:
        """By token id or by text, whose tokens all get the bias; false forbids a token."""
        pairs = list(given.items()) if isinstance(given, dict) else given
        if len(pairs) > 1024:
            raise RequestError("logit_bias", len(pairs), "a length from 0 to 1024")
        made: dict[str, float] = {}
        for index, pair in enumerate(pairs):
            if len(pair) != 2 or not isinstance(pair[0], (int, str)) or isinstance(pair[0], bool):
                raise RequestError(f"logit_bias[{index}]", pair, "a token id or a text, and a number or false")
            token, bias = pair
            if bias is False:
                bias = -100.0
            if isinstance(bias, bool) or not isinstance(bias, (int, float)):
                raise RequestError(f"logit_bias[{index}]", bias, "a number, or false")
            if isinstance(token, int) or token.lstrip("-").isdigit():
                made[str(token)] = bias
            else:
                made |= {str(token_id): bias for token_id in await self._encode(token, False)}
        return made

    async def apply_template(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /apply-template: what a chat would give the model."""
        asked = convert(TemplateRequest, body)
        text, _ = await self.api.chat_prompt(msgspec.structs.asdict(asked))
        return {"prompt": text} | translation.warnings(asked)

    async def embedding(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """POST /embedding. The reply is a list, which has no place for warnings."""
        asked = convert(EmbeddingRequest, body)
        self.api.check_model(asked.model)
        if asked.embd_normalize not in (None, -1, 2):
            raise RequestError("embd_normalize", asked.embd_normalize, "2 (length 1) or -1 (as they are)")
        prompts = await self._prompts(asked.content, "content")
        with translation.told_as({"prompt": "content"}):
            found = await self.embeddings.vectors(prompts, normalize=asked.embd_normalize != -1, field="content")
        return [{"index": index, "embedding": [row]} for index, row in enumerate(found.rows)]

    def props(self) -> dict[str, Any]:
        """GET /props."""
        info, tokenizer = self.api.front.info, self.api.front.tokenizer
        names = tokenizer.special_tokens if tokenizer is not None else {}
        params = SamplingParams(**{"max_tokens": None, **self.api.defaults})
        return {
            "default_generation_settings": {"n_ctx": info.max_model_len, "params": settings(params)},
            "total_slots": info.max_num_seqs,
            "model_alias": self.api.model,
            "model_path": info.model,
            "modalities": {"vision": False, "audio": False},
            "chat_template": (tokenizer.chat_template if tokenizer is not None else None) or "",
            "bos_token": names.get("bos_token", ""),
            "eos_token": names.get("eos_token", ""),
            "build_info": f"headrace-{__version__}",
            "is_sleeping": False,
        }

    def slots(self, fail_on_no_slot: bool) -> list[dict[str, Any]]:
        """GET /slots: the places of the batch, the taken ones first. Raises `NoSlotError` if it is asked to."""
        client, info = self.api.front.client, self.api.front.info
        num_busy = min(client.stats.num_running, info.max_num_seqs)
        if fail_on_no_slot and num_busy == info.max_num_seqs:
            raise NoSlotError("no slot is available")
        return [
            {"id": place, "n_ctx": info.max_model_len, "speculative": False, "is_processing": place < num_busy}
            for place in range(info.max_num_seqs)
        ]


async def tokenize(api: OpenAI, asked: TokenizeRequest) -> dict[str, Any]:
    """POST /tokenize as llama-server has it: `content` to token ids, with their texts if `with_pieces`."""
    text = {"model": asked.model, "prompt": asked.content, "add_special_tokens": bool(asked.add_special)}
    with translation.told_as({"prompt": "content"}):
        reply = await api.tokenize(text)
    if asked.parse_special is False:
        asked.warn("parse_special", "ignored: special tokens in a text are always read as such")
    tokenizer = api.front.tokenizer
    if asked.with_pieces and tokenizer is not None:
        reply["tokens"] = [{"id": token_id, "piece": _piece(tokenizer, token_id)} for token_id in reply["tokens"]]
    return reply | translation.warnings(asked)


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """A token as text, or as bytes where it is a part of a character."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
