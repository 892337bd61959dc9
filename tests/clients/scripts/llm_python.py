"""llm, the command: models named in extra-openai-models.yaml."""

import json
import os
import tempfile

import report
from report import check, expect

HOME = tempfile.mkdtemp()
ROW = "- {model_id: %s, model_name: %s, api_base: %s, api_key_name: %s, supports_schema: true, supports_tools: true}\n"
with open(os.path.join(HOME, "extra-openai-models.yaml"), "w") as file:
    for model_id, name in (("open", "builtin"), ("other", "gpt-3.5-turbo")):
        file.write(ROW % (model_id, name, report.URL + "/v1", "open"))
    for model_id, name, key in (("scripted", "scripted", "scripted"), ("none", "none", "scripted")):
        file.write(ROW % (model_id, name, report.SCRIPTED_URL + "/v1", key))
with open(os.path.join(HOME, "keys.json"), "w") as file:
    json.dump({"open": "none", "scripted": report.KEY}, file)
TOOLS = f"def weather(city: str) -> str:\n    'The weather in a city'\n    return '{report.RESULT} in ' + city"


def ask(*words, code=0):
    return report.command("llm", *words, code=code, LLM_USER_PATH=HOME)


SHORT = ("-o", "max_tokens", "20")


@check("chat")
def _():
    expect(ask("-m", "open", *SHORT, "--no-stream", "Say hello.").strip(), "no text")


@check("stream")
def _():
    expect(ask("-m", "scripted", "Hello.").strip() == "Hello from the script.", "another text")


@check("system prompt")
def _():
    expect(report.SYSTEM in ask("-m", "scripted", "-s", report.SYSTEM, report.QUOTE), "not quoted")


outputs = []


@check("tool call")
def _():
    outputs.append(ask("-m", "scripted", "--functions", TOOLS, "--td", "How warm is Rome?"))
    expect("in Rome" in outputs[0], outputs)


@check("tool result")
def _():
    expect(f"The tool returned: {report.RESULT}" in outputs[0], outputs)


@check("structured output")
def _():
    text = ask("-m", "open", "--schema", json.dumps(report.SCHEMA), "-o", "max_tokens", "200", "Name a colour.")
    report.check_document(json.loads(text))


report.lacks("only by plugins", "embeddings")


@check("any model name")
def _():
    expect(ask("-m", "other", *SHORT, "Say hello.").strip(), "no text")


@check("unknown model")
def _():
    expect("is not served here" in ask("-m", "none", "Hello.", code=1), "another error")


@check("context overflow")
def _():
    path = os.path.join(HOME, "long.txt")
    with open(path, "w") as file:
        file.write(report.TOO_LONG)
    expect("maximum context length" in ask("-m", "open", "-f", path, code=1), "another error")


@check("wrong key")
def _():
    expect("API key" in ask("-m", "scripted", "--key", "wrong", "Hello.", code=1), "another error")


@check("usage")
def _():
    expect("output" in ask("-m", "open", *SHORT, "-u", "Say hello."), "no usage")


report.lacks("Ctrl-C ends the command, and the connection with it", "cancel")


@check("max_tokens above the context")
def _():
    text = ask("-m", "open", "-o", "max_tokens", str(report.MAX_TOKENS), "Hello.", code=1)
    expect("maximum context length" in text, text)


report.lacks("it shows that of models it has in a list", "reasoning")
