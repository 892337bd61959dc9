"""Claude Code, headless: a question, and a turn with a command that it runs."""

import json
import os
import tempfile

import report
from report import check, expect

HOME, REPOSITORY = tempfile.mkdtemp(), tempfile.mkdtemp()
CLAUDE = os.path.join(os.environ["CLIENT_FOLDER"], "node_modules", ".bin", "claude")


def ask(text, *options, model="scripted", url=report.SCRIPTED_URL, key=report.KEY, code=0):
    return report.command(
        *(CLAUDE, "-p", text, "--output-format", "json", "--allowedTools", "Bash", *options),
        code=code,
        folder=REPOSITORY,
        HOME=HOME,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY=key,
        ANTHROPIC_MODEL=model,
        ANTHROPIC_SMALL_FAST_MODEL=model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_RETRIES="0",
        API_TIMEOUT_MS="50000",
    )


def result(text):
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


@check("chat")
def _():
    expect(result(ask("Say hello.", "--tools", ""))["result"], "no answer")


@check("system prompt")
def _():
    reply = ask(report.QUOTE, "--tools", "", "--append-system-prompt", report.SYSTEM)
    expect(report.SYSTEM in result(reply)["result"], reply[-300:])


turns = []


@check("tool call")
def _():
    turns.append(result(ask("Call Bash.")))
    expect(turns[0]["num_turns"] == 2, turns)


@check("tool result")
def _():
    expect(report.RESULT in turns[0]["result"], turns)


@check("wrong key")
def _():
    reply = ask("Hello.", key="wrong", code=-1)
    expect("401" in reply or "API key" in reply, reply[-300:])


@check("unknown model")
def _():
    reply = ask("Hello.", model="none", code=-1)
    expect("404" in reply or "model" in reply, reply[-300:])


@check("context overflow")
def _():
    reply = ask(report.TOO_LONG[:100_000], "--tools", "", model="builtin", url=report.URL, key="none", code=-1)
    expect("prompt is too long" in reply.lower() or "context" in reply.lower(), reply[-300:])


@check("usage")
def _():
    usage = turns[0]["usage"]
    expect(usage["output_tokens"], usage)


report.lacks("it reads every answer as a stream: the first column shows it", "stream")
report.lacks("its prompt is longer than the built-in model's context", "any model name")
report.lacks("not in a command that takes one message", "cancel", "structured output", "reasoning")
report.lacks("it has none", "embeddings", "max_tokens above the context")
