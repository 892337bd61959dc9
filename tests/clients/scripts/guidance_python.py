"""guidance: its model for servers that speak OpenAI's API."""

import json

import guidance
import openai
import report
from guidance import assistant, gen, system, user
from report import check, expect


def model(name="builtin", url=report.URL, key="none"):
    return guidance.models.OpenAI(name, echo=False, base_url=url + "/v1", api_key=key, max_retries=0)


def ask(lm, text="Say hello.", max_tokens=20):
    with user():
        lm += text
    with assistant():
        lm += gen("reply", max_tokens=max_tokens)
    return lm["reply"]


def scripted(key=report.KEY, name="scripted"):
    return model(name, report.SCRIPTED_URL, key)


@check("chat")
def _():
    expect(ask(model()), "no text")


@check("stream")
def _():
    # It streams every answer.
    expect(ask(scripted(), "Hello.", 200) == "Hello from the script.", "another text")


@check("system prompt")
def _():
    lm = scripted()
    with system():
        lm += report.SYSTEM
    expect(report.SYSTEM in ask(lm, report.QUOTE, 200), "not quoted")


models = []


@check("tool call")
def _():
    calls = []

    def weather(city: str) -> str:
        """The weather in a city."""
        calls.append(city)
        return report.RESULT

    lm = scripted()
    with user():
        lm += "How warm is Rome?"
    with assistant():
        lm += gen(tools=[weather])
    expect(calls == ["Rome"], calls)
    models.append(lm)


@check("tool result")
def _():
    lm = models[0]
    with user():
        lm += "So?"
    with assistant():
        lm += gen("last", max_tokens=500)
    expect(lm["last"], "no answer after the result")


@check("structured output")
def _():
    lm = model()
    with user():
        lm += "Name a colour."
    with assistant():
        lm += guidance.json("reply", schema=report.SCHEMA, max_tokens=200)
    report.check_document(json.loads(lm["reply"]))


report.lacks("it has none", "embeddings", "usage", "cancel", "reasoning")


@check("any model name")
def _():
    expect(ask(model("gpt-3.5-turbo")), "no text")


report.refuses("unknown model", openai.NotFoundError, lambda: ask(scripted(name="none")))
report.refuses(
    "context overflow", openai.BadRequestError, lambda: ask(model(), report.TOO_LONG), code="context_length_exceeded"
)
report.refuses("wrong key", openai.AuthenticationError, lambda: ask(scripted("wrong")))
report.refuses(
    "max_tokens above the context", openai.BadRequestError, lambda: ask(model(), max_tokens=report.MAX_TOKENS)
)
