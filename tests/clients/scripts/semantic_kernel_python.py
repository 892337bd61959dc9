"""semantic-kernel: its connector for OpenAI's API, with functions that are called by themselves."""

import asyncio
import json
from typing import Literal

import openai
import report
from pydantic import BaseModel, ConfigDict, Field
from report import check, expect
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function


class Answer(BaseModel):
    """A colour and a number."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


loop = asyncio.new_event_loop()


def client(url=report.URL, key="none"):
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


def service(name="builtin", url=report.URL, key="none"):
    return OpenAIChatCompletion(ai_model_id=name, async_client=client(url, key))


scripted = service("scripted", report.SCRIPTED_URL, report.KEY)


def ask(text="Say hello.", server=None, system=None, kernel=None, **settings):
    history = ChatHistory(system_message=system)
    history.add_user_message(text)
    settings = OpenAIChatPromptExecutionSettings(**{"max_tokens": 20} | settings)
    call = (server or service()).get_chat_message_content(history, settings, kernel=kernel)
    return loop.run_until_complete(call)


@check("chat")
def _():
    expect(str(ask()), "no text")


@check("stream")
def _():
    async def read():
        history = ChatHistory()
        history.add_user_message("Hello.")
        settings = OpenAIChatPromptExecutionSettings(max_tokens=200)
        return [str(part) async for part in scripted.get_streaming_chat_message_content(history, settings)]

    pieces = loop.run_until_complete(read())
    expect(len(pieces) > 2 and "".join(pieces) == "Hello from the script.", pieces)


@check("system prompt")
def _():
    expect(report.SYSTEM in str(ask(report.QUOTE, scripted, report.SYSTEM, max_tokens=200)), "not quoted")


cities = []


class Plugin:
    @kernel_function(description="The weather in a city")
    def weather(self, city: str) -> str:
        cities.append(city)
        return report.RESULT


replies = []


@check("tool call")
def _():
    kernel = Kernel()
    kernel.add_plugin(Plugin(), "plugin")
    auto = FunctionChoiceBehavior.Auto()
    replies.append(ask("How warm is Rome?", scripted, kernel=kernel, max_tokens=500, function_choice_behavior=auto))
    expect(cities == ["Rome"], cities)


@check("tool result")
def _():
    expect(replies and report.RESULT in str(replies[0]), replies)


@check("structured output")
def _():
    report.check_document(json.loads(str(ask("Name a colour.", max_tokens=200, response_format=Answer))))


@check("embeddings")
def _():
    embedding = OpenAITextEmbedding(ai_model_id="builtin", async_client=client())
    expect(len(loop.run_until_complete(embedding.generate_embeddings(["A cat.", "A dog."]))) == 2, "not two")


@check("any model name")
def _():
    expect(str(ask(server=service("gpt-3.5-turbo"))), "no text")


def cause(kind, call):
    error = report.refusal(ServiceResponseException, call)
    expect(isinstance(error.__cause__, kind), (error, error.__cause__))


@check("unknown model")
def _():
    cause(openai.NotFoundError, lambda: ask(server=service("none", report.SCRIPTED_URL, report.KEY)))


@check("context overflow")
def _():
    cause(openai.BadRequestError, lambda: ask(report.TOO_LONG))


@check("wrong key")
def _():
    cause(openai.AuthenticationError, lambda: ask(server=service("scripted", report.SCRIPTED_URL, "wrong")))


@check("usage")
def _():
    usage = ask().metadata["usage"]
    expect(usage.prompt_tokens and usage.completion_tokens, usage)


@check("cancel")
def _():
    async def begin():
        history = ChatHistory()
        history.add_user_message(report.COUNT)

        async def read():
            settings = OpenAIChatPromptExecutionSettings(max_tokens=50_000)
            async for _ in scripted.get_streaming_chat_message_content(history, settings):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.5)

    loop.run_until_complete(begin())
    report.await_stop()


@check("max_tokens above the context")
def _():
    cause(openai.BadRequestError, lambda: ask(max_tokens=report.MAX_TOKENS))


report.lacks("its messages have none", "reasoning")
