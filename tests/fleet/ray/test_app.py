"""app.yaml: what a file says becomes the configs of engines and a front, and a mistake is named by its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.docs.pages import ROOT, blocks

from headrace.protocol.errors import RequestError
from headrace.ray.app import App, app_of, documented, read

PAGE = "howto-scale.md"
MODEL = {"model": "path/to/small.gguf"}


def test_a_short_file_has_the_defaults_of_the_flags() -> None:
    app = app_of({"models": [{"model": "builtin"}]})
    [model] = app.models
    assert (app.name, model.label, model.min_replicas, model.most_replicas) == ("headrace", "builtin", 1, 1)
    config = model.engine_config("models.0")
    assert (config.model, config.num_threads, config.max_model_len) == ("builtin", 1, None)
    server = app.front.server_config([model.label])
    assert (server.host, server.port, server.served_model_name) == ("127.0.0.1", 8000, ["builtin"])


def test_flags_are_those_of_the_command_line() -> None:
    engine = {"max-model-len": "4k", "num_threads": 3, "speculative-config": {"method": "ngram"}}
    app = app_of(
        {
            "name": "chat",
            "models": [MODEL | {"name": "s", "max_replicas": 3, "num_cpus": 8, "engine": engine}],
            "front": {"host": "::", "port": 80, "server": {"api-key-file": "keys.toml"}},
        }
    )
    config = app.models[0].engine_config("models.0")
    assert (config.max_model_len, config.num_threads) == (4000, 3)
    assert config.speculative_config is not None
    assert config.speculative_config.method == "ngram"
    assert app.front.server_config(["s"]).api_key_file == "keys.toml"
    assert app.models[0].most_replicas == 3


def test_an_engine_has_as_many_threads_as_processors() -> None:
    threads = [
        app_of({"models": [MODEL | {"num_cpus": num}]}).models[0].engine_config("").num_threads for num in (4, 0)
    ]
    assert threads == [4, 0]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "app: 'list' is not allowed; it must be a mapping"),
        ({}, "models: None is not allowed; it must be given"),
        ({"models": []}, "models: [] is not allowed"),
        ({"models": [{}]}, "models.0.model: None is not allowed; it must be given"),
        ({"models": [MODEL | {"min_replicas": 0}]}, "models.0.min_replicas: 0 is not allowed; it must be exp"),
        ({"models": [MODEL | {"min_replicas": 3, "max_replicas": 2}]}, "models.0.max_replicas: 2 is"),
        ({"models": [MODEL | {"num_cpus": -1}]}, "models.0.num_cpus: -1 is"),
        ({"models": [MODEL | {"replicas": 2}]}, "models.0.replicas: 2 is"),
        ({"models": [MODEL | {"name": "a b"}]}, "models.0.name: 'a b' is"),
        ({"models": [MODEL | {"engine": {"maxlen": 2}}]}, "models.0.engine.maxlen: 2 is"),
        ({"models": [MODEL | {"engine": {"max-model-len": "long"}}]}, "models.0.engine.max_model_len: 'long' is"),
        ({"models": [MODEL | {"engine": {"block-size": 0}}]}, "models.0.engine.block_size: 0 is"),
        ({"models": [MODEL | {"engine": {"model": "x"}}]}, "models.0.engine.model: 'x' is"),
        ({"models": [MODEL], "front": {"port": 70000}}, "front.port: 70000 is not allowed"),
        ({"models": [MODEL], "front": {"server": {"port": 1}}}, "front.server.port: 1 is"),
        ({"models": [MODEL], "front": {"server": {"api-key": "x"}}}, "front.server.api-key"),
        ({"models": [MODEL], "front": {"server": {"router": "x"}}}, "front.server.router: 'x' is"),
        ({"models": [MODEL], "ports": [9000, 8000]}, "ports: [9000, 8000] is"),
        ({"models": [MODEL], "port": 8000}, "port: 8000 is not allowed; it must be left out"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_value_and_what_is_allowed(tree: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        app_of(tree)


def test_a_file_is_read_and_its_credentials_are_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "app.yaml"
    path.write_text("name: chat\nmodels:\n  - model: builtin\n")
    assert read(path).credentials == str(tmp_path / "chat.credentials")
    path.write_text("models: [")
    with pytest.raises(RequestError, match="a YAML file"):
        read(path)
    with pytest.raises(RequestError, match="a file that can be read"):
        read(tmp_path / "none.yaml")


def test_the_files_of_the_page_are_read(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    files = [block.text for block in blocks(PAGE, page) if block.language == "yaml"]
    for text in files:
        (tmp_path / "app.yaml").write_text(text)
        assert read(tmp_path / "app.yaml").models
    assert len(files) == 2


def test_the_page_documents_every_field() -> None:
    rows = list(documented())
    assert all(meaning for _, _, meaning in rows)
    assert ("models.min_replicas", "1") in [row[:2] for row in rows]
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    missing = [name for name, _, meaning in rows if f"| `{name}` |" not in page or meaning not in page]
    assert not missing
    assert msgspec.structs.fields(App)
