"""litellm: its providers for servers that speak OpenAI's, Anthropic's and Ollama's API."""

import asyncio
import json
import os

import report
from report import check, expect

# Without it each start looks for the newest prices, and waits where there is no network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

litellm.suppress_debug_info = True
OPEN = {"model": "hosted_vllm/builtin", "api_base": report.URL + "/v1", "api_key": "none"}
SCRIPTED = {"model": "hosted_vllm/scripted", "api_base": report.SCRIPTED_URL + "/v1", "api_key": report.KEY}
TOOLS = [{"type": "function", "function": report.TOOL}]


def chat(text="Say hello.", server=OPEN, **more):
    return litellm.completion(**server | {"messages": [{"role": "user", "content": text}], "max_retries": 0} | more)


@check("chat")
def _():
    expect(chat(max_tokens=20).choices[0].message.content, "no text")
    anthropic = {"model": "anthropic/builtin", "api_base": report.URL, "api_key": "none"}
    expect(chat(server=anthropic, max_tokens=20).choices[0].message.content, "no text by Anthropic's API")
    ollama = {"model": "ollama_chat/builtin", "api_base": report.URL}
    expect(chat(server=ollama, max_tokens=20).choices[0].message.content, "no text by Ollama's API")


@check("stream")
def _():
    pieces = [part.choices[0].delta.content for part in chat(server=SCRIPTED, stream=True)]
    expect(len(pieces) > 2 and "".join(filter(None, pieces)) == "Hello from the script.", pieces)


@check("system prompt")
def _():
    messages = [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.QUOTE}]
    expect(report.SYSTEM in chat(server=SCRIPTED, messages=messages).choices[0].message.content, "not quoted")


turns = [{"role": "user", "content": "How warm is Rome?"}]


@check("tool call")
def _():
    message = chat(server=SCRIPTED, messages=turns, tools=TOOLS).choices[0].message
    expect(json.loads(message.tool_calls[0].function.arguments) == {"city": "Rome"}, message)
    turns.append(message)
    turns.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": report.RESULT})


@check("tool result")
def _():
    expect(report.RESULT in chat(server=SCRIPTED, messages=turns, tools=TOOLS).choices[0].message.content, "no result")
    expect(chat(messages=turns, tools=TOOLS, max_tokens=5).choices[0].finish_reason, "none")


@check("structured output")
def _():
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": report.SCHEMA, "strict": True}}
    reply = chat("Name a colour.", response_format=form, max_tokens=200)
    report.check_document(json.loads(reply.choices[0].message.content))


@check("embeddings")
def _():
    reply = litellm.embedding(**OPEN, input=["A cat.", "A dog."])
    expect(len(reply.data) == 2 and len(reply.data[0]["embedding"]) > 1, reply)


@check("any model name")
def _():
    expect(chat(server=OPEN | {"model": "hosted_vllm/gpt-3.5-turbo"}, max_tokens=5).choices, "no answer")


report.refuses("unknown model", litellm.NotFoundError, lambda: chat(server=SCRIPTED | {"model": "hosted_vllm/none"}))


@check("context overflow")
def _():
    report.refusal(litellm.ContextWindowExceededError, lambda: chat(report.TOO_LONG))
    anthropic = {"model": "anthropic/builtin", "api_base": report.URL, "api_key": "none"}
    report.refusal(litellm.ContextWindowExceededError, lambda: chat(report.TOO_LONG, anthropic))


report.refuses("wrong key", litellm.AuthenticationError, lambda: chat(server=SCRIPTED | {"api_key": "wrong"}))


@check("usage")
def _():
    usage = chat(max_tokens=5).usage
    expect(usage.prompt_tokens and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)


@check("cancel")
def _():
    async def read_a_part():
        messages = [{"role": "user", "content": report.COUNT}]
        stream = await litellm.acompletion(**SCRIPTED, messages=messages, stream=True)
        for _ in range(5):
            await anext(stream)
        await stream.aclose()

    asyncio.run(read_a_part())
    report.await_stop()


report.refuses(
    "max_tokens above the context", litellm.ContextWindowExceededError, lambda: chat(max_tokens=report.MAX_TOKENS)
)


@check("reasoning")
def _():
    message = chat("Think.", SCRIPTED).choices[0].message
    expect(message.content == "Four." and "Two and two" in message.reasoning_content, message)
