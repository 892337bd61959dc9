"""Ollama's API without HTTP: generate, chat, embed, and what describes the one model that is served.

Options that belong to loading a model are listed in `warnings`: here the command line sets them.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from headrace.protocol import bounds
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.serve.apis.ollama.options import Asked, Options
from headrace.serve.apis.ollama.reply import Lines, now
from headrace.serve.apis.ollama.request import ChatRequest, EmbedRequest, GenerateRequest, ShowRequest, chat_message
from headrace.serve.apis.openai.completions import OpenAI
from headrace.serve.apis.openai.embeddings import Embeddings
from headrace.serve.call import translation
from headrace.serve.call.parsing import convert

NDJSON = "application/x-ndjson"
STAYS = "the model is loaded as long as the server runs"
IGNORED = {
    "keep_alive": STAYS,
    "template": "prompts are put into the model's own chat template; raw takes them as they are",
    "truncate": "a prompt that does not fit is refused, not cut",
    "shift": "an answer ends where the context does",
}
LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
NAMES = {"max_tokens": "options.num_predict", "response_format": "format"}
# Set when a server starts, not by a request.
LOADING = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "num_thread", "num_keep",
)  # fmt: skip


class UnservedError(HeadraceError):
    """Something of Ollama's that this server does not do."""

    status = 501
    code = "not_implemented"


