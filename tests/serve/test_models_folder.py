"""A folder of models behind a live server, by Ollama's own client: what is there, what is loaded, and all changes.

The engines are simulated ones; the files are tiny. `tests/e2e/test_models.py` does it with real models.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest
from safetensors.numpy import save_file
from tests.formats.gguf.files import STRING, U32, gguf_file, scalar, tensor
from tests.security.rig import ALICE, ROOT, bearer, write_keys
from tests.support.server import HTTP, Live, inproc, write_tokenizer

from headrace.cli import models as commands
from headrace.engine.library.model_folder import NAME, ModelFolder
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import HeadraceError
from headrace.serve import loading
from headrace.text.tokenizer import Tokenizer

CONFIG = {"model_type": "llama", "max_position_embeddings": 512, "hidden_size": 8}
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def write_model(folder: Path, seed: int = 0) -> Path:
    """A checkpoint of 96 parameters that says what it is, and that no engine could run."""
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = np.random.default_rng(seed).standard_normal((12, 8), np.float32)
    save_file({"w": weights}, folder / "model.safetensors")
    return folder


class Folded(Live):
    """A server with the folder `root`, and no model that stays unless `stays`."""

    def __init__(self, root: Path, tokenizer: Tokenizer, stays: bool = False, **settings: Any) -> None:
        self.root = root
        server = ServerConfig(log_stats_interval=0, models_dir=str(root), **settings)
        self.folder = ModelFolder(str(root))
        super().__init__(inproc(), tokenizer, server, stays, folder=self.folder)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model's engine is a simulated one in this process."""
    monkeypatch.setattr(loading, "ProcessClient", lambda engine, server: inproc())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Folded]:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "tiny")
    write_model(root / "owner" / "named:q8")
    (root / "not a model").mkdir()
    (root / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "ProcessClient", lambda engine, server: inproc())
        with Folded(root, tokenizer) as live:
            yield live


@pytest.fixture
def client(server: Folded) -> Iterator[ollama.Client]:
    result = ollama.Client(host=server.url, timeout=240)
    yield result
    result.close()


def loaded(client: ollama.Client) -> list[str]:
    return [str(model.model) for model in client.ps().models]


def test_K16_tags_and_show_read_the_files_and_load_nothing(server: Folded, client: ollama.Client) -> None:
    for name in loaded(client):
        client.generate(name, keep_alive=0)
    cards = {str(card.model): card for card in client.list().models}
    assert {"owner/named:q8", "tiny:latest"} <= set(cards)
    assert {"fake", "not a model", "empty"}.isdisjoint(cards)
    tiny = cards["tiny:latest"]
    assert tiny.size == sum((server.root / "tiny" / name).stat().st_size for name in FILES)
    assert tiny.details is not None
    details = (tiny.details.format, tiny.details.family, tiny.details.parameter_size, tiny.details.quantization_level)
    assert details == ("safetensors", "llama", "96", "F32")
    facts = client.show("tiny")
    assert facts.modelinfo is not None
    assert facts.modelinfo["llama.context_length"] == 512
    assert facts.template == Tokenizer.load(server.root / "tiny").chat_template
    listed = HTTP.get(server.url + "/v1/models").json()["data"]
    assert {card["id"]: card["max_model_len"] for card in listed}["tiny"] == 512
    assert all(str(server.root) not in json.dumps(card) for card in listed)
    assert loaded(client) == []


