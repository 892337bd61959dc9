"""text-generation, the client of TGI: its chat sends the model name "dummy"."""

import report
import text_generation
from report import check, expect

client = text_generation.Client(report.URL, timeout=60)
scripted = text_generation.Client(report.SCRIPTED_URL, headers={"Authorization": f"Bearer {report.KEY}"}, timeout=60)


def ask(text="Say hello.", server=client, **more):
    return server.chat([{"role": "user", "content": text}], **{"max_tokens": 20} | more)


@check("chat")
def _():
    expect(ask().choices[0].message.content, "no text")


report.lacks("its types require TGI's own form of each part (`role` and `tool_calls`), not OpenAI's", "stream")


@check("any model name")
def _():
    expect(ask().model == "builtin", "another name in the reply")


@check("wrong key")
def _():
    wrong = text_generation.Client(report.SCRIPTED_URL, headers={"Authorization": "Bearer wrong"}, timeout=60)
    report.refusal(Exception, lambda: wrong.chat([{"role": "user", "content": "Hello."}]))


report.refuses("context overflow", text_generation.errors.BadRequestError, lambda: ask(report.TOO_LONG))


@check("usage")
def _():
    expect(ask().usage["prompt_tokens"], "no usage")


report.lacks("tried with huggingface_hub, which came after it", "structured output", "tool result", "cancel")
report.lacks("it has none", "embeddings", "reasoning")
report.lacks("it always sends the name dummy, which the scripted server refuses", "system prompt", "tool call")


report.refuses("unknown model", text_generation.errors.NotFoundError, lambda: ask(server=scripted))
report.refuses("max_tokens above the context", Exception, lambda: ask(max_tokens=report.MAX_TOKENS))