class Ollama:
    """The routes without HTTP."""

    def __init__(self, api: OpenAI) -> None:
        self.api = api
        self.embeddings = Embeddings(api)

    async def chat(self, body: dict[str, Any]) -> Lines | dict[str, Any]:
        """POST /api/chat; without messages, as Ollama's clients load a model, a dict that says that it is loaded."""
        asked = self._asked(ChatRequest, body)
        if not asked.messages:
            return self._loaded(asked, {"message": {"role": "assistant", "content": ""}})
        messages = [chat_message(message, f"messages[{index}]") for index, message in enumerate(asked.messages)]
        made = self._common(asked) | {"messages": messages}
        if asked.tools:
            made["tools"] = asked.tools
        with translation.told_as(NAMES, "options."):
            return Lines(await self.api.chat(made), asked, chat=True, ids=False)

    async def generate(self, body: dict[str, Any]) -> Lines | dict[str, Any]:
        """POST /api/generate; without a prompt, as Ollama's clients load a model, a dict that says so."""
        asked = self._asked(GenerateRequest, body)
        if asked.images:
            raise RequestError("images", "images", "left out: the models served here read text")
        if asked.suffix:
            raise RequestError("suffix", asked.suffix, "left out: headrace does not support it yet")
        if not asked.prompt:
            return self._loaded(asked, {"response": ""})
        made = self._common(asked)
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        messages = [*system, {"role": "user", "content": asked.prompt}]
        with translation.told_as(NAMES, "options."):
            if not asked.raw and not asked.context:
                return Lines(await self.api.chat(made | {"messages": messages}), asked, chat=False, ids=True)
            if asked.raw:
                given = (await self.api.tokenize({"prompt": asked.prompt}))["tokens"]
            else:
                shape = {name: made.get(name) for name in ("chat_template_kwargs", "reasoning_effort")}
                _, given = await self.api.chat_prompt({"messages": messages} | shape)
            prompt = [*(asked.context or []), *given]
            for name in ("chat_template_kwargs", "reasoning_effort"):
                made.pop(name, None)
            made["logprobs"] = made.pop("top_logprobs", 0) if made.get("logprobs") else None
            # At least one, so that a prompt without room is told to be too long.
            made.setdefault("max_tokens", max(self.api.front.info.max_model_len - len(prompt), 1))
            return Lines(await self.api.completion(made | {"prompt": prompt}), asked, chat=False, ids=not asked.raw)

    async def embed(self, body: dict[str, Any], older: bool) -> dict[str, Any]:
        """POST /api/embed: vectors of length 1. `older`: /api/embeddings, whose one vector has any length."""
        begun = time.monotonic()
        asked = convert(EmbedRequest, body, {"keep_alive": STAYS})
        self.api.card(self._name(asked.model))
        if asked.options:
            asked.warn("options", "ignored: none of them changes a vector")
        field = "prompt" if older else "input"
        given = getattr(asked, field)
        if given is None:
            raise RequestError(field, None, "a text" if older else "a text, or a list of texts")
        texts = [given] if isinstance(given, str) else given
        kept = None if asked.truncate is False else -1
        with translation.told_as({"prompt": field}):
            found = await self.embeddings.vectors(
                texts, dimensions=asked.dimensions, normalize=not older, field=field, truncate_prompt_tokens=kept
            )
        told = translation.warnings(asked)
        if older:
            return {"embedding": found.rows[0]} | told
        times = {"total_duration": int((time.monotonic() - begun) * 1e9), "load_duration": 0}
        return {"model": asked.model, "embeddings": found.rows, "prompt_eval_count": found.num_tokens} | times | told

    def tags(self) -> dict[str, Any]:
        """GET /api/tags."""
        return {"models": [self._card()]}

    def ps(self) -> dict[str, Any]:
        """GET /api/ps. The model never expires; the date is one that no client takes for the past."""
        more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        return {"models": [self._card() | more | {"context_length": self.api.front.info.max_model_len}]}

    def show(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /api/show."""
        asked = convert(ShowRequest, body)
        self.known(asked)
        info, card = self.api.front.info, self._card()
        tokenizer = self.api.front.tokenizer
        template = (tokenizer.chat_template if tokenizer is not None else None) or ""
        family = card["details"]["family"]
        abilities = [
            ("tools", "tools" in template),
            ("thinking", "<think>" in template or "enable_thinking" in template),
        ]
        return {
            "modelfile": f"FROM {self.api.model}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in self.api.defaults.items()),
            "template": template,
            "details": card["details"],
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": info.max_model_len,
                f"{family}.vocab_size": info.vocab_size,
            },
            "capabilities": ["completion", *(name for name, has in abilities if has)],
            "modified_at": card["modified_at"],
        } | translation.warnings(asked)

    def known(self, asked: ShowRequest) -> str:
        """The model that is asked for. Raises `RequestError` or `ModelNotFoundError`."""
        name = asked.model or asked.name
        if not name:
            raise RequestError("model", name, "the name of a model")
        self.api.card(self._name(name))
        return name

    def _card(self) -> dict[str, Any]:
        api, info = self.api, self.api.front.info
        family = info.model.rstrip("/").rpartition("/")[2] or info.model
        details = {
            "parent_model": "",
            "format": "headrace",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": info.quantization or info.dtype,
        }
        return {
            "name": api.model,
            "model": api.model,
            "modified_at": datetime.fromtimestamp(api.created, UTC).isoformat().replace("+00:00", "Z"),
            "size": 0,
            # Of the name: what it stands for is fixed while the server runs.
            "digest": hashlib.sha256(api.model.encode()).hexdigest(),
            "details": details,
        }

    def _name(self, name: str) -> str:
        """Ollama's clients add the tag that Ollama takes for granted."""
        bare = name.removesuffix(":latest")
        return bare if name != self.api.model and bare == self.api.model else name

    def _asked(self, kind: type[Any], body: dict[str, Any]) -> Any:
        options = body.get("options")
        told = {}
        if isinstance(options, dict):
            told = {name: value for name, value in options.items() if name in LOADING}
            body = body | {"options": {name: value for name, value in options.items() if name not in LOADING}}
        asked = convert(kind, body, IGNORED)
        for name in told:
            asked.warn(f"options.{name}", "ignored: set when the server starts")
        with translation.told_as(NAMES, "options."):
            # Also where nothing is asked but to load the model.
            SamplingParams(**translation.sampling(asked.options or Options(), "options."))
        if asked.top_logprobs is not None:
            bounds.check("logprobs", asked.top_logprobs, "top_logprobs")
        self.api.card(self._name(asked.model))
        return asked

    def _loaded(self, asked: Asked, said: dict[str, Any]) -> dict[str, Any]:
        head = {"model": asked.model, "created_at": now()}
        return head | said | {"done": True, "done_reason": "load"} | translation.warnings(asked)

    def _common(self, asked: Asked) -> dict[str, Any]:
        """The fields of OpenAI's that both ways to ask share; adds what is ignored to the warnings."""
        options = asked.options or Options()
        made = {"model": self._name(asked.model), "stream": asked.stream is not False} | translation.sampling(
            options, "options."
        )
        context = self.api.front.info.max_model_len
        if options.num_ctx is not None and options.num_ctx != context:
            asked.warn("options.num_ctx", f"ignored: the context has {context} tokens, as the server was started")
        if options.tfs_z not in (None, 1.0):
            asked.warn("options.tfs_z", "ignored: Ollama itself dropped it")
        if options.penalize_newline is False:
            asked.warn("options.penalize_newline", "ignored: penalties know no newline")
        if asked.logprobs:
            made |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
        elif asked.top_logprobs:
            asked.warn("top_logprobs", "ignored without logprobs")
        if asked.think is not None:
            made["chat_template_kwargs"] = {"enable_thinking": bool(asked.think)}
            if isinstance(asked.think, str):
                made["reasoning_effort"] = LEVELS[asked.think]
        if asked.format == "json":
            made["response_format"] = {"type": "json_object"}
        elif isinstance(asked.format, dict):
            schema = {"name": "format", "schema": asked.format, "strict": True}
            made["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif asked.format:
            raise RequestError("format", asked.format, 'left out, "json", or a JSON schema')
        return made
