"""The table of request parameters fits `SamplingParams`, and a new row is in every API and page that it names."""

from __future__ import annotations

import subprocess
import sys
import types
import typing
from typing import Any

import msgspec
from tests.laws import rules

from headrace.protocol.parameters import PARAMETERS, Parameter
from headrace.protocol.params import SamplingParams

# What the front end makes with its tokenizer, and functions of the caller's own process.
NOT_REQUESTED = {"bad_words_token_ids", "dry_sequence_breaker_ids", "thinking_token_ids", "logits_processors"}


def mismatches(rows: dict[str, Parameter], struct: type[msgspec.Struct]) -> list[str]:
    """Fields of `struct` without a row, rows without a field, and rows of another kind than the field's type."""
    hints = typing.get_type_hints(struct)
    names = set(hints) - NOT_REQUESTED
    return list(names ^ set(rows)) + [
        f"{name} is {row.kind}" for name, row in rows.items() if name in hints and row.kind not in kinds(hints[name])
    ]


def kinds(hint: Any) -> set[str]:
    """The kinds that a row of a field of this type may be of."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if any(isinstance(option, type) and issubclass(option, msgspec.Struct) for option in options):
        return {"object"}
    if any(typing.get_origin(option) in (list, dict) for option in options):
        return {"size"}
    return {option.__name__ for option in options} & {"int", "float", "bool"}


def test_the_table_fits_the_struct() -> None:
    assert mismatches(PARAMETERS, SamplingParams) == []


def test_control_a_field_or_a_row_alone_or_of_another_kind_is_noticed() -> None:
    class Wider(SamplingParams, frozen=True, kw_only=True):
        glow: float = 0.5

    row = Parameter("glow", "int", 0, 1, "", {})
    assert mismatches(PARAMETERS, Wider) == ["glow"]
    assert mismatches(PARAMETERS | {"glow": row}, SamplingParams) == ["glow"]
    assert mismatches(PARAMETERS | {"glow": row}, Wider) == ["glow is int"]


PLANT = """
import pathlib, tempfile
from headrace.protocol import parameters

names = {api: "glow" for api in parameters.APIS} | {"ollama": "gleam"}
parameters.PARAMETERS["glow"] = parameters.Parameter("glow", "float", 0.0, 4.0, "how brightly it glows", names)

from headrace.protocol import params

class SamplingParams(params.SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    glow: float = 0.5

params.SamplingParams = SamplingParams

# The record of the parameters that a caller gives, with one line more.
import importlib.util, sys

spec = importlib.util.find_spec("headrace.serve.call.call")
source = pathlib.Path(spec.origin).read_text()
last = "    speculation: bool | None = None\\n"
assert last in source
call = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = call
exec(source.replace(last, last + "    glow: float | None = None\\n"), vars(call))

from headrace.cli.options import help_of
from headrace.cli.reference import fields_of, limits_page
from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer
from tests.support.server import HTTP, Live, inproc, write_tokenizer

assert "| `glow` | float | 0 | 4 | 0.5 | how brightly it glows | yes | yes | `gleam` | yes |" in limits_page()
assert help_of(SamplingParams, fields_of(SamplingParams)["glow"]) == (
    "How brightly it glows; a finite number from 0 to 4."
)
tokenizer = Tokenizer.load(write_tokenizer(pathlib.Path(tempfile.mkdtemp())))
chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
    document = HTTP.get(live.url + "/openapi.json").json()["components"]["schemas"]
    fields = {name: "glow" for name in ("CompletionRequest", "ChatCompletionRequest", "MessagesRequest")}
    for struct, name in (fields | {"LlamaCompletionRequest": "glow", "Options": "gleam"}).items():
        number = {"type": "number", "minimum": 0.0, "maximum": 4.0}
        assert document[struct]["properties"][name]["anyOf"][0] == number, struct
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "store": False}),
        ("/v1/messages", chat),
        ("/completion", {"prompt": "hi", "n_predict": 2}),
    ):
        assert live.post(path, body | {"glow": 4.0}).status_code == 200, path
        refusal = live.post(path, body | {"glow": 5.0}).text
        assert "glow: 5.0 is not allowed; it must be a finite number from 0 to 4" in refusal, path
    settings = live.post("/completion", {"prompt": "hi", "n_predict": 2, "glow": 3.0}).json()["generation_settings"]
    assert settings["glow"] == 3.0
    reply = live.post("/api/chat", {"model": "fake", "messages": chat["messages"], "options": {"gleam": 5.0}})
    assert reply.json()["error"].startswith("options.gleam: 5.0 is not allowed"), reply.text
print("planted")
"""


def test_a_new_row_and_field_are_in_every_api_and_page() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANT], cwd=rules.ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.endswith("planted\n"), done.stderr
