"""Open WebUI: its server between a user and this one, by its own HTTP API."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import report
from report import check, expect

FOLDER = tempfile.mkdtemp()
START_S = 600


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PORT = free_port()
TOKEN = ""


@contextlib.contextmanager
def web_server():
    """Open WebUI with both servers behind it, the first by Ollama's API too, which it takes where both list a model."""
    settings = {
        "HOME": FOLDER,
        "DATA_DIR": FOLDER,
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "none",
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",
        "OPENAI_API_BASE_URLS": f"{report.URL}/v1;{report.SCRIPTED_URL}/v1",
        "OPENAI_API_KEYS": f"none;{report.KEY}",
        "OLLAMA_BASE_URL": report.URL,
    }
    command = [os.path.join(os.path.dirname(sys.executable), "open-webui"), "serve", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", str(PORT)], cwd=FOLDER, env=os.environ | settings, stdout=sys.stderr, stderr=sys.stderr
    )
    try:
        end = time.monotonic() + START_S
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("Open WebUI does not start")
            with contextlib.suppress(OSError):
                call("GET", "/health")
                break
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def call(method, path, body=None):
    """Return the text of a reply."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=report.SECONDS - 5) as reply:
        return reply.read().decode()


def refused(path, body):
    """Return the text of a reply that is an error."""
    try:
        text = call("POST", path, body)
    except urllib.error.HTTPError as error:
        return error.read().decode()
    raise ValueError(f"no error, but {text[:300]}")


def chat(text, model="scripted", *messages, **fields):
    body = {"model": model, "stream": False, "messages": [*messages, {"role": "user", "content": text}], **fields}
    return json.loads(call("POST", "/api/chat/completions", body))


def message(reply):
    return reply["choices"][0]["message"]


with web_server():
    TOKEN = json.loads(call("POST", "/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
    models = [model["id"] for model in json.loads(call("GET", "/api/models"))["data"]]

    @check("chat")
    def _():
        expect({"builtin", "scripted"} <= set(models), models)
        expect(message(chat("Say hello.", "builtin", max_tokens=20))["content"], "no text")
        body = {"model": "builtin", "stream": False, "messages": [{"role": "user", "content": "Say hello."}]}
        reply = json.loads(call("POST", "/ollama/api/chat", body | {"options": {"num_predict": 20}}))
        expect(reply["message"]["content"], reply)

    @check("stream")
    def _():
        body = {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "Hello."}]}
        lines = [line[6:] for line in call("POST", "/api/chat/completions", body).splitlines() if line[:7] == "data: {"]
        pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
        expect(len(pieces) > 2 and "".join(pieces) == "Hello from the script.", pieces)

    @check("system prompt")
    def _():
        reply = chat(report.QUOTE, "scripted", {"role": "system", "content": report.SYSTEM})
        expect(report.SYSTEM in message(reply)["content"], reply)

    turns = []

    @check("tool call")
    def _():
        turns.append(chat("How warm is Rome?", tools=[{"type": "function", "function": report.TOOL}]))
        function = message(turns[0])["tool_calls"][0]["function"]
        expect(json.loads(function["arguments"]) == {"city": "Rome"}, turns)

    @check("tool result")
    def _():
        call_id = message(turns[0])["tool_calls"][0]["id"]
        body = {
            "model": "scripted",
            "stream": False,
            "tools": [{"type": "function", "function": report.TOOL}],
            "messages": [
                {"role": "user", "content": "How warm is Rome?"},
                message(turns[0]),
                {"role": "tool", "tool_call_id": call_id, "content": report.RESULT},
            ],
        }
        reply = json.loads(call("POST", "/api/chat/completions", body))
        expect(report.RESULT in message(reply)["content"], reply)

    @check("structured output")
    def _():
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": report.SCHEMA}}
        reply = chat("Name a colour.", "builtin", response_format=form, max_tokens=200)
        report.check_document(json.loads(message(reply)["content"]))

    @check("embeddings")
    def _():
        reply = json.loads(call("POST", "/api/embeddings", {"model": "builtin", "input": ["a", "b"]}))
        expect(len(reply["data"]) == 2 and reply["data"][0]["embedding"], reply)

    @check("context overflow")
    def _():
        text = refused(
            "/api/chat/completions", {"model": "builtin", "messages": [{"role": "user", "content": report.TOO_LONG}]}
        )
        expect("maximum context length" in text, text[:300])

    @check("max_tokens above the context")
    def _():
        body = {"model": "scripted", "max_tokens": report.MAX_TOKENS}
        text = refused("/api/chat/completions", body | {"messages": [{"role": "user", "content": "Hello."}]})
        expect("maximum context length" in text, text[:300])
        expect(message(chat("Say hello.", "builtin", max_tokens=report.MAX_TOKENS))["content"], "no text")

    @check("usage")
    def _():
        usage = chat("Hello.")["usage"]
        expect(usage["prompt_tokens"] and usage["completion_tokens"], usage)

    @check("reasoning")
    def _():
        reply = message(chat("Think."))
        expect("Two and two" in reply["reasoning_content"] and reply["content"].strip() == "Four.", reply)


report.lacks("it offers the models that the server lists", "any model name", "unknown model")
report.lacks("it lists no models of a server that refuses its key", "wrong key")
report.lacks("the page of its user closes the stream, which a command does not show", "cancel")
