"""openai-agents, by the Responses API and by chat completions."""

import asyncio
from typing import Literal

import openai
import report
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, ConfigDict, Field
from report import check, expect

set_tracing_disabled(True)
# One for all calls: the package keeps its connections from run to run.
loop = asyncio.new_event_loop()


class Answer(BaseModel):
    """A colour and a number."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return report.RESULT


def models(name="builtin", url=report.URL, key="none"):
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
    return (
        OpenAIResponsesModel(model=name, openai_client=client),
        OpenAIChatCompletionsModel(model=name, openai_client=client),
    )


def scripted():
    return models("scripted", report.SCRIPTED_URL, report.KEY)


def agent(model, max_tokens=20, **more):
    return Agent(name="Tester", model=model, model_settings=ModelSettings(max_tokens=max_tokens), **more)


def run(text, *arguments, **more):
    return loop.run_until_complete(Runner.run(agent(*arguments, **more), text))


@check("chat")
def _():
    for model in models():
        expect(run("Say hello.", model).final_output, model)


@check("stream")
def _():
    async def pieces(model):
        reply = Runner.run_streamed(agent(model, 200), "Hello.")
        events = [event.data async for event in reply.stream_events() if event.type == "raw_response_event"]
        return [event.delta for event in events if event.type == "response.output_text.delta"]

    for model in scripted():
        parts = loop.run_until_complete(pieces(model))
        expect(len(parts) > 2 and "".join(parts) == "Hello from the script.", (model, parts))


@check("system prompt")
def _():
    for model in scripted():
        expect(report.SYSTEM in run(report.QUOTE, model, 200, instructions=report.SYSTEM).final_output, model)


replies = []


@check("tool call")
def _():
    for model in scripted():
        replies.append(run("How warm is Rome?", model, 500, tools=[weather]))
        kinds = [item.type for item in replies[-1].new_items]
        expect(kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds)


@check("tool result")
def _():
    expect(len(replies) == 2, replies)
    for reply in replies:
        expect(report.RESULT in reply.final_output, reply)


@check("structured output")
def _():
    for model in models():
        report.check_document(run("Name a colour.", model, 200, output_type=Answer).final_output.model_dump())


report.lacks("it has none", "embeddings")


@check("any model name")
def _():
    for model in models("gpt-4.1"):
        expect(run("Say hello.", model).final_output, model)


@check("unknown model")
def _():
    for model in models("none", report.SCRIPTED_URL, report.KEY):
        report.refusal(openai.NotFoundError, lambda model=model: run("Hello.", model))


@check("context overflow")
def _():
    for model in models():
        error = report.refusal(openai.BadRequestError, lambda model=model: run(report.TOO_LONG, model))
        expect(error.code == "context_length_exceeded", error)


@check("wrong key")
def _():
    for model in models("scripted", report.SCRIPTED_URL, "wrong"):
        report.refusal(openai.AuthenticationError, lambda model=model: run("Hello.", model))


@check("usage")
def _():
    for model in models():
        usage = run("Say hello.", model).context_wrapper.usage
        expect(usage.input_tokens and usage.output_tokens, usage)


@check("cancel")
def _():
    async def read_a_part(model):
        reply = Runner.run_streamed(agent(model, 50_000), report.COUNT)
        stream = reply.stream_events()
        for _ in range(6):
            await anext(stream)
        reply.cancel()
        await stream.aclose()
        await asyncio.sleep(1)

    for model in scripted():
        loop.run_until_complete(read_a_part(model))
        report.await_stop()


@check("max_tokens above the context")
def _():
    for model in models():
        report.refusal(openai.BadRequestError, lambda model=model: run("Hello.", model, report.MAX_TOKENS))


@check("reasoning")
def _():
    for model in scripted():
        kinds = [item.type for item in run("Think.", model, 200).new_items]
        expect(kinds == ["reasoning_item", "message_output_item"], (model, kinds))
