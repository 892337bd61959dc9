"""huggingface_hub's InferenceClient, which names the model of a server of one's own only if it must."""

import json

import report
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from report import check, expect

client = InferenceClient(base_url=report.URL + "/v1", token="none")
scripted = InferenceClient(base_url=report.SCRIPTED_URL + "/v1", token=report.KEY)
TOOLS = [{"type": "function", "function": report.TOOL}]


def ask(text="Say hello.", server=client, **more):
    more = {"model": "scripted"} | more if server is scripted else {"max_tokens": 20} | more
    return server.chat_completion([{"role": "user", "content": text}], **more)


@check("chat")
def _():
    expect(ask().choices[0].message.content, "no text")


@check("stream")
def _():
    pieces = [part.choices[0].delta.content for part in ask("Hello.", scripted, stream=True) if part.choices]
    expect(len(pieces) > 2 and "".join(filter(None, pieces)) == "Hello from the script.", pieces)


@check("system prompt")
def _():
    messages = [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.QUOTE}]
    reply = scripted.chat_completion(messages, model="scripted")
    expect(report.SYSTEM in reply.choices[0].message.content, reply)


turns = [{"role": "user", "content": "How warm is Rome?"}]


@check("tool call")
def _():
    message = scripted.chat_completion(turns, model="scripted", tools=TOOLS).choices[0].message
    arguments = message.tool_calls[0].function.arguments
    expect(arguments in ({"city": "Rome"}, '{"city": "Rome"}'), message)
    turns.append(message)
    turns.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": report.RESULT})


@check("tool result")
def _():
    reply = scripted.chat_completion(turns, model="scripted", tools=TOOLS)
    expect(report.RESULT in reply.choices[0].message.content, reply)


@check("structured output")
def _():
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": report.SCHEMA, "strict": True}}
    reply = ask("Name a colour.", response_format=form, max_tokens=200)
    report.check_document(json.loads(reply.choices[0].message.content))


report.lacks("its feature_extraction has a route of Hugging Face's own", "embeddings")


@check("any model name")
def _():
    # Without a name it sends a placeholder.
    expect(ask().model == "builtin", "another name in the reply")
    expect(ask(model="meta-llama/Llama-3.1-8B-Instruct").model == "builtin", "another name in the reply")


@check("unknown model")
def _():
    error = report.refusal(HfHubHTTPError, lambda: ask("Hello.", scripted, model="none"))
    expect(error.response.status_code == 404, error)


@check("context overflow")
def _():
    error = report.refusal(HfHubHTTPError, lambda: ask(report.TOO_LONG))
    expect(error.response.json()["error"]["code"] == "context_length_exceeded", error)


@check("wrong key")
def _():
    wrong = InferenceClient(base_url=report.SCRIPTED_URL + "/v1", token="wrong")
    error = report.refusal(HfHubHTTPError, lambda: wrong.chat_completion(turns[:1]))
    expect(error.response.status_code == 401, error)


@check("usage")
def _():
    usage = ask().usage
    expect(usage.prompt_tokens and usage.completion_tokens, usage)


@check("cancel")
def _():
    import gc

    stream = ask(report.COUNT, scripted, stream=True, max_tokens=50_000)
    for _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    del stream
    gc.collect()
    report.await_stop()


report.refuses("max_tokens above the context", HfHubHTTPError, lambda: ask(max_tokens=report.MAX_TOKENS))


@check("reasoning")
def _():
    message = ask("Think.", scripted).choices[0].message
    expect("Two and two" in (message.reasoning or ""), message)
