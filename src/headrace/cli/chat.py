"""`headrace chat`: a conversation in the terminal, with a model in this process or with a running server.

Reads lines: from a terminal with a prompt sign and editing, from a pipe without. /reset forgets the conversation,
/quit or the end of input ends it. Either side is one function, from messages to pieces of text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Annotated, Any

import msgspec
import typer

from headrace.cli.options import build, options
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")

Message = dict[str, Any]
Answer = Callable[[list[Message]], Iterator[str]]


@options(SamplingParams, EngineConfig, only=SAMPLING, skip=("skip_tokenizer_init",), max_tokens=512)
def chat(
    model: Annotated[str | None, typer.Argument(help="A directory, a hub id, or 'builtin'.")] = None,
    *,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Talk to this server, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its key; better given in HEADRACE_API_KEY.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="Message that opens the conversation.")] = None,
    **fields: Any,
) -> None:
    """Talk with a model, here or on a server."""
    params = build(SamplingParams, fields)
    if url is not None:
        converse(remote(url.rstrip("/"), model, api_key, params), system)
        return
    config = build(
        EngineConfig, {name: value for name, value in fields.items() if name != "seed"} | {"model": model or "builtin"}
    )
    from headrace.llm import LLM

    with closing(LLM(**msgspec.structs.asdict(config))) as llm:
        converse(local(llm, params), system)


def local(llm: Any, params: SamplingParams) -> Answer:
    """Return the function that answers by an `LLM` in this process."""
    from headrace.text.templates import ChatTemplate

    tokenizer = llm.get_tokenizer()
    template = ChatTemplate.of(tokenizer, None)

    def answer(messages: list[Message]) -> Iterator[str]:
        text = template.render(messages, add_generation_prompt=True)
        prompt = {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        num_printed = 0
        for output in llm.stream(prompt, params):
            yield output.outputs[0].text[num_printed:]
            num_printed = len(output.outputs[0].text)

    return answer


def remote(url: str, model: str | None, api_key: str | None, params: SamplingParams) -> Answer:
    """Return the function that answers by an OpenAI-style server. Raises `HeadraceError` if there is none at `url`."""
    import httpx

    from headrace.cli.bench.serve import authorization, first_model

    headers = authorization(api_key)
    body = {name: getattr(params, name) for name in SAMPLING if getattr(params, name) is not None}
    body |= {"model": model or first_model(url, headers)["id"], "stream": True}

    def answer(messages: list[Message]) -> Iterator[str]:
        try:
            with (
                httpx.Client(timeout=httpx.Timeout(10.0, read=None), trust_env=False) as client,
                client.stream(
                    "POST", f"{url}/v1/chat/completions", json=body | {"messages": messages}, headers=headers
                ) as reply,
            ):
                if reply.status_code != 200:
                    raise HeadraceError(f"{url} answered {reply.status_code}: {reply.read().decode(errors='replace')}")
                for line in reply.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if not data or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise HeadraceError(f"{url}: {event['error'].get('message', event['error'])}")
                    for choice in event.get("choices") or []:
                        yield choice.get("delta", {}).get("content") or ""
        except httpx.HTTPError as error:
            raise HeadraceError(f"{url}: {type(error).__name__}: {error}") from error

    return answer


def converse(answer: Answer, system: str | None) -> None:
    """Hold the conversation until /quit or the end of input. On a terminal an error ends the turn only."""
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        print("/reset forgets the conversation, /quit ends it.", file=sys.stderr)
    for line in lines(interactive):
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in answer(messages):
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
            print()
        except HeadraceError as error:
            if not interactive:
                raise
            messages.pop()
            print(f"headrace: {error}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": "".join(pieces)})


def lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from sys.stdin
        return
    with suppress(ImportError):  # editing and history, where Python was built with them
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
