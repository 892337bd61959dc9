"""Pictures in chats over HTTP, as the clients' own libraries send them: one picture, one answer, whatever the API."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from tests.support import picture_model
from tests.support.picture_model import data_url, noisy
from tests.support.pictures import png
from tests.support.server import HTTP
from tests.support.serving import Served, serve

QUESTION = "What is it?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    picture_model.write(directory)
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serve(str(model), "--served-model-name", "eyes", "--temp", "0", "--limit-mm-per-prompt", '{"image": 3}') as it:
        yield it


def content(*seeds: int, text: str = QUESTION) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(noisy(seed)), "detail": "auto"}} for seed in seeds
    ]
    return [*parts, {"type": "text", "text": text}]


def asked(server: Served, *parts: Any, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8} | more
    return HTTP.post(f"{server.url}/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def answer(server: Served) -> dict[str, Any]:
    reply: dict[str, Any] = asked(server, *content(1)).json()
    return reply


def text_of(reply: dict[str, Any]) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


def test_every_api_reads_the_same_picture(server: Served, answer: dict[str, Any]) -> None:
    data = base64.b64encode(png(noisy(1))).decode()
    texts, sizes = [text_of(answer)], [answer["usage"]["prompt_tokens"]]

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=240) as client:
        parts: Any = [
            {"type": "input_image", "image_url": data_url(noisy(1)), "detail": "low"},
            {"type": "input_text", "text": QUESTION},
        ]
        response = client.responses.create(
            model="eyes", input=[{"role": "user", "content": parts}], max_output_tokens=8
        )
        assert response.usage is not None
        texts.append(response.output_text)
        sizes.append(response.usage.input_tokens)

    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=240) as claude:
        source: Any = {"type": "base64", "media_type": "image/png", "data": data}
        messages: Any = [
            {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}
        ]
        message: Any = claude.messages.create(model="eyes", max_tokens=8, messages=messages)
        texts.append(message.content[0].text)
        sizes.append(claude.messages.count_tokens(model="eyes", messages=messages).input_tokens)

    host = ollama.Client(host=server.url, timeout=240)
    options = {"num_predict": 8, "temperature": 0}
    chat = host.chat(
        model="eyes", messages=[{"role": "user", "content": QUESTION, "images": [png(noisy(1))]}], options=options
    )
    generated = host.generate(model="eyes", prompt=QUESTION, images=[png(noisy(1))], options=options)
    texts += [str(chat.message.content), generated.response]
    host.close()
    sizes += [chat.prompt_eval_count or 0, generated.prompt_eval_count or 0]

    assert set(texts) == {text_of(answer)}
    assert set(sizes) == {answer["usage"]["prompt_tokens"]}
    # Control: another picture has another answer, of as long a prompt.
    other = asked(server, *content(2)).json()
    assert text_of(other) != text_of(answer)
    assert other["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_second_question_computes_nothing_of_the_picture_again(server: Served) -> None:
    first = asked(server, *content(5, 6)).json()["usage"]
    second = asked(server, *content(5, 6, text="And what else?")).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 30
    assert second["prompt_tokens_details"]["cached_tokens"] > first["prompt_tokens"] - 40


def test_a_tool_shows_a_picture(server: Served) -> None:
    """As Claude Code sends the pictures that it reads."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(noisy(1))).decode()}
    turns = [
        {"role": "user", "content": "Read a.png"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {"path": "a.png"}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}],
        },
    ]
    tools = [{"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}]
    body = {"model": "eyes", "max_tokens": 4, "messages": turns, "tools": tools}
    with_picture = HTTP.post(f"{server.url}/v1/messages/count_tokens", json={**body, "max_tokens": None})
    reply = HTTP.post(f"{server.url}/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    turns[2]["content"][0]["content"] = "nothing"  # type: ignore[index]
    del body["max_tokens"]
    without = HTTP.post(f"{server.url}/v1/messages/count_tokens", json=body)
    assert without.status_code == 200
    if with_picture.status_code == 200:
        assert with_picture.json()["input_tokens"] > without.json()["input_tokens"] + 20


def test_what_the_server_says_of_itself(server: Served) -> None:
    assert HTTP.get(f"{server.url}/props").json()["modalities"] == {"vision": True, "audio": False}
    card = HTTP.post(f"{server.url}/api/show", json={"model": "eyes"}).json()
    assert "vision" in card["capabilities"]
    tokens = HTTP.post(f"{server.url}/tokenize", json={"messages": [{"role": "user", "content": content(1)}]}).json()
    assert tokens["count"] == asked(server, *content(1)).json()["usage"]["prompt_tokens"]


def test_people_see_the_rows_of_pictures(server: Served) -> None:
    for seed in (21, 22):
        asked(server, *content(seed))
    # The second one differs from the first row on: the view shows the texts around that place.
    tree = HTTP.get(f"{server.url}/inspect/cache").text
    assert "\u25a3" in json.dumps(json.loads(tree), ensure_ascii=False)
    reply = asked(server, *content(9)).json()
    explained = HTTP.get(f"{server.url}/v1/requests/{reply['id']}/explain")
    assert explained.status_code == 200, explained.text


def test_the_engine_dies_in_an_answer_about_a_picture(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": content(1, 2)}], "max_tokens": 200, "ignore_eos": True}
    url = f"{server.url}/v1/chat/completions"
    whole = text_of(HTTP.post(url, json=body).json())
    pieces: list[str] = []
    is_killed = False
    with HTTP.stream("POST", url, json=body | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
            if len(pieces) > 5 and not is_killed:
                os.kill(server.engine().pid, signal.SIGKILL)
                is_killed = True
    assert is_killed
    assert "".join(pieces) == whole
    while HTTP.get(f"{server.url}/health/ready").status_code != 200:
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("parts", "field", "bound"),
    [
        (content(1, text="an <image> too"), "messages", "as many as pictures, 1"),
        (content(1, 2, 3, 4), "messages", "at most 3 pictures"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "image_url", "none of PNG"),
        (
            [{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}],
            "image_url",
            "allowed-media-domains",
        ),
        ([{"type": "image_url", "image_url": {"url": data_url(noisy(1)), "detail": "much"}}], "detail", "auto"),
        ([{"type": "image_url"}], "image_url", "an object"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "type", "nothing else is read"),
        ([{"type": "input_audio", "input_audio": {"data": "x"}}], "type", "nothing else is read"),
    ],
)
def test_bad_pictures(server: Served, parts: list[Any], field: str, bound: str) -> None:
    reply = asked(server, *parts)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert field in error["param"]
    assert bound in error["message"]


def test_a_photo_of_many_megabytes_is_read(server: Served) -> None:
    data = base64.b64encode(png(noisy(1, 2200, 1600))).decode()
    assert len(data) > 9 * 2**20
    reply = asked(server, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}})
    assert reply.status_code == 200, reply.text
