"""The words of --speculative-config: what they mean, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.speculation import METHODS, ROWS, SpeculativeConfig, speculative_config

SPEC: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "inputs", [SPEC, '{"method": "ngram", "num_speculative_tokens": 3}', SpeculativeConfig(**SPEC)]
)
def test_a_config_may_be_given_as_text_dict_or_struct(inputs: Any) -> None:
    config = EngineConfig(speculative_config=inputs)
    assert config.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_nothing_is_guessed_unless_asked() -> None:
    assert EngineConfig().speculative_config is None


def test_a_model_without_a_method_drafts() -> None:
    assert SpeculativeConfig(model="some/where").method == "draft_model"
    assert SpeculativeConfig(model="ngram").method == "ngram"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_depth_and_nodes_of_its_own(method: str) -> None:
    config = SpeculativeConfig(method=method)
    assert 1 <= config.num_drafts <= config.num_nodes
    assert SpeculativeConfig(method=method, mode="rejection").num_nodes == config.num_drafts
    assert SpeculativeConfig(method=method, num_speculative_tokens=2, num_tree_nodes=9).num_nodes == 9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "oracle"),
        ("method", ""),
        ("method", 3),
        ("mode", "typical"),
        ("model", ""),
        ("model", 1),
        ("quantization", 4),
        ("adaptive", 1),
        ("max_model_len", None),
        ("num_speculative_tokens", True),
        ("num_speculative_tokens", 2.0),
        ("suffix_decoding_min_token_prob", float("nan")),
        *[(name, row.low - 1) for name, row in ROWS.items()],
        *[(name, row.high + 1) for name, row in ROWS.items()],
        *[(name, "3") for name in ROWS],
    ],
)
def test_a_bad_value_is_named_with_its_bound(field: str, value: Any) -> None:
    inputs: Any = {"method": "ngram"} | {field: value}
    with pytest.raises(RequestError) as caught:
        EngineConfig(speculative_config=inputs)
    assert caught.value.field == f"speculative_config.{field}"
    assert caught.value.bound


@pytest.mark.parametrize("inputs", ["", "{", "[]", "ngram", 4, [SPEC]])
def test_what_is_no_object_is_refused(inputs: Any) -> None:
    with pytest.raises(RequestError, match="speculative_config"):
        speculative_config(inputs)


def test_fields_are_checked_against_each_other_and_by_name() -> None:
    with pytest.raises(RequestError, match="prompt_lookup_min"):
        SpeculativeConfig(method="ngram", prompt_lookup_min=4, prompt_lookup_max=3)
    with pytest.raises(RequestError, match="num_tree_nodes"):
        SpeculativeConfig(method="medusa", num_speculative_tokens=5, num_tree_nodes=4)
    with pytest.raises(RequestError, match="num_specualtive_tokens.*num_speculative_tokens"):
        speculative_config({"method": "ngram", "num_specualtive_tokens": 3})
