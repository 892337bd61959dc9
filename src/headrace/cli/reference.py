"""Writes the pages of docs/ that come from code: `python -m headrace.cli.reference DIRECTORY`.

flags.md comes from the command line itself, limits.md from the tables of parameters and of bounds, from-*.md from the
table of other engines' settings. A test fails when a page differs from the written one."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer.main

from headrace import env
from headrace.cli.main import app
from headrace.migration.llama_server import LLAMA_SERVER_SETTINGS
from headrace.migration.ollama import OLLAMA_VARIABLES
from headrace.migration.settings import LLAMA_SERVER, VLLM, Setting
from headrace.migration.vllm import VLLM_SETTINGS
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.bounds import BOUNDS, MAX_REPLY_LOGPROBS, Bound
from headrace.protocol.parameters import APIS, MAX_INT, MAX_INT32, PARAMETERS, Parameter
from headrace.protocol.params import SamplingParams, Watermark
from headrace.protocol.step import Request


def commands(command: Any = None, path: str = "headrace") -> Iterator[tuple[str, Any]]:
    """(words on the command line, command) of every command that does something, in the order of `--help`."""
    command = command or typer.main.get_command(app)
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from commands(child, f"{path} {name}")


def flags(command: Any) -> list[tuple[str, str, str]]:
    """(names, default, help) of each option of a command but --help."""
    rows = []
    for parameter in command.params:
        if parameter.param_type_name != "option":
            continue
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        default = parameter.default
        if default is None or default == () or default == []:
            text = ""
        elif isinstance(default, bool):
            text = "on" if default else "off"
        else:
            text = f"`{default}`"
        rows.append((names, text, parameter.help or ""))
    return rows


def flags_page() -> str:
    lines = [
        "# Flags",
        "",
        "Written by `make docs` from the command line itself; a test fails when this page is stale.",
        "Whole numbers may be written for people: `32k` is 32,000 and `32K` is 32,768.",
    ]
    for path, command in commands():
        arguments = [p for p in command.params if p.param_type_name == "argument" and not p.hidden]
        names = [(p.metavar or p.name).strip("[]").removesuffix("...").upper() for p in arguments]
        words = "".join(f" {name}" if p.required else f" [{name}]" for name, p in zip(names, arguments, strict=True))
        lines += ["", f"## `{path}{words}`", "", inspect.cleandoc(command.help or ""), ""]
        lines += ["| flag | default | meaning |", "|---|---|---|"]
        lines += [f"| {names} | {default} | {text} |" for names, default, text in flags(command)]
    lines += ["", "## Environment", "", "| variable | meaning |", "|---|---|"]
    for _, function in inspect.getmembers(env, inspect.isfunction):
        name, _, text = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].partition(": ")
        lines.append(f"| `{name}` | {' '.join(text.split())} |")
    lines.append("| `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` | read by `huggingface_hub` when a model is fetched |")
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """A number as a page shows it: the ends of machine integers as powers of two."""
    if value is None:
        return ""
    if value == MAX_INT:
        return "2^63 - 1"
    if float(value).is_integer() and math.log2(abs(value) or 1).is_integer() and abs(value) >= 2**20:
        return f"{'-' if value < 0 else ''}2^{int(math.log2(abs(value)))}"
    if value == MAX_INT32:
        return "2^31 - 1"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def defaults() -> dict[str, Any]:
    """The default of each bounded field that has one, by the name of its row."""
    values = {"priority": fields_of(Request)["priority"].default}
    values |= {f"watermark_{name}": field.default for name, field in fields_of(Watermark).items()}
    for struct in (BeamSearchParams, SamplingParams):
        values |= {name: field.default for name, field in fields_of(struct).items()}
    return {name: value for name, value in values.items() if value is not None and value is not msgspec.NODEFAULT}


def fields_of(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(struct)}


LIMITS_HEAD = f"""# Limits

