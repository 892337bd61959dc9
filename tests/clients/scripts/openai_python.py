"""The openai package for Python."""

import json

import openai
import report
from report import check, expect

client = openai.OpenAI(base_url=report.URL + "/v1", api_key="none", max_retries=0)
scripted = openai.OpenAI(base_url=report.SCRIPTED_URL + "/v1", api_key=report.KEY, max_retries=0)
HELLO = [{"role": "user", "content": "Say hello."}]
TOOLS = [{"type": "function", "function": report.TOOL}]


def chat(text="Say hello.", server=client, model="builtin", **more):
    messages = [{"role": "user", "content": text}]
    return server.chat.completions.create(model=model, messages=messages, **more)


@check("chat")
def _():
    expect(chat(max_tokens=20, temperature=0).choices[0].message.content, "no text")


@check("stream")
def _():
    pieces = [part.choices[0].delta.content for part in chat(max_tokens=20, temperature=0, stream=True)]
    whole = chat(max_tokens=20, temperature=0).choices[0].message.content
    expect(len(pieces) > 2 and "".join(filter(None, pieces)) == whole, (pieces, whole))


@check("system prompt")
def _():
    messages = [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.QUOTE}]
    reply = scripted.chat.completions.create(model="scripted", messages=messages)
    expect(report.SYSTEM in reply.choices[0].message.content, reply)


turns = [{"role": "user", "content": "How warm is Rome?"}]


@check("tool call")
def _():
    message = scripted.chat.completions.create(model="scripted", messages=turns, tools=TOOLS).choices[0].message
    expect(json.loads(message.tool_calls[0].function.arguments) == {"city": "Rome"}, message)
    turns.append(message)
    pieces = list(scripted.chat.completions.create(model="scripted", messages=turns[:1], tools=TOOLS, stream=True))
    expect(pieces[-1].choices[0].finish_reason == "tool_calls", pieces[-1])


@check("tool result")
def _():
    call = turns[1].tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": report.RESULT}
    for assistant in (
        turns[1],
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "assistant", "tool_calls": [call.model_dump()]},
    ):
        history = [turns[0], assistant, result]
        reply = scripted.chat.completions.create(model="scripted", messages=history, tools=TOOLS)
        expect(report.RESULT in reply.choices[0].message.content, reply)
        builtin = client.chat.completions.create(model="builtin", messages=history, tools=TOOLS, max_tokens=5)
        expect(builtin.choices[0].finish_reason, builtin)


@check("structured output")
def _():
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": report.SCHEMA, "strict": True}}
    reply = chat("Name a colour.", response_format=form, max_tokens=200)
    report.check_document(json.loads(reply.choices[0].message.content))


@check("embeddings")
def _():
    one, two = client.embeddings.create(model="builtin", input=["A cat.", "A dog."]).data
    expect(len(one.embedding) == len(two.embedding) > 1, one)


@check("any model name")
def _():
    expect(chat(model="gpt-3.5-turbo", max_tokens=5).model == "builtin", "another name in the reply")


report.refuses(
    "unknown model", openai.NotFoundError, lambda: chat(server=scripted, model="gpt-none"), code="model_not_found"
)
report.refuses(
    "context overflow", openai.BadRequestError, lambda: chat(report.TOO_LONG), code="context_length_exceeded"
)
report.refuses("wrong key", openai.AuthenticationError, lambda: scripted.with_options(api_key="wrong").models.list())


@check("usage")
def _():
    usage = chat(max_tokens=5).usage
    expect(usage.prompt_tokens and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)
    last = list(chat(max_tokens=5, stream=True, stream_options={"include_usage": True}))[-1]
    expect(last.usage.prompt_tokens == usage.prompt_tokens, last)


@check("cancel")
def _():
    stream = chat(report.COUNT, scripted, "scripted", stream=True)
    for _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    report.await_stop()


report.refuses(
    "max_tokens above the context",
    openai.BadRequestError,
    lambda: chat(max_tokens=report.MAX_TOKENS),
    code="context_length_exceeded",
)


@check("reasoning")
def _():
    message = chat("Think.", scripted, "scripted").choices[0].message
    expect(message.content == "Four." and "Two and two" in message.reasoning_content, message)