def test_K16_every_api_loads_what_it_names_and_keep_alive_unloads_it(server: Folded, client: ollama.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for name in ("tiny", "tiny:latest"):
        reply = server.post("/v1/chat/completions", body | {"model": name})
        assert (reply.status_code, reply.json()["model"]) == (200, "tiny")
    assert server.post("/v1/messages", body | {"model": "owner/named:q8"}).json()["model"] == "owner/named:q8"
    assert sorted(loaded(client)) == ["owner/named:q8", "tiny:latest"]
    card = HTTP.get(server.url + "/v1/models/tiny").json()
    assert (card["max_model_len"], card["root"]) == (2048, "tiny"), "the engine's context, where one runs"
    assert server.metric("engine_up", model_name="tiny") == 1
    assert server.post("/completion", {"model": "tiny", "prompt": "x", "n_predict": 1}).status_code == 200
    assert server.post("/v1/embeddings", {"model": "tiny", "input": "x"}).json()["model"] == "tiny"
    assert server.post("/tokenize", {"model": "tiny", "prompt": "abc"}).json()["count"] == 3
    chat = client.chat("tiny", body["messages"], options={"num_predict": 2}, keep_alive=0)  # type: ignore[call-overload]
    assert chat.done_reason == "length"
    server.wait(lambda: loaded(client) == ["owner/named:q8"])
    assert client.generate("owner/named:q8", "", keep_alive=0).done_reason == "unload"
    assert loaded(client) == []
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"
    assert loaded(client) == [], "a model is not loaded to be unloaded"
    assert client.generate("tiny", "", keep_alive=-1).done_reason == "load"
    (model,) = client.ps().models
    assert model.expires_at is not None
    assert model.expires_at.year == 9999
    assert client.generate("tiny", "", keep_alive="30s").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="keep_alive: 'soon' is not allowed"):
        client.generate("tiny", "x", keep_alive="soon")
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"


def test_K16_lookups_are_about_the_model_that_the_query_names(server: Folded) -> None:
    for name in ("tiny", "owner/named:q8"):
        assert server.post("/tokenize", {"model": name, "prompt": "x"}).status_code == 200
    props = HTTP.get(server.url + "/props?model=tiny").json()
    assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == ("tiny", 2048)
    named = HTTP.get(server.url + "/props", params={"model": "owner/named:q8"}).json()
    assert named["model_alias"] == "owner/named:q8"
    tokenizer = HTTP.get(server.url + "/tokenizer_info?model=tiny").json()
    assert tokenizer["chat_template"] == Tokenizer.load(server.root / "tiny").chat_template
    assert HTTP.get(server.url + "/slots?model=tiny").json()[0]["n_ctx"] == 2048
    info = HTTP.get(server.url + "/server_info?model=tiny").json()
    assert info["vllm_config"]["model_config"]["served_model_name"] == ["tiny", "tiny:latest"]
    for path in ("/props", "/tokenizer_info", "/slots", "/server_info"):
        unnamed = HTTP.get(server.url + path)
        assert (unnamed.status_code, "model" in unnamed.text) == (400, True), "two models, and none is named"
        assert HTTP.get(server.url + path + "?model=nope").status_code == 404


def test_K16_calls_of_a_model_that_is_unloaded_are_explained(server: Folded, client: ollama.Client) -> None:
    def explained(call_id: str) -> Any:
        return HTTP.get(f"{server.url}/v1/requests/{call_id}/explain").json().get("data")

    body = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    ids = [server.post("/v1/completions", body | {"prompt": f"{a} cat sat on a wall"}).json()["id"] for a in "AB"]
    before = [explained(call_id) for call_id in ids]
    assert before[1][0]["prefix_cache"][0]["prompt"].startswith("B cat")
    client.generate("tiny", "", keep_alive=0)
    assert "tiny:latest" not in loaded(client)
    assert [explained(call_id) for call_id in ids] == before
    again = server.post("/v1/completions", body | {"prompt": "C"}).json()["id"]
    assert [len(explained(call_id)) for call_id in (*ids, again)] == [1, 1, 1], "loaded again"
    assert explained("cmpl-0") is None


def test_K16_names_that_are_not_there_are_refused(server: Folded, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"model: 'nope' not found; there are .*'tiny'") as caught:
        client.generate("nope", "x")
    assert caught.value.status_code == 404
    reply = server.post("/v1/completions", {"prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    assert HTTP.get(server.url + "/v1/models/nope").status_code == 404
    assert HTTP.get(server.url + "/health/ready").json() == {"status": "ready"}


def test_K16_a_model_that_can_not_be_loaded_is_an_error_of_its_own(server: Folded, client: ollama.Client) -> None:
    broken = write_model(server.root / "broken")
    (broken / "tokenizer.json").write_text("{")
    reply = server.post("/v1/completions", {"model": "broken", "prompt": "x", "max_tokens": 1})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (500, "model_load_failed")
    assert error["message"].startswith("the model broken can not be loaded: ")
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1}).status_code == 200
    client.delete("broken")


