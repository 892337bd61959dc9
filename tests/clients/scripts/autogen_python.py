"""autogen: its client for OpenAI's API, and an assistant with a tool."""

import asyncio
import json
from typing import Literal

import openai
import report
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import ModelFamily, SystemMessage, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel, ConfigDict, Field
from report import check, expect


class Answer(BaseModel):
    """A colour and a number."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


loop = asyncio.new_event_loop()
INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}


def client(name="builtin", url=report.URL, key="none", family=ModelFamily.UNKNOWN, **more):
    return OpenAIChatCompletionClient(
        model=name,
        base_url=url + "/v1",
        api_key=key,
        max_retries=0,
        model_info=INFO | {"family": family},
        **{"max_tokens": 20} | more,
    )


def scripted(key=report.KEY, name="scripted", **more):
    return client(name, report.SCRIPTED_URL, key, **{"max_tokens": 500} | more)


def ask(model, text="Say hello.", *before, **more):
    return loop.run_until_complete(model.create([*before, UserMessage(content=text, source="user")], **more))


def weather(city: str) -> str:
    """The weather in a city."""
    return report.RESULT


@check("chat")
def _():
    expect(ask(client()).content, "no text")


@check("stream")
def _():
    async def read():
        stream = scripted().create_stream([UserMessage(content="Hello.", source="user")])
        return [part async for part in stream if isinstance(part, str)]

    pieces = loop.run_until_complete(read())
    expect(len(pieces) > 2 and "".join(pieces) == "Hello from the script.", pieces)


@check("system prompt")
def _():
    expect(report.SYSTEM in ask(scripted(), report.QUOTE, SystemMessage(content=report.SYSTEM)).content, "not quoted")


@check("tool call")
def _():
    from autogen_core.tools import FunctionTool

    reply = ask(scripted(), "How warm is Rome?", tools=[FunctionTool(weather, description="The weather in a city")])
    expect(json.loads(reply.content[0].arguments) == {"city": "Rome"}, reply)


@check("tool result")
def _():
    agent = AssistantAgent("tester", model_client=scripted(), tools=[weather], reflect_on_tool_use=True)
    reply = loop.run_until_complete(agent.run(task="How warm is Rome?"))
    expect(report.RESULT in reply.messages[-1].content, reply)


@check("structured output")
def _():
    reply = ask(client(max_tokens=200), "Name a colour.", json_output=Answer)
    report.check_document(json.loads(reply.content))


report.lacks("it has none", "embeddings")


@check("any model name")
def _():
    expect(ask(client("gpt-3.5-turbo")).content, "no text")


report.refuses("unknown model", openai.NotFoundError, lambda: ask(scripted(name="none")))
report.refuses(
    "context overflow", openai.BadRequestError, lambda: ask(client(), report.TOO_LONG), code="context_length_exceeded"
)
report.refuses("wrong key", openai.AuthenticationError, lambda: ask(scripted("wrong")))


@check("usage")
def _():
    usage = ask(client()).usage
    expect(usage.prompt_tokens and usage.completion_tokens, usage)


@check("cancel")
def _():
    async def begin():
        token = CancellationToken()
        message = UserMessage(content=report.COUNT, source="user")
        task = asyncio.create_task(scripted(max_tokens=50_000).create([message], cancellation_token=token))
        await asyncio.sleep(2)
        token.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.5)

    loop.run_until_complete(begin())
    report.await_stop()


report.refuses(
    "max_tokens above the context", openai.BadRequestError, lambda: ask(client(max_tokens=report.MAX_TOKENS))
)


@check("reasoning")
def _():
    expect("Two and two" in (ask(scripted(family=ModelFamily.R1), "Think.").thought or ""), "no thought")
