"""The anthropic package for Python."""

import json

import anthropic
import report
from report import check, expect

client = anthropic.Anthropic(base_url=report.URL, api_key="none", max_retries=0)
scripted = anthropic.Anthropic(base_url=report.SCRIPTED_URL, api_key=report.KEY, max_retries=0)
TOOLS = [{"name": "weather", "description": "The weather in a city", "input_schema": report.PARAMETERS}]


def message(text="Say hello.", server=client, model="builtin", **more):
    messages = [{"role": "user", "content": text}]
    return server.messages.create(**{"model": model, "messages": messages, "max_tokens": 20} | more)


@check("chat")
def _():
    expect(message().content[0].text, "no text")


@check("stream")
def _():
    parts = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
    with scripted.messages.stream(**parts) as stream:
        pieces = list(stream.text_stream)
    expect(len(pieces) > 2 and "".join(pieces) == scripted.messages.create(**parts).content[0].text, pieces)


@check("system prompt")
def _():
    reply = message(report.QUOTE, scripted, "scripted", system=report.SYSTEM, max_tokens=200)
    expect(report.SYSTEM in reply.content[0].text, reply)


turns = [{"role": "user", "content": "How warm is Rome?"}]


@check("tool call")
def _():
    reply = scripted.messages.create(model="scripted", messages=turns, tools=TOOLS, max_tokens=300)
    call = next(block for block in reply.content if block.type == "tool_use")
    expect(call.input == {"city": "Rome"} and reply.stop_reason == "tool_use", reply)
    turns.append({"role": "assistant", "content": reply.content})
    turns.append(
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": report.RESULT}],
        }
    )


@check("tool result")
def _():
    reply = scripted.messages.create(model="scripted", messages=turns, tools=TOOLS, max_tokens=300)
    expect(report.RESULT in reply.content[0].text, reply)
    expect(client.messages.create(model="builtin", messages=turns, tools=TOOLS, max_tokens=5).stop_reason, "none")


@check("structured output")
def _():
    form = {"type": "json_schema", "schema": report.SCHEMA}
    reply = message("Name a colour.", output_config={"format": form}, max_tokens=200)
    report.check_document(json.loads(reply.content[0].text))


report.lacks("the API has none", "embeddings")


@check("any model name")
def _():
    expect(message(model="claude-sonnet").model == "builtin", "another name in the reply")


report.refuses("unknown model", anthropic.NotFoundError, lambda: message(server=scripted, model="claude-none"))


@check("context overflow")
def _():
    error = report.refusal(anthropic.BadRequestError, lambda: message(report.TOO_LONG))
    expect("prompt is too long" in str(error), error)


report.refuses("wrong key", anthropic.AuthenticationError, lambda: scripted.with_options(api_key="wrong").models.list())


@check("usage")
def _():
    reply = message()
    num = client.messages.count_tokens(model="builtin", messages=[{"role": "user", "content": "Say hello."}])
    expect(reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == num.input_tokens, (reply, num))
    expect(reply.usage.output_tokens, reply)


@check("cancel")
def _():
    content = [{"role": "user", "content": report.COUNT}]
    with scripted.messages.stream(model="scripted", messages=content, max_tokens=100_000) as stream:
        for _ in zip(range(5), stream.text_stream, strict=False):
            pass
    report.await_stop()


@check("max_tokens above the context")
def _():
    # The SDK itself refuses long answers that are not streamed.
    with client.messages.stream(
        model="builtin", messages=[{"role": "user", "content": "Say hello."}], max_tokens=report.MAX_TOKENS
    ) as stream:
        next(iter(stream.text_stream))


@check("reasoning")
def _():
    reply = message(
        "Think.", scripted, "scripted", max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    expect([block.type for block in reply.content] == ["thinking", "text"], reply)