def test_K16_create_copy_and_delete(server: Folded, client: ollama.Client, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", seed=1)
    files = {name: client.create_blob(source / name) for name in FILES}
    assert client.create("made", files=files).status == "success"
    assert (server.root / "made" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert [step.status for step in client.create("second", from_="made", stream=True)] == [
        "writing manifest",
        "success",
    ]
    assert client.copy("made", "third:v1").status == "success"
    copies = [server.root / name / "model.safetensors" for name in ("made", "second", "third:v1")]
    assert len({path.stat().st_ino for path in copies}) == 1, "copies share their bytes"
    client.generate("made", "x", options={"num_predict": 1})
    assert "made:latest" in loaded(client)
    assert client.delete("made").status == "success"
    assert "made:latest" not in loaded(client)
    assert copies[1].is_file()
    assert client.generate("third:v1", "x", options={"num_predict": 1}).done
    for name in ("second", "third:v1"):
        client.delete(name)
    assert [path.name for path in server.root.iterdir() if path.name in ("made", "second", "third:v1")] == []
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.delete("made")
    assert caught.value.status_code == 404


JINJA = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def test_K16_create_sets_system_template_and_parameters(server: Folded, client: ollama.Client) -> None:
    tiny = (server.root / "tiny" / "model.safetensors").stat().st_ino
    parameters: dict[str, Any] = {"temperature": 0.25, "stop": ["<end>", "<x>"], "num_predict": 3, "seed": -1}
    reply = server.post(
        "/api/create",
        {"model": "mario", "from": "tiny", "system": "You are Mario.", "template": JINJA, "stream": False,
         "parameters": parameters | {"num_ctx": 64, "num_gpu": 1}, "license": "MIT"},
    )  # fmt: skip
    assert [line.partition(":")[0] for line in reply.json()["warnings"]] == [
        "parameters.num_gpu",
        "parameters.num_ctx",
        "license",
    ]
    assert (server.root / "mario" / "model.safetensors").stat().st_ino == tiny
    lines = ['stop "<end>"', 'stop "<x>"', "num_predict 3", "temperature 0.25"]

    def check(name: str, system: str) -> None:
        body = server.post("/api/show", {"model": name}).json()
        assert (body["system"], body["template"]) == (system, JINJA)
        assert sorted(body["parameters"].splitlines()) == sorted(lines)
        assert body["modelfile"].splitlines()[:3] == [
            f"FROM {name}",
            f'TEMPLATE """{JINJA}"""',
            f'SYSTEM """{system}"""',
        ]
        assert all(f"PARAMETER {line}\n" in body["modelfile"] for line in lines)

    def prompt(name: str, *roles: str) -> str:
        messages = [{"role": role, "content": role[0]} for role in roles]
        return str(server.post("/apply-template", {"model": name, "messages": messages}).json()["prompt"])

    check("mario", "You are Mario.")
    assert prompt("mario", "user") == "<system>You are Mario.<user>u<assistant>"
    check("mario", "You are Mario.")
    assert prompt("mario", "system", "user") == "<system>s<user>u<assistant>", "the request's own"
    assert prompt("tiny", "user") == "[user]u[a]", "the model that it was made of is as it was"
    props = HTTP.get(server.url + "/props?model=mario").json()["default_generation_settings"]["params"]
    assert (props["temperature"], props["stop"]) == (0.25, ["<end>", "<x>"])
    chat = {"model": "mario", "messages": [{"role": "user", "content": "u"}]}
    assert server.post("/v1/chat/completions", chat).json()["usage"]["completion_tokens"] == 3
    assert server.post("/v1/chat/completions", chat | {"max_tokens": 2}).json()["usage"]["completion_tokens"] == 2
    # A model that is made of it has what it has, but for what it changes.
    client.create("luigi", from_="mario", system="You are Luigi.")
    check("luigi", "You are Luigi.")
    check("mario", "You are Mario.")
    assert prompt("luigi", "user") == "<system>You are Luigi.<user>u<assistant>"
    for name in ("mario", "luigi"):
        client.delete(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"}, "this one is Go's"),
        ({"template": "{% for m in messages %}"}, "a chat template in Jinja: Unexpected end of template"),
        ({"template": "prompts/chat.jinja"}, "a chat template in Jinja, which writes messages"),
        ({"parameters": {"temperature": -1}}, "parameters.temperature: -1"),
        ({"parameters": {"num_predict": -3}}, "parameters.num_predict: -3"),
        ({"parameters": ["temperature"]}, "parameters: "),
        ({"adapters": {"a.gguf": "sha256:" + "0" * 64}}, "adapters.a.gguf: "),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages: not supported here"),
    ],
)
def test_K16_create_refuses_what_it_can_not_set(server: Folded, settings: dict[str, Any], message: str) -> None:
    reply = server.post("/api/create", {"model": "refused", "from": "tiny", "stream": False} | settings)
    assert (reply.status_code, message in reply.json()["error"]) == (400, True), reply.text
    assert not (server.root / "refused").exists()


@pytest.mark.parametrize("text", ["[]", '{"sampling": {"heat": 1}}', '{"sampling": {"top_p": 3}}', '{"systems": ""}'])
def test_K16_broken_settings_are_an_error_of_the_model(server: Folded, client: ollama.Client, text: str) -> None:
    (write_model(server.root / "spoilt") / "headrace.json").write_text(text)
    reply = server.post("/v1/completions", {"model": "spoilt", "prompt": "x", "max_tokens": 1})
    assert (reply.status_code, "headrace.json" in reply.text, str(server.root) in reply.text) == (500, True, False)
    client.delete("spoilt")


def test_S_21_no_name_of_a_request_leaves_the_folder(server: Folded, tmp_path: Path) -> None:
    outside = write_model(tmp_path / "outside")
    before = sorted(tmp_path.rglob("*"))
    names = ["..", "../outside", str(outside), "a/../../outside", ".blobs", ".unfinished/x", "tiny/../tiny", "a/b/c",
             "a\\b", "tiny\0", "", "x" * 300, os.path.relpath(outside, server.root)]  # fmt: skip
    for name in names:
        assert NAME.fullmatch(name) is None
        for path, body in (
            ("/api/create", {"model": name, "from": "tiny", "stream": False}),
            ("/api/create", {"model": "fresh", "from": name, "stream": False}),
            ("/api/copy", {"source": "tiny", "destination": name}),
            ("/api/copy", {"source": name, "destination": "fresh"}),
            ("/api/pull", {"model": name, "stream": False}),
            ("/api/show", {"model": name}),
            ("/v1/completions", {"model": name, "prompt": "x"}),
        ):
            assert server.post(path, body).status_code in (400, 404), (path, body)
        reply = HTTP.request("DELETE", server.url + "/api/delete", json={"model": name})
        assert reply.status_code in (400, 404)
    digest = "sha256:" + hashlib.sha256(b"{}").hexdigest()
    assert HTTP.post(f"{server.url}/api/blobs/{digest}", content=b"{}").status_code == 201
    for name in ("../config.json", "/config.json", "a/config.json", ".config.json", "model.bin", "run.py"):
        reply = server.post("/api/create", {"model": "fresh", "files": {name: digest}, "stream": False})
        assert (reply.status_code, "files" in reply.json()["error"]) == (400, True)
    for bad in ("sha256:..", "sha256:" + "0" * 63, "..%2f..%2fx"):
        assert HTTP.post(f"{server.url}/api/blobs/{bad}", content=b"{}").status_code in (400, 404)
    assert sorted(tmp_path.rglob("*")) == before
    assert not (server.root / "fresh").exists()


def test_K16_an_upload_is_kept_only_with_its_own_digest(server: Folded) -> None:
    digest = "sha256:" + hashlib.sha256(b"one").hexdigest()
    address = f"{server.url}/api/blobs/{digest}"
    assert HTTP.head(address).status_code == 404
    reply = HTTP.post(address, content=b"two")
    assert (reply.status_code, "that of the bytes that came" in reply.json()["error"]) == (400, True)
    assert HTTP.head(address).status_code == 404
    assert HTTP.post(address, content=b"one").status_code == 201
    assert HTTP.head(address).status_code == 200
    reply = server.post("/api/create", {"model": "one", "files": {"x.gguf": digest}, "stream": False})
    assert (reply.status_code, str(server.root) in reply.text) == (400, False)
    assert "made of files that headrace reads: " in reply.json()["error"]


def test_K16_only_administrators_change_the_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_model(tmp_path / "models" / "tiny")
    with Folded(tmp_path / "models", tokenizer, stays=True, api_key_file=write_keys(tmp_path)) as live:
        alice, root = bearer(ALICE), bearer(ROOT)
        calls: list[tuple[str, str, Any]] = [
            ("POST", "/api/copy", {"source": "tiny", "destination": "other"}),
            ("POST", "/api/create", {"model": "other", "from": "tiny", "stream": False}),
            ("DELETE", "/api/delete", {"model": "other"}),
            ("POST", "/api/pull", {"model": "tiny", "stream": False}),
            ("POST", f"/api/blobs/sha256:{hashlib.sha256(b'{}').hexdigest()}", {}),
            ("POST", "/sleep", None),
            ("POST", "/wake_up", None),
        ]
        for method, path, body in calls:
            assert HTTP.request(method, live.url + path, json=body, headers=alice).status_code == 403
            assert HTTP.request(method, live.url + path, json=body, headers=root).status_code in (200, 201), path
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert live.post("/v1/chat/completions", chat, headers=alice).status_code == 200
        reply = HTTP.request("DELETE", live.url + "/api/delete", json={"model": "fake"}, headers=root)
        assert (reply.status_code, "named when the server started" in reply.text) == (400, True)


class Hub(ThreadingHTTPServer):
    """A stand-in for the hub with one repository, which sends `files`."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        status, headers, body = 404, {"x-error-code": "RepoNotFound"}, b""
        name = self.path.split("/", 5)[-1]  # behind /owner/name/resolve/REVISION/
        if self.path.startswith("/api/models/owner/name"):
            siblings = [
                {"rfilename": key, "size": len(value), "blobId": key} for key, value in self.server.files.items()
            ]
            status, headers, body = (
                200,
                {},
                json.dumps({"id": "owner/name", "sha": "a" * 40, "siblings": siblings}).encode(),
            )
        elif self.path.startswith("/owner/name/resolve/") and name in self.server.files:
            body = self.server.files[name]
            status, headers = 200, {"etag": f'"{hashlib.sha1(body).hexdigest()}"', "x-repo-commit": "a" * 40}
        self.send_response(status)
        for key, value in (headers | {"content-length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_K16_pull_fetches_from_the_hub_and_shows_its_progress(
    server: Folded, client: ollama.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source = write_model(tmp_path / "source")
    files = {name: (source / name).read_bytes() for name in FILES} | {"evil.py": b"x", "README.md": b"x"}
    hub = Hub(files)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    steps = list(client.pull("hf.co/owner/name", stream=True))
    assert steps[0].status == "pulling manifest"
    assert steps[-1].status == "success"
    weights = [step for step in steps if step.digest == "sha256:model.safetensors"]
    assert weights[-1].total == weights[-1].completed == len(files["model.safetensors"])
    root = server.root / "owner" / "name"
    assert sorted(path.name for path in root.iterdir()) == sorted(FILES), "no code, and nothing of the hub's client"
    assert client.generate("owner/name", "x", options={"num_predict": 1}).done
    assert [step.status for step in client.pull("owner/name", stream=True)] == ["success"]
    commands.rm(["owner/name"], url=server.url)
    assert (capsys.readouterr().out, root.exists()) == ("deleted owner/name\n", False)
    with pytest.raises(HeadraceError, match="other/name: the hub said: "):
        commands.pull("other/name", url=server.url)
    with pytest.raises(
        ollama.ResponseError, match="OWNER/NAME or OWNER/NAME:TAG, a repository of the Hugging Face hub"
    ):
        client.pull("llama3.2")
    hub.shutdown()
    hub.server_close()
    hub.server_close()


def test_K16_pull_fetches_all_files_of_a_split_model(
    server: Folded, client: ollama.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(number: int) -> bytes:
        counts = [scalar("split.no", U32, number), scalar("split.count", U32, 2), scalar("split.tensors.count", U32, 2)]
        fields = [*counts, *[scalar("general.architecture", STRING, "llama")] * (number == 0)]
        return gguf_file(fields, [tensor(f"t{number}", [2], 0, 0)], bytes(8))

    names = ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"]
    hub = Hub({f"Q8_0/{name}": part(number) for number, name in enumerate(names)} | {"a-Q4_0.gguf": b"x"})
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert list(client.pull("owner/name:Q8_0", stream=True))[-1].status == "success"
    root = server.root / "owner" / "name:Q8_0"
    assert sorted(path.name for path in root.iterdir()) == names
    (card,) = [card for card in client.list().models if card.model == "owner/name:Q8_0"]
    assert card.size == sum(len(part(number)) for number in (0, 1))
    commands.rm(["owner/name:Q8_0"], url=server.url)
    hub.shutdown()
    hub.server_close()


def test_K16_the_commands_show_what_there_is(server: Folded, capsys: Any) -> None:
    commands.list_models(url=server.url)
    listed = capsys.readouterr().out
    assert "tiny:latest" in listed
    assert "llama 96 F32" in listed
    commands.show("tiny", url=server.url)
    assert "context length    512" in capsys.readouterr().out
    server.post("/api/generate", {"model": "tiny", "stream": False, "keep_alive": -1})
    commands.ps(url=server.url)
    assert "the server ends" in capsys.readouterr().out
    with pytest.raises(HeadraceError, match="'nope' not found"):
        commands.show("nope", url=server.url)


def test_K16_the_model_that_stays_has_its_true_size_and_family(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_model(tmp_path / "model")
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), engine=EngineConfig(model=str(path))) as live:
        (card,) = HTTP.get(live.url + "/api/tags").json()["models"]
        assert card["size"] == sum(file.stat().st_size for file in path.iterdir())
        assert (card["details"]["family"], card["details"]["parameter_size"]) == ("llama", "96")
        (card,) = HTTP.get(live.url + "/api/ps").json()["models"]
        assert card["expires_at"].startswith("9999"), "it stays"
        reply = live.post("/api/generate", {"model": "fake", "prompt": "x", "stream": False, "keep_alive": "5m"})
        assert "keep_alive: ignored: the model is loaded as long as the server runs" in reply.json()["warnings"]


def test_K16_sleep_and_wake_up(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with Folded(tmp_path, tokenizer, stays=True) as live:
        body = {"prompt": "x", "max_tokens": 3, "seed": 1}
        before = live.post("/v1/completions", body).json()["choices"]
        assert live.post("/sleep?level=3", None).status_code == 400
        assert live.post("/sleep?level=1", None).status_code == 200
        assert HTTP.get(live.url + "/is_sleeping").json() == {"is_sleeping": True}
        assert HTTP.get(live.url + "/health/ready").json() == {"status": "sleeping"}
        reply = live.post("/v1/completions", body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "sleeping")
        assert reply.headers["retry-after"] == "10"
        assert live.post("/wake_up", None).status_code == 200
        assert HTTP.get(live.url + "/is_sleeping").json() == {"is_sleeping": False}
        assert live.post("/v1/completions", body).json()["choices"] == before
