"""`headrace chat`: a conversation in the terminal, with a model in this process or with a running server.

Reads lines: from a terminal with a prompt sign and editing, from a pipe without. `cli.conversation` holds the messages
and runs the commands that begin with a slash. The two sources of answers are here.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from headrace.cli.conversation import SETTINGS, Conversation, Message
from headrace.cli.options import build, options
from headrace.cli.remote import CaCert, address_of, authorization, client_of, is_url, models_of, reason
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError
from headrace.protocol.parameters import LLAMA_SERVER, OWN_DEFAULTS
from headrace.protocol.params import SamplingParams

SHAPES = ("temperature", "top_p", "top_k", "min_p")
"""Parameters whose defaults are the model's, or llama-server's."""


@options(
    SamplingParams,
    EngineConfig,
    only=SETTINGS,
    skip=("skip_tokenizer_init",),
    max_tokens=512,
    **dict.fromkeys(SHAPES),
)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="A directory, a hub id, or 'builtin'; with --url its name there. An address is --url."),
    ] = None,
    *,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Talk to this server, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its key; better settings in HEADRACE_API_KEY.")
    ] = None,
    cacert: CaCert = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="Message that opens the conversation.")] = None,
    **fields: Any,
) -> None:
    """Talk with a model, here or on a server. Temperature and filters are the ones that the model's files advise, or
    llama-server's defaults."""
    settings = {name: value for name, value in fields.items() if name not in SHAPES or value is not None}
    if url is None and model is not None and is_url(model):
        url, model = model, None
    if url is not None:
        with closing(Remote(address_of(url), model, api_key, cacert)) as remote:
            Conversation(remote, build(SamplingParams, remote.defaults() | settings), system).run()
        return
    served = {"model": "builtin" if model is None else model}
    config = build(EngineConfig, {name: settings[name] for name in settings.keys() - {"seed"}} | served)
    with closing(Local(config)) as source:
        Conversation(source, build(SamplingParams, source.defaults() | settings), system).run()


class Local:
    """Answers by a model in this process. An interrupt waits for the step that runs."""

    is_interruptible = False

    def __init__(self, config: EngineConfig) -> None:
        self.num_tokens = 0
        self._config = config
        self._open(config.model)

    @property
    def model(self) -> str:
        return self._config.model

    def defaults(self) -> dict[str, Any]:
        """Return the sampling parameters of the model's files, with llama-server's defaults for `SHAPES` behind
        them."""
        from headrace.engine.library.model_settings import default_params

        advised = default_params(self._config.model, self._config.revision)
        defaults: dict[str, Any] = {**OWN_DEFAULTS[LLAMA_SERVER]}
        return defaults | {name: value for name, value in advised.items() if name in SETTINGS}

    def switch(self, model: str) -> None:
        """Load another model in place of this one. Where that fails, load this one again and raise the error."""
        before = self.model
        self.close()
        try:
            self._open(model)
        except HeadraceError:
            self._open(before)
            raise

    def answer(self, messages: list[Message], params: SamplingParams) -> Generator[str]:
        """Return the answer's text in pieces; a piece is empty where a step added no text."""
        from headrace.text.named_templates import with_ends

        text = self._template.render(messages, add_generation_prompt=True)
        prompt = {"prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}
        length = self.num_tokens = 0
        params = with_ends(params, self._template, self._tokenizer)
        with closing(self._llm.stream(prompt, params)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                answer = output.outputs[0]
                self.num_tokens = len(answer.token_ids)
                yield answer.text[length:]
                length = len(answer.text)

    def close(self) -> None:
        self._llm.close()

    def _open(self, model: str) -> None:
        from headrace.llm import LLM
        from headrace.text.named_templates import template_of

        self._config = msgspec.structs.replace(self._config, model=model)
        self._llm = LLM(**msgspec.structs.asdict(self._config))
        self._tokenizer = self._llm.get_tokenizer()
        self._template = template_of(self._tokenizer)


class Remote:
    """Answers by an OpenAI-style server. Raises `HeadraceError` if there is none at `url`."""

    is_interruptible = True

    def __init__(self, url: str, model: str | None, api_key: str | None, cacert: Path | None = None) -> None:
        self.num_tokens = 0
        self._url = url
        self._headers = authorization(api_key)
        self._client = client_of(url, cacert)
        try:
            self.model = model or models_of(self._client, url, self._headers)[0]["id"]
        except BaseException:
            self.close()
            raise

    def defaults(self) -> dict[str, Any]:
        """Return the server's `SHAPES`, or llama-server's defaults of them where it does not say them."""
        import httpx

        defaults: dict[str, Any] = {**OWN_DEFAULTS[LLAMA_SERVER]}
        try:
            reply = self._client.get(f"{self._url}/props", headers=self._headers, timeout=10.0)
            stated = reply.raise_for_status().json()["default_generation_settings"]["params"]
            return defaults | {name: stated[name] for name in SHAPES if isinstance(stated.get(name), int | float)}
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return defaults

    def close(self) -> None:
        self._client.close()

    def switch(self, model: str) -> None:
        """Name another model in the requests from now on."""
        self.model = model

    def answer(self, messages: list[Message], params: SamplingParams) -> Generator[str]:
        """Return the answer's text in the pieces that the server sends."""
        import httpx

        body = {name: getattr(params, name) for name in SETTINGS if getattr(params, name) is not None}
        body |= {"model": self.model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        self.num_tokens = 0
        try:
            path = f"{self._url}/v1/chat/completions"
            with self._client.stream("POST", path, json=body, headers=self._headers) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise HeadraceError(f"{self._url} answered {reply.status_code}: {reason(reply)}")
                for line in reply.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if not data or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise HeadraceError(f"{self._url}: {event['error'].get('message', event['error'])}")
                    self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)
                    for choice in event.get("choices") or []:
                        yield choice.get("delta", {}).get("content") or ""
        except httpx.HTTPError as error:
            raise HeadraceError(f"{self._url}: {type(error).__name__}: {error}") from error
