"""smolagents: its model for OpenAI's API, and the agent that calls tools."""

import openai
import report
from report import check, expect
from smolagents import OpenAIModel, ToolCallingAgent, tool


def model(name="builtin", url=report.URL, key="none", **more):
    more = {"max_tokens": 20, "client_kwargs": {"max_retries": 0}} | more
    return OpenAIModel(model_id=name, api_base=url + "/v1", api_key=key, retry=False, **more)


def scripted(key=report.KEY, name="scripted", **more):
    return model(name, report.SCRIPTED_URL, key, **{"max_tokens": 1000} | more)


def say(text, role="user"):
    return {"role": role, "content": [{"type": "text", "text": text}]}


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city's name.
    """
    return report.RESULT


@check("chat")
def _():
    expect(model().generate([say("Say hello.")]).content, "no text")


@check("stream")
def _():
    pieces = [part.content for part in scripted().generate_stream([say("Hello.")])]
    expect(len(pieces) > 2 and "".join(filter(None, pieces)) == "Hello from the script.", pieces)


@check("system prompt")
def _():
    reply = scripted().generate([say(report.SYSTEM, "system"), say(report.QUOTE)])
    expect(report.SYSTEM in reply.content, reply)


@check("tool call")
def _():
    reply = scripted().generate([say("How warm is Rome?")], tools_to_call_from=[weather])
    expect(reply.tool_calls[0].function.arguments in ({"city": "Rome"}, '{"city": "Rome"}'), reply)


@check("tool result")
def _():
    agent = ToolCallingAgent(tools=[weather], model=scripted(), max_steps=4, verbosity_level=0)
    expect(report.RESULT in str(agent.run("How warm is Rome? Use the tool weather.")), "no result")


@check("structured output")
def _():
    import json

    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": report.SCHEMA, "strict": True}}
    reply = model(max_tokens=200).generate([say("Name a colour.")], response_format=form)
    report.check_document(json.loads(reply.content))


report.lacks("it has none", "embeddings", "reasoning")


@check("any model name")
def _():
    expect(model("gpt-3.5-turbo").generate([say("Say hello.")]).content, "no text")


report.refuses("unknown model", openai.NotFoundError, lambda: scripted(name="none").generate([say("Hello.")]))
report.refuses(
    "context overflow",
    openai.BadRequestError,
    lambda: model().generate([say(report.TOO_LONG)]),
    code="context_length_exceeded",
)
report.refuses("wrong key", openai.AuthenticationError, lambda: scripted("wrong").generate([say("Hello.")]))


@check("usage")
def _():
    usage = model().generate([say("Say hello.")]).token_usage
    expect(usage.input_tokens and usage.output_tokens, usage)


@check("cancel")
def _():
    import gc

    stream = scripted(max_tokens=50_000).generate_stream([say(report.COUNT)])
    for _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    del stream
    gc.collect()
    report.await_stop()


report.refuses(
    "max_tokens above the context",
    openai.BadRequestError,
    lambda: model(max_tokens=report.MAX_TOKENS).generate([say("Hello.")]),
)
