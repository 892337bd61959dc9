"""instructor: documents by tool calls, by JSON schema, and streamed."""

from typing import Literal

import instructor
import openai
import report
from pydantic import BaseModel, ConfigDict, Field
from report import check, expect


class Answer(BaseModel):
    """A colour and a number."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


class Weather(BaseModel):
    """The weather in a city."""

    city: str


def client(mode=instructor.Mode.TOOLS, url=report.URL, key="none"):
    return instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0), mode=mode)


def ask(response_model, text="Name a colour.", server=None, **more):
    options = {"model": "builtin", "max_tokens": 200, "max_retries": 0} | more
    messages = [{"role": "user", "content": text}]
    return (server or client()).chat.completions.create(response_model=response_model, messages=messages, **options)


scripted = client(url=report.SCRIPTED_URL, key=report.KEY)
FORMS = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON)


@check("chat")
def _():
    expect(ask(None, "Say hello.").choices[0].message.content, "no text")


@check("stream")
def _():
    partial = client().chat.completions.create_partial(
        model="builtin", response_model=Answer, messages=[{"role": "user", "content": "A colour."}], max_tokens=200
    )
    parts = list(partial)
    expect(len(parts) > 1, parts)
    report.check_document(parts[-1].model_dump())


@check("system prompt")
def _():
    messages = [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.QUOTE}]
    reply = scripted.chat.completions.create(model="scripted", response_model=None, messages=messages)
    expect(report.SYSTEM in reply.choices[0].message.content, reply)


@check("tool call")
def _():
    expect(ask(Weather, "How warm is Rome?", scripted, model="scripted").city == "Rome", "another city")


report.lacks("it returns documents and runs no tools", "tool result")


@check("structured output")
def _():
    for mode in FORMS[:2]:
        report.check_document(ask(Answer, server=client(mode)).model_dump())


report.lacks("it returns documents", "embeddings")


@check("any model name")
def _():
    report.check_document(ask(Answer, model="gpt-3.5-turbo").model_dump())


def cause(kind, call):
    """The error of the server, which instructor wraps in one of its own."""
    error = report.refusal(Exception, call)
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    expect(error is not None, "the server's error is not among the causes")
    return error


@check("unknown model")
def _():
    cause(openai.NotFoundError, lambda: ask(Answer, server=scripted, model="none"))


@check("context overflow")
def _():
    error = cause(openai.BadRequestError, lambda: ask(Answer, report.TOO_LONG))
    expect(error.code == "context_length_exceeded", error)


@check("wrong key")
def _():
    wrong = client(url=report.SCRIPTED_URL, key="wrong")
    cause(openai.AuthenticationError, lambda: ask(Answer, server=wrong, model="scripted"))


@check("usage")
def _():
    _, reply = client().chat.completions.create_with_completion(
        model="builtin", response_model=Answer, messages=[{"role": "user", "content": "A colour."}], max_tokens=200
    )
    expect(reply.usage.prompt_tokens and reply.usage.completion_tokens, reply)


report.lacks("streams of documents end with the document", "cancel")


@check("max_tokens above the context")
def _():
    cause(openai.BadRequestError, lambda: ask(Answer, max_tokens=report.MAX_TOKENS))


report.lacks("it returns documents", "reasoning")
