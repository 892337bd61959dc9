"""pydantic-ai, by OpenAI's and Anthropic's API."""

import asyncio
from typing import Literal

import report
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import check, expect


class Answer(BaseModel):
    """A colour and a number."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


def server(name="builtin", url=report.URL, key="none"):
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=url + "/v1", api_key=key))


def scripted_models():
    openai = OpenAIProvider(base_url=report.SCRIPTED_URL + "/v1", api_key=report.KEY)
    anthropic = AnthropicProvider(base_url=report.SCRIPTED_URL, api_key=report.KEY)
    return (
        OpenAIChatModel("scripted", provider=openai),
        OpenAIResponsesModel("scripted", provider=openai),
        AnthropicModel("scripted", provider=anthropic),
    )


def weather(city: str) -> str:
    """The weather in a city."""
    return report.RESULT


SHORT = {"max_tokens": 20}


@check("chat")
def _():
    expect(Agent(server(), model_settings=SHORT).run_sync("Say hello.").output, "no text")


@check("stream")
def _():
    async def run(model):
        async with Agent(model).run_stream("Hello.") as reply:
            return [piece async for piece in reply.stream_text(delta=True, debounce_by=None)]

    for model in scripted_models():
        pieces = asyncio.run(run(model))
        expect(len(pieces) > 2 and "".join(pieces) == "Hello from the script.", (model, pieces))


@check("system prompt")
def _():
    for model in scripted_models():
        reply = Agent(model, instructions=report.SYSTEM).run_sync(report.QUOTE)
        expect(report.SYSTEM in reply.output, (model, reply))


histories = []


@check("tool call")
def _():
    for model in scripted_models():
        reply = Agent(model, tools=[weather]).run_sync("How warm is Rome?")
        calls = [part for message in reply.all_messages() for part in message.parts if part.part_kind == "tool-call"]
        expect(calls[0].args_as_dict() == {"city": "Rome"}, (model, calls))
        histories.append(reply)


@check("tool result")
def _():
    expect(len(histories) == 3, histories)
    for reply in histories:
        expect(report.RESULT in reply.output, reply)


@check("structured output")
def _():
    for output in (Answer, NativeOutput(Answer)):
        agent = Agent(server(), output_type=output, model_settings={"max_tokens": 200})
        report.check_document(agent.run_sync("Name a colour.").output.model_dump())


report.lacks("tried with the packages that have them", "embeddings")


@check("any model name")
def _():
    expect(Agent(server("gpt-3.5-turbo"), model_settings=SHORT).run_sync("Say hello.").output, "no text")


def status(model, text="Hello.", **settings):
    return report.refusal(ModelHTTPError, lambda: Agent(model, model_settings=settings).run_sync(text)).status_code


@check("unknown model")
def _():
    expect(status(server("none", report.SCRIPTED_URL, report.KEY)) == 404, "another status")


@check("context overflow")
def _():
    error = report.refusal(ModelHTTPError, lambda: Agent(server()).run_sync(report.TOO_LONG))
    expect(error.status_code == 400 and error.body["code"] == "context_length_exceeded", error)


@check("wrong key")
def _():
    expect(status(server("scripted", report.SCRIPTED_URL, "wrong")) == 401, "another status")


@check("usage")
def _():
    for model in scripted_models():
        reply = Agent(model).run_sync("Hello.")
        expect(reply.usage.input_tokens and reply.usage.output_tokens, (model, reply.usage))


@check("cancel")
def _():
    async def read_a_part(model):
        agent = Agent(model, model_settings={"max_tokens": 50_000})
        async with agent.run_stream(report.COUNT) as reply:
            stream = reply.stream_text(delta=True, debounce_by=None)
            for _ in range(5):
                await anext(stream)
            await stream.aclose()

    async def begin(model):
        # It reads a stream to its end, unless the task is cancelled.
        task = asyncio.create_task(read_a_part(model))
        await asyncio.sleep(2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for model in scripted_models():
        asyncio.run(begin(model))
        report.await_stop()


@check("max_tokens above the context")
def _():
    expect(status(server(), max_tokens=report.MAX_TOKENS) == 400, "another status")


@check("reasoning")
def _():
    for model in scripted_models():
        parts = Agent(model).run_sync("Think.").response.parts
        expect(parts[0].part_kind == "thinking" and "Two and two" in str(parts[0]), (model, parts))
