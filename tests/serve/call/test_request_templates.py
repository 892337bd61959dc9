"""What a chat request brings for its own prompt: a template where the server trusts it, documents, and the echo of its
last message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.text import sandbox
from headrace.text.bounded import BoundedProcess
from headrace.text.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1}
PREFIX = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once"}],
    "continue_final_message": True,
}


@pytest.fixture(scope="module")
def trusting(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    keys = rig.write_keys(tmp_path_factory.mktemp("keys"))
    config = ServerConfig(log_stats_interval=0, trust_request_chat_template=True, api_key_file=keys)
    with Live(inproc(), tokenizer, config) as live:
        yield live


def prompt_of(live: Live, key: str = rig.ALICE, **more: Any) -> str:
    """The prompt as the model gets it: a token is a byte."""
    body = CHAT | {"return_token_ids": True} | more
    reply = HTTP.post(live.url + "/v1/chat/completions", json=body, headers=rig.bearer(key))
    assert reply.status_code == 200, reply.text
    return bytes(reply.json()["prompt_token_ids"]).decode()


def test_a_template_of_the_request_is_rendered_where_it_is_trusted(trusting: Live) -> None:
    template = "\n<{{ messages[0]['content'] }}|{{ x }}>"
    assert prompt_of(trusting) == "[user]hi[a]"
    kwargs = {"x": "y"}
    assert prompt_of(trusting, chat_template=template, chat_template_kwargs=kwargs) == "\n<hi|y>"


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
def test_a_template_of_the_request_holds_where_prompts_are_shown(trusting: Live, live: Live, path: str) -> None:
    body = {"messages": CHAT["messages"], "chat_template": "<{{ messages[0]['content'] }}>"}
    result = HTTP.post(trusting.url + path, json=body, headers=rig.bearer(rig.ALICE)).json()
    assert (bytes(result["tokens"]).decode() if path == "/tokenize" else result["prompt"]) == "<hi>"
    refusal = live.post(path, body)
    assert refusal.status_code == 400
    assert "--trust-request-chat-template" in refusal.text


def test_a_template_of_the_request_is_a_source_and_no_path(trusting: Live, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("secret")
    assert prompt_of(trusting, chat_template=str(tmp_path / "t.jinja")) == str(tmp_path / "t.jinja")


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{% if %}",
    ],
)
def test_S_07_a_hostile_template_of_a_request_is_held(trusting: Live, template: str) -> None:
    body = CHAT | {"chat_template": template}
    reply = HTTP.post(trusting.url + "/v1/chat/completions", json=body, headers=rig.bearer(rig.ALICE))
    assert reply.status_code == 400, reply.text
    assert "uid=" not in reply.text
    assert prompt_of(trusting) == "[user]hi[a]"


def test_S_24_what_is_compiled_for_one_holder_is_not_there_for_another(
    trusting: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[str] = []
    run = BoundedProcess.run

    def noted(self: BoundedProcess, job: Any, reply_type: type[Any]) -> Any:
        if isinstance(job, sandbox.RenderJob):
            sources.append(job.source)
        return run(self, job, reply_type)

    monkeypatch.setattr(BoundedProcess, "run", noted)
    for key in (rig.ALICE, rig.BOB):
        assert prompt_of(trusting, key, chat_template="one") == "one"
    assert len(set(sources)) == 2


def test_a_template_that_is_not_trusted_is_refused(live: Live) -> None:
    reply = live.post("/v1/chat/completions", CHAT | {"chat_template": "{{ 1 }}"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in reply.json()["error"]["message"]


def test_documents_reach_the_template_or_a_warning(trusting: Live, live: Live) -> None:
    documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]
    template = "{% for d in documents %}{{ d['title'] }}={{ d['text'] }};{% endfor %}"
    assert prompt_of(trusting, chat_template=template, documents=documents) == "a=b;c=d;"
    reply = live.post("/v1/chat/completions", CHAT | {"documents": documents}).json()
    [warning] = reply["warnings"]
    assert warning.startswith("documents: the model is not told of them")
    reply = live.post("/v1/chat/completions", CHAT | {"documents": "a"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "documents")


def test_echo_repeats_the_last_message_before_the_answer(live: Live) -> None:
    body = CHAT | PREFIX | {"add_generation_prompt": False}
    plain = live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    echoed = live.post("/v1/chat/completions", body | {"echo": True}).json()["choices"][0]["message"]["content"]
    assert echoed == "Once" + plain
    text = live.post("/v1/chat/completions", body | {"echo": True, "stream": True}).text
    assert '"delta":{"role":"assistant","content":"Once"}' in text.replace(" ", "")
    reply = live.post("/v1/chat/completions", CHAT | {"echo": True}).json()
    assert reply["warnings"] == ["echo: ignored: the last message is not the assistant's, or has no text"]
