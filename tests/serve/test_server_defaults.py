"""What a server is started with holds for requests that say nothing: sampling, variables of the template, the end of
an answer. A request wins over the flags, and the flags over the model's files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.formats.gguf.files import F32, I32, STRING, gguf_file, scalar
from tests.support.server import HTTP, Live, inproc, write_tokenizer

from headrace.engine.client import EngineClient
from headrace.engine.library.model_settings import advised_params
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.defaults import sampling_defaults
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request
from headrace.serve import loading
from headrace.serve.call.call import ModelDefaults, SamplingFields
from headrace.serve.gates.calls import HeaderGate, allowed_hosts, allowed_origins, is_loopback
from headrace.serve.process import listen, url_of
from headrace.text.named_templates import template_of
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

VARIABLE = "<{{ messages[-1].content }}|{{ x }}|{{ reasoning_effort }}>{% if add_generation_prompt %}[a]{% endif %}"
DEFAULTS = {"temperature": 0.5, "max_tokens": 3, "stop": ["zz"], "logit_bias": {"7": 1.0}, "ignore_eos": True}


@pytest.fixture(scope="module")
def started(tokenizer: Tokenizer) -> Iterator[Live]:
    kwargs = {"x": "flag", "reasoning_effort": "low"}
    server = ServerConfig(
        log_stats_interval=0, default_chat_template_kwargs=kwargs, prefill_assistant=True, tags=["a,b", "c"]
    )
    template = ChatTemplate({"default": VARIABLE}, {})
    with Live(
        inproc(), tokenizer, server, template=template, defaults=ModelDefaults.of(sampling_defaults(DEFAULTS))
    ) as live:
        yield live


def prompt_of(live: Live, messages: Any, **more: Any) -> str:
    body = {"messages": messages, "seed": 1, "return_token_ids": True} | more
    reply = HTTP.post(live.url + "/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return bytes(reply.json()["prompt_token_ids"]).decode()


def test_the_flags_win_over_the_models_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_k": 7, "max_new_tokens": 5}))
    (tmp_path / "config.json").write_text("{}")
    server = ServerConfig(override_generation_config={"temperature": 0.6, "max_new_tokens": 9})
    params = loading.default_params(EngineConfig(model=str(tmp_path)), server)
    assert params.shown() == {"temperature": 0.6, "top_k": 7, "max_tokens": 9}
    assert params.sampling == SamplingFields(temperature=0.6, top_k=7, max_tokens=9)
    bare = ServerConfig(generation_config="headrace", override_generation_config={"top_p": 0.5})
    assert loading.default_params(EngineConfig(model=str(tmp_path)), bare).shown() == {"top_p": 0.5}


def test_a_request_wins_over_the_flags(started: Live) -> None:
    def settings(**body: Any) -> dict[str, Any]:
        reply = HTTP.post(started.url + "/completion", json={"prompt": "ab", "seed": 1} | body).json()
        return reply["generation_settings"] | {"num": reply["tokens_predicted"]}  # type: ignore[no-any-return]

    plain = settings()
    assert (plain["temperature"], plain["num"], plain["stop"], plain["ignore_eos"]) == (0.5, 3, ["zz"], True)
    requests = settings(temperature=0.25, n_predict=2, stop=["b"], ignore_eos=False)
    assert (requests["temperature"], requests["num"], requests["stop"], requests["ignore_eos"]) == (
        0.25,
        2,
        ["b"],
        False,
    )
    props = HTTP.get(started.url + "/props").json()
    assert props["default_generation_settings"]["params"]["temperature"] == 0.5
    assert props["chat_template"] == VARIABLE


CALLS: dict[str, tuple[str, dict[str, Any], tuple[float, int, float, float]]] = {
    # The route, a body, and temperature, top_k, top_p and min_p where nothing sets them.
    "llama": ("/completion", {"prompt": "a", "n_predict": 1}, (0.8, 40, 0.95, 0.05)),
    "ollama": ("/api/generate", {"prompt": "a", "options": {"num_predict": 1}}, (0.8, 40, 0.9, 0.0)),
    "ollama raw": ("/api/generate", {"prompt": "a", "raw": True, "options": {"num_predict": 1}}, (0.8, 40, 0.9, 0.0)),
    "ollama chat": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 1}},
        (0.8, 40, 0.9, 0.0),
    ),
    "openai": ("/v1/completions", {"prompt": "a", "max_tokens": 1}, (1.0, 0, 1.0, 0.0)),
    "openai chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        (1.0, 0, 1.0, 0.0),
    ),
    "search": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 1, "use_beam_search": True, "n": 2},
        (1.0, 0, 1.0, 0.0),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_api_has_its_own_defaults(name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body, shape_of_api = CALLS[name]
    seen: list[SamplingParams] = []
    submit: Any = EngineClient.submit

    def watched(self: EngineClient, requests: list[Request], *args: Any, **options: Any) -> Any:
        seen.extend(request.params for request in requests)
        return submit(self, requests, *args, **options)

    monkeypatch.setattr(EngineClient, "submit", watched)

    def shape() -> tuple[float, int, float, float]:
        assert HTTP.post(live.url + path, json=body | {"model": "fake", "stream": False}).status_code == 200
        params = seen[-1]
        return params.temperature, params.top_k, params.top_p, params.min_p

    server = ServerConfig(log_stats_interval=0)
    with Live(inproc(), tokenizer, server) as live:
        assert shape() == shape_of_api
    if name != "search":
        # The model's advice precedes them, parameter by parameter.
        with Live(inproc(), tokenizer, server, defaults=ModelDefaults.of({"temperature": 0.3, "top_k": 5})) as live:
            assert shape() == (0.3, 5, *shape_of_api[2:])


def test_a_gguf_file_advises(tmp_path: Path) -> None:
    fields = [
        scalar("general.architecture", STRING, "llama"),
        scalar("general.sampling.temp", F32, 0.5),
        scalar("general.sampling.top_k", I32, 7),
        scalar("general.sampling.penalty_repeat", F32, 1.5),
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file(fields))
    assert advised_params(str(path), None) == {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5}
    path.write_bytes(gguf_file([*fields, scalar("general.sampling.top_p", F32, 2.0)]))
    with pytest.raises(CheckpointError, match=r"m\.gguf: general\.sampling\.top_p: 2\.0 .* to 1"):
        advised_params(str(path), None)


def test_variables_of_the_template(started: Live) -> None:
    user = [{"role": "user", "content": "hi"}]
    assert prompt_of(started, user) == "<hi|flag|low>[a]"
    assert prompt_of(started, user, chat_template_kwargs={"x": "own"}) == "<hi|own|low>[a]"
    assert prompt_of(started, user, reasoning_effort="high") == "<hi|flag|high>[a]"


def test_a_variable_of_the_templates_own_does_not_start(tokenizer: Tokenizer) -> None:
    server = ServerConfig(default_chat_template_kwargs={"messages": []})
    with pytest.raises(
        RequestError, match="default_chat_template_kwargs: 'messages' .* a variable of the template's own"
    ):
        Live(inproc(), tokenizer, server)


def test_the_assistants_last_message_is_gone_on_with(started: Live, live: Live) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once"}]
    assert prompt_of(started, messages) == "<Once"
    assert prompt_of(started, messages, add_generation_prompt=True).endswith(">[a]")
    assert prompt_of(live, messages, model="fake", max_tokens=1) == "[user]hi[assistant]Once[a]", "not without the flag"


def test_tags_are_on_the_card(started: Live, live: Live) -> None:
    assert HTTP.get(started.url + "/v1/models").json()["data"][0]["tags"] == ["a", "b", "c"]
    assert "tags" not in HTTP.get(live.url + "/v1/models").json()["data"][0]


def bare_tokenizer(folder: Path, **config: Any) -> Tokenizer:
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"} | config))
    return Tokenizer.load(folder)


def test_a_model_without_a_template_takes_chatml(
    tmp_path: Path, say: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    bare_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    tokenizer, template, notes = loading.load_text(EngineConfig(model=str(tmp_path)), ServerConfig())
    assert tokenizer is not None
    assert template is not None
    chatml = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    say("well<|im_end|>\n<|im_start|>user\nand on")
    caplog.set_level(logging.WARNING, "headrace.server")
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), template=template, notes=notes) as live:
        assert "no chat template, so chats are written as chatml" in caplog.text
        assert prompt_of(live, [{"role": "user", "content": "hi"}]) == chatml
        url, body = live.url + "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
        for more in ({}, {"stop": ["never"]}, {"stop": [f"never{i}" for i in range(15)]}):
            [choice] = HTTP.post(url, json=body | more).json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("well", "stop")
        # Texts that are no chat go on.
        reply = HTTP.post(live.url + "/v1/completions", json={"prompt": "hi", "max_tokens": 30, "seed": 1}).json()
        assert "<|im_end|>" in reply["choices"][0]["text"]


def test_a_template_of_the_models_own_ends_at_nothing_more(tokenizer: Tokenizer, say: Callable[[str], None]) -> None:
    say("well<|im_end|>more")
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        body = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
        [choice] = HTTP.post(live.url + "/v1/chat/completions", json=body).json()["choices"]
        assert choice["message"]["content"] == "well<|im_end|>more"


def test_a_template_that_was_named_and_is_missing_is_an_error(tmp_path: Path) -> None:
    tokenizer = bare_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="chat_template: 'nowhere.jinja' is not allowed; .* or one of chatml, bail"):
        template_of(tokenizer, "nowhere.jinja")


def test_several_hosts() -> None:
    sockets = listen("127.0.0.1,127.0.0.2", 0)
    try:
        names = [each.getsockname() for each in sockets]
        assert [name for name, _ in names] == ["127.0.0.1", "127.0.0.2"]
        assert len({port for _, port in names}) == 1
    finally:
        for each in sockets:
            each.close()
    assert is_loopback("127.0.0.1,::1")
    assert not is_loopback("127.0.0.1,0.0.0.0")
    assert allowed_hosts("127.0.0.1,0.0.0.0", None, has_keys=True) is None
    assert {"127.0.0.1", "::1"} <= (allowed_hosts("127.0.0.1, ::1", None, has_keys=False) or set())
    assert url_of("0.0.0.0,::1", 8) == "http://127.0.0.1:8"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:80", True),
        ("http://localhost.evil.example", False),
        ("http://evil.example", False),
        ("http://user@localhost", False),
        ("chrome-extension://localhost", False),
        ("null", False),
    ],
)
def test_pages_of_this_machine(origin: str, allowed: bool) -> None:
    gate = HeaderGate(None, allowed_origins(["localhost"]))
    headers = gate.reply_headers({b"origin": [origin.encode()], b"host": [b"server.example"]})
    assert bool(headers) == allowed
    assert not HeaderGate(None, allowed_origins(None)).reply_headers({b"origin": [origin.encode()]})