Every number and size that a request can carry, by which the server and the engine check it. A value outside its range
is refused with HTTP 400, naming field, value and range. Written by `make docs`; a test fails when this page is stale.

## Parameters

The fields of `SamplingParams`, from `headrace/protocol/parameters.py`, and their names in the APIs that take them:
"yes" is the same name. The range of a size bounds its length.

- OpenAI's API has vLLM's extensions. A chat has `max_completion_tokens` too, and `top_logprobs` next to `logprobs`;
  Responses has `max_output_tokens`.
- Ollama's names are fields of `options`; `top_logprobs` stands next to it.
- A share (`top_p`, `typical_p`) of 0 is greedy: it keeps one token. A `seed` of -1 is random, as none is. In Ollama's
  and llama-server's APIs a length of -1 or -2 means none, in Ollama's a length of 0 too.
- A length of 0 (`max_tokens`, `max_completion_tokens`, `max_output_tokens`, `n_predict`) computes the prompt alone, to
  fill the cache or, with `echo`, to score a text. The answer is empty, and a limit has ended it. The engine ends it
  with one token, which no reply shows or counts, but for which the context must have room.
- Where `logprobs` or `prompt_logprobs` is above 20 or -1 (`--max-logprobs` allows it), all answers of a call have at
  most {MAX_REPLY_LOGPROBS:,} of them together: the reply, of about 75 bytes for each, is held in memory.
- The form of an answer is `output_config` for Anthropic, `format` for Ollama, `grammar` or `json_schema` for
  llama-server.
"""


def limits_page() -> str:
    default_of = defaults()

    def cells(row: Parameter | Bound) -> list[str]:
        default = default_of.get(row.name)
        default_text = str(default).lower() if isinstance(default, bool) else number(default)
        return [f"`{row.name}`", row.kind, number(row.low), number(row.high), default_text, row.doc]

    head = ["field", "kind", "from", "to", "default", "meaning"]

    def name_in(api: str, row: Parameter) -> str:
        name = row.names.get(api, "")
        return "yes" if name == row.name else name and f"`{name}`"

    parameters = [[*cells(row), *(name_in(api, row) for api in APIS)] for row in PARAMETERS.values()]
    others = [bound for bound in BOUNDS.values() if bound.name not in PARAMETERS]
    return "\n".join(
        [
            LIMITS_HEAD,
            *table([*head, *APIS.values()], parameters),
            "",
            "## Other values",
            "",
            *table(head, [cells(bound) for bound in others if bound.kind != "size"]),
            "",
            "## Other sizes",
            "",
            *table(head, [cells(bound) for bound in others if bound.kind == "size"]),
            "",
        ]
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]


FROM_HEAD = """# From {source}

{text}

Written by `make docs` from the tables of `headrace.migration`; a test fails when this page is stale.
"""
FROM_VLLM = """`headrace serve MODEL` takes the command line of `vllm serve MODEL`, and `headrace.LLM` the keywords of
vLLM's. [Flags](flags.md) of the same name mean the same; this page lists the others. A flag without effect here is
accepted, and the log says why it has none. `EngineArgs`, `TokensPrompt`, `StructuredOutputsParams` and the other
names of offline scripts are imported from `headrace`. Routes, request fields, metrics (with the prefix `headrace:`) and
`headrace bench serve` have vLLM's names too: see [how to serve](howto-serve.md).

