"""The ollama package for Python."""

import json

import ollama
import report
from report import check, expect

client = ollama.Client(host=report.URL)
scripted = ollama.Client(host=report.SCRIPTED_URL, headers={"Authorization": f"Bearer {report.KEY}"})
TOOLS = [{"type": "function", "function": report.TOOL}]


def chat(text="Say hello.", server=client, model="builtin", **more):
    return server.chat(model=model, messages=[{"role": "user", "content": text}], **more)


SHORT = {"num_predict": 20, "temperature": 0}


@check("chat")
def _():
    expect(chat(options=SHORT).message.content, "no text")


@check("stream")
def _():
    pieces = [part.message.content for part in chat(options=SHORT, stream=True)]
    expect(len(pieces) > 2 and "".join(pieces) == chat(options=SHORT).message.content, pieces)


@check("system prompt")
def _():
    messages = [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.QUOTE}]
    expect(report.SYSTEM in scripted.chat(model="scripted", messages=messages).message.content, "not quoted")


turns = [{"role": "user", "content": "How warm is Rome?"}]


@check("tool call")
def _():
    reply = scripted.chat(model="scripted", messages=turns, tools=TOOLS)
    expect(reply.message.tool_calls[0].function.arguments == {"city": "Rome"}, reply)
    turns.append(reply.message)
    turns.append({"role": "tool", "tool_name": "weather", "content": report.RESULT})


@check("tool result")
def _():
    expect(report.RESULT in scripted.chat(model="scripted", messages=turns, tools=TOOLS).message.content, "no result")
    expect(client.chat(model="builtin", messages=turns, tools=TOOLS, options={"num_predict": 5}).done, "not done")


@check("structured output")
def _():
    reply = chat("Name a colour.", format=report.SCHEMA, options={"num_predict": 200})
    report.check_document(json.loads(reply.message.content))


@check("embeddings")
def _():
    one, two = client.embed(model="builtin", input=["A cat.", "A dog."]).embeddings
    expect(len(one) == len(two) > 1, one)


@check("any model name")
def _():
    expect(chat(model="llama3.2", options=SHORT).model in ("builtin", "llama3.2"), "another name in the reply")


report.refuses("unknown model", ollama.ResponseError, lambda: chat(server=scripted, model="none"), status=404)


@check("context overflow")
def _():
    error = report.refusal(ollama.ResponseError, lambda: chat(report.TOO_LONG))
    expect(error.status_code == 400 and "context length" in error.error, error)


@check("wrong key")
def _():
    wrong = ollama.Client(host=report.SCRIPTED_URL, headers={"Authorization": "Bearer wrong"})
    expect(report.refusal(ollama.ResponseError, wrong.list).status_code == 401, "another status")


@check("usage")
def _():
    reply = chat(options=SHORT)
    expect(reply.prompt_eval_count and reply.eval_count and reply.total_duration, reply)


@check("cancel")
def _():
    stream = chat(report.COUNT, scripted, "scripted", stream=True)
    for _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    report.await_stop()


@check("max_tokens above the context")
def _():
    expect(chat(options={"num_predict": report.MAX_TOKENS}).done, "not done")


@check("reasoning")
def _():
    message = chat("Think.", scripted, "scripted", think=True).message
    expect(message.content == "Four." and "Two and two" in message.thinking, message)
