"""dspy: its model, a typed signature, and ReAct."""

import os
from typing import Literal

import report
from report import check, expect

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy

dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)


def model(name="builtin", url=report.URL, key="none", **more):
    more = {"max_tokens": 20, "num_retries": 0} | more
    return dspy.LM(f"openai/{name}", api_base=url + "/v1", api_key=key, **more)


def scripted(key=report.KEY, name="scripted", **more):
    return model(name, report.SCRIPTED_URL, key, **{"max_tokens": 2000} | more)


class Answer(dspy.Signature):
    """Name a colour and a number below ten."""

    question: str = dspy.InputField()
    colour: Literal["red", "green", "blue"] = dspy.OutputField()
    count: Literal[1, 2, 3] = dspy.OutputField()


@check("chat")
def _():
    expect(model()("Say hello.")[0], "no text")


report.lacks("it streams the fields of a document, which the scripted model does not write", "stream", "cancel")


@check("system prompt")
def _():
    messages = [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.QUOTE}]
    expect(report.SYSTEM in scripted()(messages=messages)[0], "not quoted")


@check("tool call")
def _():
    tools = [{"type": "function", "function": report.TOOL}]
    reply = scripted()("How warm is Rome?", tools=tools)
    expect("weather" in str(reply), reply)


@check("tool result")
def _():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        {"role": "user", "content": "How warm is Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": report.RESULT},
    ]
    expect(report.RESULT in str(scripted()(messages=history)), "no result")


@check("structured output")
def _():
    # It sends a schema only to models whose names it has in a list.
    with dspy.context(lm=model("gpt-4o", max_tokens=300), adapter=dspy.JSONAdapter()):
        reply = dspy.Predict(Answer)(question="Name a colour.")
    report.check_document({"colour": reply.colour, "count": int(reply.count)})


@check("embeddings")
def _():
    embedder = dspy.Embedder("openai/builtin", api_base=report.URL + "/v1", api_key="none", encoding_format="float")
    expect(embedder(["A cat.", "A dog."]).shape[0] == 2, "not two")


@check("any model name")
def _():
    expect(model("gpt-3.5-turbo")("Say hello.")[0], "no text")


report.refuses("unknown model", dspy.LMUnsupportedModelError, lambda: scripted(name="none")("Hello."))
report.refuses("context overflow", dspy.ContextWindowExceededError, lambda: model()(report.TOO_LONG))
report.refuses("wrong key", dspy.LMAuthError, lambda: scripted("wrong")("Hello."))


@check("usage")
def _():
    server = model()
    server("Say hello.")
    expect(server.history[-1]["usage"]["prompt_tokens"], server.history)


report.refuses(
    "max_tokens above the context",
    dspy.ContextWindowExceededError,
    lambda: model(max_tokens=report.MAX_TOKENS)("Hello."),
)


@check("reasoning")
def _():
    reply = scripted()("Think.")[0]
    expect("Two and two" in str(reply), reply)
