"""aider: one request from the command line, that writes a file into a repository."""

import os
import re
import subprocess
import tempfile

import report
from report import check, expect

REPOSITORY = tempfile.mkdtemp()
subprocess.run(["git", "init", "-q", REPOSITORY], check=True)
OPTIONS = "--no-git --yes-always --no-pretty --no-show-model-warnings --no-check-update --no-analytics --map-tokens 0"
OPTIONS += " --edit-format whole --no-show-release-notes --no-gitignore --no-suggest-shell-commands"
# It sets no max_tokens of its own, and the built-in model would write until its context is full.
SETTINGS = os.path.join(REPOSITORY, "settings.yml")
with open(SETTINGS, "w") as file:
    file.write("- name: openai/gpt-3.5-turbo\n  extra_params:\n    max_tokens: 20\n")


def ask(text, name="scripted", url=report.SCRIPTED_URL, key=report.KEY, *more):
    return report.command(
        "aider",
        *OPTIONS.split(),
        *("--model", "openai/" + name),
        *("--message", text),
        *more,
        folder=REPOSITORY,
        OPENAI_API_BASE=url + "/v1",
        OPENAI_API_KEY=key,
        HOME=REPOSITORY,
        COLUMNS="400",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )


@check("chat")
def _():
    ask("Create the file hello.txt with a greeting.", "scripted", report.SCRIPTED_URL, report.KEY, "--no-stream")
    with open(os.path.join(REPOSITORY, "hello.txt")) as file:
        expect("Hello from the script." in file.read(), "another text in the file")


@check("stream")
def _():
    ask("Create the file streamed.txt with a greeting.")
    expect(os.path.exists(os.path.join(REPOSITORY, "streamed.txt")), "no file")


@check("unknown model")
def _():
    text = ask("Hello.", "none")
    expect("NotFoundError" in text and "is not served here" in text, text[-300:])


@check("wrong key")
def _():
    expect("AuthenticationError" in ask("Hello.", key="wrong"), "another error")


@check("context overflow")
def _():
    with open(os.path.join(REPOSITORY, "long.txt"), "w") as file:
        file.write(report.TOO_LONG)
    text = ask("Hello.", "builtin", report.URL, "none", "long.txt")
    expect("has hit a token limit" in text and "Output tokens: ~0 " in text, text[-900:])


@check("any model name")
def _():
    text = ask("Hello.", "gpt-3.5-turbo", report.URL, "none", "--model-settings-file", SETTINGS)
    expect(re.search("Output tokens: ~[1-9]", text), text[-900:])


@check("usage")
def _():
    expect("Tokens:" in ask("Hello."), "no count of tokens")


report.lacks("its prompts do not show it", "system prompt", "reasoning")
report.lacks("it edits files without them", "tool call", "tool result", "structured output", "embeddings")
report.lacks("not in a command that takes one message", "cancel", "max_tokens above the context")
