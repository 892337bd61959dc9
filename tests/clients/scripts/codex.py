"""codex, headless: a question, and a turn with a command that it runs."""

import os
import tempfile

import report
from report import check, expect

HOME, REPOSITORY = tempfile.mkdtemp(), tempfile.mkdtemp()
CODEX = os.path.join(os.environ["CLIENT_FOLDER"], "node_modules", ".bin", "codex")


def ask(text, model="scripted", url=report.SCRIPTED_URL, key=report.KEY, code=0):
    with open(os.path.join(HOME, "config.toml"), "w") as file:
        file.write(
            f'model = "{model}"\nmodel_provider = "headrace"\n[model_providers.headrace]\nname = "headrace"\n'
            f'base_url = "{url}/v1"\nenv_key = "CLIENT_MODEL_KEY"\nwire_api = "responses"\n'
            "request_max_retries = 0\nstream_max_retries = 0\n"
        )
    options = ("--skip-git-repo-check", "--sandbox", "danger-full-access")
    command = (CODEX, "exec", *options, text)
    return report.command(*command, code=code, folder=REPOSITORY, CODEX_HOME=HOME, CLIENT_MODEL_KEY=key)


@check("chat")
def _():
    expect("My system prompt" in ask(report.QUOTE) or "tool returned" in ask(report.QUOTE), "no answer")


turns = []


@check("tool call")
def _():
    turns.append(ask("Call exec_command."))
    expect(f"echo {report.RESULT}" in turns[0], turns[0][-300:])


@check("tool result")
def _():
    expect(f"The tool returned: {report.RESULT}" in turns[0], turns[0][-300:])


@check("wrong key")
def _():
    expect("401" in ask("Hello.", key="wrong", code=-1), "another error")


@check("unknown model")
def _():
    expect("is not served here" in ask("Hello.", "none", code=-1), "another error")


@check("context overflow")
def _():
    text = ask("Hello. " + report.TOO_LONG[:100_000], "builtin", report.URL, "none", code=-1)
    expect("context window" in text or "context_length" in text or "maximum context length" in text, text[-300:])


@check("usage")
def _():
    expect("tokens used" in turns[0].lower(), turns[0][-300:])


report.lacks("it reads every answer as a stream: the first column shows it", "stream")
report.lacks("its own prompt and tools fill it", "system prompt")
report.lacks("it sets no max_tokens: the built-in model writes until its context is full", "any model name")
report.lacks("not in a command that takes one message", "cancel", "structured output", "reasoning")
report.lacks("it has none", "embeddings", "max_tokens above the context")
