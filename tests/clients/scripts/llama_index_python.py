"""llama-index, with its class for servers that speak OpenAI's API."""

import asyncio
import gc
from typing import Literal

import openai
import report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field
from report import check, expect


class Answer(BaseModel):
    """A colour and a number."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


def model(**more):
    options = {"api_base": report.URL + "/v1", "api_key": "none", "model": "builtin", "max_tokens": 20}
    return OpenAILike(**options | {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0} | more)


SCRIPTED = {"api_base": report.SCRIPTED_URL + "/v1", "api_key": report.KEY, "model": "scripted", "max_tokens": 2000}


def weather(city: str) -> str:
    """The weather in a city."""
    return report.RESULT


TOOL = FunctionTool.from_defaults(weather)


@check("chat")
def _():
    expect(model().chat([ChatMessage("Say hello.")]).message.content, "no text")


@check("stream")
def _():
    pieces = [part.delta for part in model(**SCRIPTED).stream_chat([ChatMessage("Hello.")])]
    expect(len(pieces) > 2 and "".join(filter(None, pieces)) == "Hello from the script.", pieces)


@check("system prompt")
def _():
    messages = [ChatMessage(report.SYSTEM, role="system"), ChatMessage(report.QUOTE)]
    expect(report.SYSTEM in model(**SCRIPTED).chat(messages).message.content, "not quoted")


@check("tool call")
def _():
    server = model(**SCRIPTED)
    reply = server.chat_with_tools([TOOL], user_msg="How warm is Rome?")
    calls = server.get_tool_calls_from_response(reply)
    expect(calls[0].tool_kwargs == {"city": "Rome"}, reply)


@check("tool result")
def _():
    async def run():
        return await FunctionAgent(tools=[TOOL], llm=model(**SCRIPTED)).run("How warm is Rome?")

    reply = asyncio.run(run())
    expect(report.RESULT in str(reply) and reply.tool_calls, reply)


@check("structured output")
def _():
    server = model(max_tokens=200, should_use_structured_outputs=True).as_structured_llm(Answer)
    report.check_document(server.chat([ChatMessage("Name a colour.")]).raw.model_dump())


@check("embeddings")
def _():
    embedding = OpenAILikeEmbedding(api_base=report.URL + "/v1", api_key="none", model_name="builtin")
    one, two = embedding.get_text_embedding_batch(["A cat.", "A dog."])
    expect(len(one) == len(two) > 1, one)


@check("any model name")
def _():
    expect(model(model="gpt-3.5-turbo").chat([ChatMessage("Say hello.")]).message.content, "no text")


report.refuses(
    "unknown model", openai.NotFoundError, lambda: model(**SCRIPTED | {"model": "none"}).chat([ChatMessage("Hello.")])
)
report.refuses(
    "context overflow",
    openai.BadRequestError,
    lambda: model().chat([ChatMessage(report.TOO_LONG)]),
    code="context_length_exceeded",
)


@check("wrong key")
def _():
    wrong = model(**SCRIPTED | {"api_key": "wrong"})
    report.refusal(openai.AuthenticationError, lambda: wrong.chat([ChatMessage("Hello.")]))


@check("usage")
def _():
    expect(model().chat([ChatMessage("Say hello.")]).raw.usage.prompt_tokens, "no usage")


@check("cancel")
def _():
    stream = model(**SCRIPTED | {"max_tokens": 50_000}).stream_chat([ChatMessage(report.COUNT)])
    for _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    # It leaves the connection to the garbage collector.
    del stream
    gc.collect()
    report.await_stop()


@check("max_tokens above the context")
def _():
    call = model(max_tokens=report.MAX_TOKENS)
    report.refusal(openai.BadRequestError, lambda: call.chat([ChatMessage("Hello.")]))


@check("reasoning")
def _():
    reply = model(**SCRIPTED).chat([ChatMessage("Think.")])
    expect(reply.raw.choices[0].message.reasoning_content, reply)