`--tool-call-parser` and `--reasoning-parser` take the names of vLLM 0.33 and mean the same
[formats](howto-tools.md#formats), under one name here where vLLM has several. A name whose format is missing here is
refused, with the nearest that there is. Neither flag is needed: the format is read from the chat template.

Flags may be written as vLLM's parser takes them: with underscores, cut to a beginning that no other has, with values of
an object after a dot (`--speculative-config.method mtp`), as `-O3`, with `--no-` before a switch, and in a YAML file
that `--config` names. `--quantization fp8` and `bitsandbytes` quantise plain weights while loading: to E4M3 with a
scale for each output channel (int8 on a GPU without fp8), and to NF4. The log names the form."""
FROM_LLAMA_SERVER = """`headrace serve FILE.gguf` takes llama-server's flags, where they mean something here. Its routes
(`/completion`, `/props`, `/slots`, `/apply-template`, `/tokenize` ...) and `timings` are served next to OpenAI's: see
[clients](howto-clients.md#llama-server). Where vLLM has a flag of the same name, that meaning counts: `--api-key-file`
is a [file of holders](security.md#keys), `--seed` seeds the seeds of requests without one (`-s` is the seed of all of
them), and the default port is 8000. Variables `LLAMA_ARG_...` are not read.

- Sampling flags are the server's defaults: they take precedence over the model's `generation_config.json`, and the
  request over them. Where none of them sets it, llama-server's routes have its own defaults (temperature 0.8, top-k 40,
  top-p 0.95, min-p 0.05), and OpenAI's have vLLM's (temperature 1, all tokens), as the log says at the start.
- `-c` is the context of one request, not of all together. More than the file's own is cut to it, with a warning.
- `--chat-template` takes llama-server's names of common formats, a Jinja source or a file. A model without a template
  takes `chatml`, with a warning; its answers end at `<|im_end|>`, whether that is a token or not.
- With `--rope-scaling`, `--rope-scale`, `--yarn-...` and `--override-kv`, values of the file are changed as by
  `--hf-overrides`.

`make test-llama-server` runs llama.cpp's own tests of its server (of llama-cpp-python 0.3.36) against headrace.
Of 391 tests, 170 need absent features: pictures, MCP, tools of the server, its router, or models from the network.
Of the other 221, 142 pass, none fails, and 78 differ for reasons that the table
`tests/programs/llama_server/differences.toml` gives; llama.cpp skips one itself."""
FROM_OLLAMA = """Ollama's routes (`/api/chat`, `/api/generate`, `/api/embed`, `/api/tags` ...) are served on the port of
the others: point `OLLAMA_HOST` of the client at headrace. `headrace serve PATH.gguf` serves a model, `headrace chat
PATH.gguf` talks with it. Fields of a request that have no effect give a warning in the reply: see
[clients](howto-clients.md#ollama). The server reads none of Ollama's variables; this table has their replacements."""


def settings_page(source: str, text: str, settings: tuple[Setting, ...]) -> str:
    def becomes(setting: Setting) -> str:
        if setting.ours == "model":
            return "MODEL"
        if setting.ours:
            field, _, place = setting.ours.partition(".")
            name = f"--{field.replace('_', '-')}{'.' + place if place else ''}".removesuffix("+")
            return f"`{name}{' ' + setting.fixed if setting.fixed else ''}`" + (
                f": {setting.why}" if setting.why else ""
            )
        if not setting.has_no_effect:
            return f"refused: {setting.why}"
        return f"{'with ' + ' or '.join(setting.neutral) + ', ' if setting.neutral else ''}no effect: {setting.why}"

    rows = [[", ".join(f"`{name}`" for name in setting.names), becomes(setting)] for setting in settings]
    return "\n".join([FROM_HEAD.format(source=source, text=text), *table(["flag", "here"], rows), ""])


def ollama_page() -> str:
    rows = [[f"`{name}`", text] for name, text in OLLAMA_VARIABLES]
    return "\n".join([FROM_HEAD.format(source="Ollama", text=FROM_OLLAMA), *table(["variable", "here"], rows), ""])


PAGES = {
    "flags.md": flags_page,
    "limits.md": limits_page,
    "from-vllm.md": lambda: settings_page(VLLM, FROM_VLLM, VLLM_SETTINGS),
    "from-llama-server.md": lambda: settings_page(LLAMA_SERVER, FROM_LLAMA_SERVER, LLAMA_SERVER_SETTINGS),
    "from-ollama.md": ollama_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
