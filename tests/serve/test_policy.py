"""The policy that a server chooses: fair where keys have several holders; the summary of its start says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.serve import app as serving
from headrace.serve import startup

FILE = """
[alice]
key = ["alice-key-1", "alice-key-2"]
[bob]
key = "bob-key-1"
[prometheus]
key = "metrics-key-1"
classes = ["metrics"]
"""
ONE = '[alice]\nkey = ["alice-key-1", "alice-key-2"]\n[prometheus]\nkey = "metrics-key-1"\nclasses = ["metrics"]\n'


def chosen(engine: EngineConfig, server: ServerConfig) -> tuple[str, str]:
    """The policy of the engine that a server of these settings starts, and the reason in the summary."""
    configs: list[EngineConfig] = []

    def make_client(engine: EngineConfig, server: ServerConfig) -> Any:
        configs.append(engine)
        return serving.client_of(engine, server)

    application = serving.make_app(engine, server, True, make_client)
    return configs[0].policy, application.state.lifespan.why


@pytest.mark.parametrize(
    ("fields", "policy", "why"),
    [
        ({}, "fcfs", "there are no keys of several holders"),
        ({"api_key": "one"}, "fcfs", "there are no keys of several holders"),
        ({"api_key": ["one", "two"]}, "fair", "the keys have 2 holders"),
        ({"api_key": "one", "admin_api_key": "two"}, "fair", "the keys have 2 holders"),
        ({"api_key_file": ONE}, "fcfs", "there are no keys of several holders"),
        ({"api_key_file": FILE}, "fair", "the keys have 2 holders"),
    ],
)
def test_R_10_the_policy_is_fair_where_keys_have_several_holders(
    tmp_path: Path, fields: dict[str, Any], policy: str, why: str
) -> None:
    if "api_key_file" in fields:
        file = tmp_path / "keys.toml"
        file.write_text(fields["api_key_file"])
        fields = {"api_key_file": str(file)}
    assert chosen(EngineConfig(), ServerConfig(**fields)) == (policy, why)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_flag_precedes_the_keys(policy: str) -> None:
    server = ServerConfig(api_key=["one", "two"])
    assert chosen(EngineConfig(scheduling_policy=policy), server) == (policy, "set by --scheduling-policy")


def test_the_summary_of_the_start_names_policy_and_reason() -> None:
    from tests.support.fake import build

    info = build(EngineConfig(scheduling_policy="fair")).info
    extra = startup.summary(info, None, "http://x", 1, why_policy="the keys have 2 holders")
    assert extra["rows"]["scheduling"] == "fair: the keys have 2 holders"
    assert extra["fields"]["scheduling_policy"] == "fair"


def test_without_a_server_auto_is_first_come_first_served() -> None:
    assert EngineConfig().scheduling_policy == "auto"
    assert EngineConfig().policy == "fcfs"
