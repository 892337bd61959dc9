"""haystack: its generator and embedder for OpenAI's API, and its agent."""

import json
from typing import Annotated

import openai
import report
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from report import check, expect


def generator(name="builtin", url=report.URL, key="none", callback=None, **settings):
    return OpenAIChatGenerator(
        api_key=Secret.from_token(key),
        model=name,
        api_base_url=url + "/v1",
        max_retries=0,
        streaming_callback=callback,
        generation_kwargs={"max_tokens": 20} | settings,
    )


def scripted(key=report.KEY, name="scripted", **more):
    return generator(name, report.SCRIPTED_URL, key, **{"max_tokens": 500} | more)


def ask(model, text="Say hello."):
    return model.run([ChatMessage.from_user(text)])["replies"][0]


@tool
def weather(city: Annotated[str, "the city's name"]) -> str:
    """The weather in a city."""
    return report.RESULT


@check("chat")
def _():
    expect(ask(generator()).text, "no text")


@check("stream")
def _():
    pieces = []
    ask(scripted(callback=lambda part: pieces.append(part.content)), "Hello.")
    expect(len(pieces) > 2 and "".join(pieces) == "Hello from the script.", pieces)


@check("system prompt")
def _():
    messages = [ChatMessage.from_system(report.SYSTEM), ChatMessage.from_user(report.QUOTE)]
    expect(report.SYSTEM in scripted().run(messages)["replies"][0].text, "not quoted")


@check("tool call")
def _():
    reply = scripted().run([ChatMessage.from_user("How warm is Rome?")], tools=[weather])["replies"][0]
    expect(reply.tool_calls[0].arguments == {"city": "Rome"}, reply)


@check("tool result")
def _():
    reply = Agent(chat_generator=scripted(), tools=[weather]).run([ChatMessage.from_user("How warm is Rome?")])
    expect(report.RESULT in reply["messages"][-1].text, reply)


@check("structured output")
def _():
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": report.SCHEMA, "strict": True}}
    report.check_document(json.loads(ask(generator(response_format=form, max_tokens=200), "A colour.").text))


@check("embeddings")
def _():
    embedder = OpenAITextEmbedder(api_key=Secret.from_token("none"), api_base_url=report.URL + "/v1", model="builtin")
    expect(len(embedder.run("A cat.")["embedding"]) > 1, "no vector")


@check("any model name")
def _():
    expect(ask(generator("gpt-3.5-turbo")).text, "no text")


report.refuses("unknown model", openai.NotFoundError, lambda: ask(scripted(name="none")))
report.refuses(
    "context overflow",
    openai.BadRequestError,
    lambda: ask(generator(), report.TOO_LONG),
    code="context_length_exceeded",
)
report.refuses("wrong key", openai.AuthenticationError, lambda: ask(scripted("wrong")))


@check("usage")
def _():
    usage = ask(generator()).meta["usage"]
    expect(usage["prompt_tokens"] and usage["completion_tokens"], usage)


@check("cancel")
def _():
    import gc

    class StopError(Exception):
        pass

    def stop(part):
        raise StopError

    report.refusal(StopError, lambda: ask(scripted(callback=stop, max_tokens=50_000), report.COUNT))
    gc.collect()
    report.await_stop()


report.refuses(
    "max_tokens above the context", openai.BadRequestError, lambda: ask(generator(max_tokens=report.MAX_TOKENS))
)
report.lacks("its generator for chat completions reads none", "reasoning")
