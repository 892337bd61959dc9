"""outlines: its model for OpenAI's API, and its model for vLLM's, which sends regexes and grammars too."""

import json

import openai
import outlines
import report
from outlines import exceptions
from outlines.types import JsonSchema, Regex
from report import check, expect


def client(url=report.URL, key="none"):
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


scripted_client = client(report.SCRIPTED_URL, report.KEY)
model = outlines.from_vllm(client(), "builtin")
scripted = outlines.from_vllm(scripted_client, "scripted")


@check("chat")
def _():
    expect(model("Say hello.", max_tokens=20), "no text")
    expect(outlines.from_openai(client(), "builtin")("Say hello.", max_tokens=20), "no text by the OpenAI model")


@check("stream")
def _():
    pieces = list(scripted.stream("Hello."))
    expect(len(pieces) > 2 and "".join(filter(None, pieces)) == "Hello from the script.", pieces)


@check("system prompt")
def _():
    chat = outlines.inputs.Chat(
        [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.QUOTE}]
    )
    expect(report.SYSTEM in scripted(chat), "not quoted")


@check("structured output")
def _():
    schema = JsonSchema(json.dumps(report.SCHEMA))
    report.check_document(json.loads(model("Name a colour.", schema, max_tokens=200)))
    report.check_document(json.loads(outlines.from_openai(client(), "builtin")("A colour.", schema, max_tokens=200)))
    expect(model("A number:", Regex("[0-9]{3}"), max_tokens=20).isdigit(), "no number")


report.lacks("it has none", "tool call", "tool result", "embeddings", "usage", "reasoning")


@check("any model name")
def _():
    expect(outlines.from_vllm(client(), "gpt-3.5-turbo")("Say hello.", max_tokens=20), "no text")


report.refuses("unknown model", exceptions.NotFoundError, lambda: outlines.from_vllm(scripted_client, "none")("Hello."))


@check("context overflow")
def _():
    error = report.refusal(exceptions.BadRequestError, lambda: model(report.TOO_LONG))
    expect("maximum context length" in str(error), error)


@check("wrong key")
def _():
    wrong = outlines.from_vllm(client(report.SCRIPTED_URL, "wrong"), "scripted")
    report.refusal(exceptions.AuthenticationError, lambda: wrong("Hello."))


@check("cancel")
def _():
    import gc

    stream = scripted.stream(report.COUNT, max_tokens=50_000)
    for _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    del stream
    gc.collect()
    report.await_stop()


report.refuses(
    "max_tokens above the context", exceptions.BadRequestError, lambda: model("Hello.", max_tokens=report.MAX_TOKENS)
)
