"""Continue's command line, headless: a question, and a turn with a command that it runs."""

import os
import tempfile

import report
from report import check, expect

HOME, REPOSITORY = tempfile.mkdtemp(), tempfile.mkdtemp()
CONFIG = os.path.join(HOME, ".continue", "config.yaml")
CN = os.path.join(os.environ["CLIENT_FOLDER"], "node_modules", ".bin", "cn")
os.mkdir(os.path.dirname(CONFIG))


def ask(text, *options, model="scripted", url=report.SCRIPTED_URL, key=report.KEY, max_tokens=4096, code=0):
    with open(CONFIG, "w") as file:
        file.write(
            "name: headrace\nversion: 1.0.0\nschema: v1\nmodels:\n"
            f"- {{name: headrace, provider: openai, model: {model}, apiBase: '{url}/v1', apiKey: '{key}',\n"
            "   roles: [chat], capabilities: [tool_use],\n"
            f"   defaultCompletionOptions: {{contextLength: 1000000, maxTokens: {max_tokens}}}}}\n"
        )
    environment = {"HOME": HOME, "CONTINUE_TELEMETRY_ENABLED": "0"}
    return report.command(CN, "-p", text, *options, code=code, folder=REPOSITORY, **environment)


@check("chat")
def _():
    expect(ask("Say hello.", "--readonly").strip(), "no text")


turns = []


@check("tool call")
def _():
    turns.append(ask("Call Bash.", "--auto"))
    expect(report.RESULT in turns[0], turns)


@check("tool result")
def _():
    expect(f"The tool returned: {report.RESULT}" in turns[0], turns)


@check("any model name")
def _():
    expect(ask("Hello.", model="gpt-3.5-turbo", url=report.URL, key="none", max_tokens=20).strip(), "no text")


@check("wrong key")
def _():
    expect("API key is missing or wrong" in ask("Hello.", key="wrong", code=-1), "another error")


@check("unknown model")
def _():
    expect("is not served here" in ask("Hello.", model="none", code=-1), "another error")


@check("context overflow")
def _():
    text = ask("Hello. " + report.TOO_LONG[:100_000], model="builtin", url=report.URL, key="none", code=-1)
    expect("maximum context length" in text, text[-300:])


@check("max_tokens above the context")
def _():
    settings = {"model": "builtin", "url": report.URL, "key": "none", "max_tokens": 900_000}
    text = ask("Hello.", **settings, code=-1)
    expect("maximum context length" in text, text[-300:])


report.lacks("it reads every answer as a stream: the first column shows it", "stream")
report.lacks("its tools fill every request, and the scripted model calls one", "system prompt")
report.lacks("not in a command that takes one message", "cancel", "structured output", "reasoning", "usage")
report.lacks("only in its editors' extension", "embeddings")
