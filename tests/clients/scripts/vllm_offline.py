"""Offline scripts for vLLM, with the line of imports changed to headrace."""

import json

import report
from report import check, expect

from headrace import LLM, SamplingParams, StructuredOutputsParams
from headrace.protocol.errors import HeadraceError

llm = LLM(model="builtin", gpu_memory_utilization=0.9, trust_remote_code=True, tensor_parallel_size=1)
HELLO = [{"role": "user", "content": "Say hello."}]
TOOLS = [{"type": "function", "function": report.TOOL}]


@check("chat")
def _():
    expect(llm.chat(HELLO, SamplingParams(max_tokens=20))[0].outputs[0].text, "no text")
    expect(len(llm.generate(["One", "Two"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5))) == 2, "not two")


@check("system prompt")
def _():
    [reply] = llm.chat([{"role": "system", "content": report.SYSTEM}, *HELLO], SamplingParams(max_tokens=5))
    expect(report.SYSTEM in llm.get_tokenizer().decode(reply.prompt_token_ids), reply.prompt)


@check("tool call")
def _():
    template = "{{ tools | tojson }} {{ messages[0].content }}"
    [reply] = llm.chat(HELLO, SamplingParams(max_tokens=5), tools=TOOLS, chat_template=template)
    expect("weather" in str(reply.prompt), reply.prompt)


@check("tool result")
def _():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": report.RESULT},
    ]
    [reply] = llm.chat(history, SamplingParams(max_tokens=5))
    expect(report.RESULT in str(reply.prompt), reply.prompt)


@check("structured output")
def _():
    form = StructuredOutputsParams(json=report.SCHEMA)
    [reply] = llm.chat(HELLO, SamplingParams(max_tokens=200, structured_outputs=form))
    report.check_document(json.loads(reply.outputs[0].text))


@check("embeddings")
def _():
    expect(len(llm.embed(["A cat."])[0].outputs.embedding) > 1, "no vector")


@check("context overflow")
def _():
    report.refusal((ValueError, HeadraceError), lambda: llm.generate(report.TOO_LONG))


@check("usage")
def _():
    [reply] = llm.chat(HELLO, SamplingParams(max_tokens=5))
    expect(reply.prompt_token_ids and reply.outputs[0].token_ids, reply)


@check("unknown model")
def _():
    report.refusal((ValueError, OSError, HeadraceError), lambda: LLM(model="./no-such-model"))


report.lacks("not offline", "stream", "any model name", "wrong key", "cancel")
report.lacks("generate ends at the context, as vLLM's does", "max_tokens above the context")
report.lacks("the built-in model writes none", "reasoning")
