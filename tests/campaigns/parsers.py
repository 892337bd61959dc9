"""C-6: everything else that reads what others wrote, under mutations: only clear errors, soon, and in little memory.

A target makes sound inputs and uses a damaged one; it may raise what its callers expect and nothing else. A mutation is
a function of (target, seed, number), so that each can be made again: `damaged(target, seed, number)`. GGUF files have a
campaign of their own, `tests.programs.fuzz_gguf`.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tests.support.server import TEMPLATE, write_tokenizer

from headrace import hub, models
from headrace.checkpoint.mapped import MappedFile, read_config
from headrace.grammar.compile import compile_grammar
from headrace.models.config import ModelConfig
from headrace.protocol import frames
from headrace.protocol.config import EngineConfig
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import CheckpointError, HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Abort, Add, Finish, Request, StepOutput, TokenLogprob
from headrace.serve.apis.anthropic import request as anthropic
from headrace.serve.apis.ollama import request as ollama
from headrace.serve.apis.openai import completions, responses, responses_input
from headrace.serve.call import schema
from headrace.serve.gates.limits import parse_json
from headrace.text import sandbox
from headrace.text.bounded import BoundedProcess
from headrace.text.tokenizer import Tokenizer

MAX_SECONDS = 2.0
MAX_BYTES = 64 * 2**20
WORDS: tuple[bytes, ...] = (
    *b'null true -1 0 1e309 NaN 2147483648 9223372036854775808 18446744073709551616 {} [] "" [[[[[[[['.split(),
    *b'"\\ud800" "\\u0000" {{ }} {% %} (((( | * + {1,99999} $ref # __class__ range(10**9) loop "type" "enum"'.split(),
    *(b"'a'*10**9", b"\xff\xfe", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc1"),
)


class Target(NamedTuple):
    """`corpus` are sound inputs. `use` reads one; of `refusals` it may raise any."""

    corpus: list[bytes]
    use: Callable[[bytes], object]
    refusals: type[Exception] | tuple[type[Exception], ...]


def mutate(corpus: list[bytes], rng: random.Random) -> bytes:
    """One of `corpus` with one to four places changed."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 2, 4, 8, 30))
        match rng.randrange(8):
            case 0:
                data[at : at + 1] = rng.randbytes(1)
            case 1:
                data[at:at] = rng.choice(WORDS)
            case 2:
                data[at : at + size] = rng.choice(WORDS)
            case 3:
                del data[at : at + size]
            case 4:
                data[at:at] = data[at : at + size] * rng.choice((1, 2, 50))
            case 5:
                other = rng.choice(corpus)
                begin = rng.randrange(len(other) + 1)
                data[at : at + size] = other[begin : begin + size]
            case 6:
                if data:
                    data[at % len(data)] ^= 1 << rng.randrange(8)
            case _:
                if rng.random() < 0.2:
                    del data[at:]
    return bytes(data)


def as_json(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def bodies() -> Target:
    """Requests' bodies, as far as the call and its parameters of sampling."""
    common = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "stop": ["a", "b"], "logit_bias": {"5": -1.5}, "n": 2}
    message = {"role": "user", "content": [{"type": "text", "text": "hé"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    result = [
        common | {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "seed": 3},
        common | {"prompt": [1, 2], "min_p": 0.1, "repetition_penalty": 1.2, "guided_regex": "a+", "cache_salt": "s"},
        common | {"messages": [message], "tools": [tool], "tool_choice": "auto", "response_format": form},
        {"model": "m", "max_tokens": 3, "messages": [message], "system": "s", "thinking": {"type": "disabled"}},
        {"model": "m", "prompt": "x", "options": {"num_predict": 4, "mirostat": 2}, "format": "json"},
        {"input": [message], "max_output_tokens": 4, "text": {"format": {"type": "text"}}},
    ]
    sampled = (schema.CompletionRequest, schema.ChatCompletionRequest)
    others = [
        kind
        for module in (anthropic, ollama, responses, schema)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, schema.Body) and kind not in (*sampled, schema.Body)
    ]

    def use(data: bytes) -> None:
        body = parse_json(data)
        refusals: list[HeadraceError] = []
        for kind in (*sampled, *others):
            try:
                request = schema.parse(kind, body)
                if isinstance(request, schema.CompletionRequest):
                    completions.text_call(request).sampling.params()
                elif isinstance(request, schema.ChatCompletionRequest):
                    completions.chat_call(request).sampling.params()
                elif isinstance(request, anthropic.CountTokensRequest):
                    anthropic.chat_call(request).sampling.params()
                elif isinstance(request, responses_input.ResponsesRequest):
                    responses_input.chat_call(*responses_input.read(body))[0].sampling.params()
            except HeadraceError as error:
                refusals.append(error)
        if len(refusals) == len(sampled) + len(others):
            raise refusals[0]

    return Target(as_json(*result), use, HeadraceError)


def wire_frames() -> Target:
    """What the two processes tell each other, both ways."""
    params = SamplingParams(seed=1, logit_bias={3: 0.5}, stop=["a"], structured_outputs=StructuredOutputs(regex="a+"))
    output = StepOutput(
        step_id=7,
        request_ids=["a"],
        token_ids=[[5]],
        logprobs={"a": [TokenLogprob(5, -0.1, 1, ((5, -0.1),))]},
        finished={"a": Finish("stop", 5)},
    )
    messages: list[Any] = [
        Add(Request(request_id="a", prompt_token_ids=[1, 2], params=params)),
        frames.Start(EngineConfig(model="m")),
        Abort("a"),
        frames.Output(output),
        frames.Failed("ValueError", "no"),
        frames.Rejected("a", "prompt", "[]", "longer", "code"),
    ]

    def use(data: bytes) -> None:
        for payload in buffered(data):
            refusals = []
            for decode in (frames.decode_to_engine, frames.decode_from_engine):
                try:
                    decode(payload)
                except frames.TransportError as error:
                    refusals.append(error)
            if len(refusals) == 2:
                raise refusals[0]

    def buffered(data: bytes) -> list[bytes]:
        """The frames in it; or all of it, if no frame is whole."""
        try:
            return frames.FrameBuffer().feed(data) or [data]
        except frames.TransportError:
            return [data]

    result = [frames.encode(message) for message in messages]
    return Target([*result, *(frame[4:] for frame in result)], use, frames.TransportError)


def safetensors(folder: Path) -> Target:
    """Files of weights: their headers, and each tensor that they then name."""

    def file(header: dict[str, Any], size: int) -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + bytes(size)

    tensors = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    tensors |= {"b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}
    result = [file(tensors, 32), file({"__metadata__": {"format": "pt"}} | tensors, 32)]
    result.append(file({"x": {"dtype": "I8", "shape": [], "data_offsets": [0, 1]}}, 1))
    path = folder / "model.safetensors"

    def use(data: bytes) -> None:
        path.write_bytes(data)
        mapped = MappedFile(path)
        for name in mapped.entries:
            mapped.array(name).tobytes()

    return Target(result, use, CheckpointError)


def configs(folder: Path) -> Target:
    """config.json: what every model reads of it."""
    result = [dict(models.find(name).TINY) for name in models.names()]
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "eos_token_id": [1, 2]}
    result.append(dict(models.find("llama").TINY) | scaled)
    path = folder / "config.json"

    def use(data: bytes) -> None:
        path.write_bytes(data)
        hub.eos_token_ids(folder)
        values = read_config(folder, models.names())
        config = ModelConfig(values)
        config.max_positions()
        config.rope.number("rope_theta", 10000.0)
        config.integer("vocab_size")

    return Target(as_json(*result), use, CheckpointError)


def tokenizers(folder: Path) -> Target:
    """tokenizer.json with tokenizer_config.json behind it, and a text there and back."""
    write_tokenizer(folder)
    result = json.loads((folder / "tokenizer.json").read_text())
    result["model"]["vocab"] = dict(list(result["model"]["vocab"].items())[:100])
    result["added_tokens"][0]["id"] = 100
    wordy = result | {"model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}
    beside = json.loads((folder / "tokenizer_config.json").read_text())

    def use(data: bytes) -> None:
        file, _, config = data.partition(b"\x00|\x00")
        (folder / "tokenizer.json").write_bytes(file)
        (folder / "tokenizer_config.json").write_bytes(config)
        tokenizer = Tokenizer.load(folder)
        tokenizer.decode(tokenizer.encode("a bé"))

    # A file may be sound, and lack the tokens of a text.
    refusals = (CheckpointError, RequestError)
    return Target([b"\x00|\x00".join(as_json(each, beside)) for each in (result, wordy)], use, refusals)


def constraints() -> Target:
    """Schemas, regexes and grammars, as far as the text of a grammar."""
    person = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", 1]}}}
    person |= {"required": ["a"], "additionalProperties": False}
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 3}}}
    mixed = {"allOf": [{"type": "string", "pattern": "^a+$"}, {"maxLength": 9}], "anyOf": [{"const": "a"}, True]}
    tag = {"structures": [{"begin": "<f>", "schema": person, "end": "</f>"}], "triggers": ["<f"]}
    result = [
        {"json": person},
        {"json": tree},
        {"json": mixed},
        {"regex": "(a|b)+[0-9]{2,5}\\w?"},
        {"choice": ["a", "b"]},
    ]
    result += [{"grammar": 'root ::= "a" root | [0-9]+'}, {"grammar": 'start: "a" | B\nB: /b+/'}]
    result.append({"structural_tag": json.dumps(tag)})

    def use(data: bytes) -> None:
        try:
            value = msgspec.convert(parse_json(data), StructuredOutputs)
        except msgspec.ValidationError as error:
            raise RequestError("structured_outputs", "", str(error)) from error
        compile_grammar(value)

    return Target(as_json(*result), use, RequestError)


def templates(runner: BoundedProcess) -> Target:
    """Chat templates, and their arguments, in the process that renders."""
    loop = (
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'x' %}"
        "{% set ns.n = ns.n + 1 %}{{ m.content | trim }}{% endfor %}"
    )
    macro = "{% macro f(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{{ f(messages[0]) }}{{ raise_exception('no') }}"
    messages = [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1]}}}]}]

    def use(data: bytes) -> None:
        job = sandbox.RenderJob(data.decode("utf-8", "replace"), {"messages": messages})
        result = runner.run(job, sandbox.RenderResult)
        if isinstance(result, str) or result.error is not None:
            raise RequestError("messages", "", result if isinstance(result, str) else str(result.error))

    return Target([TEMPLATE.encode(), loop.encode(), macro.encode()], use, RequestError)


def damaged(corpus: list[bytes], name: str, seed: int, number: int) -> bytes:
    return mutate(corpus, random.Random(f"{name}/{seed}/{number}"))


def attack(target: Target, name: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """What became of `count` mutations, and those that went wrong."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for number, data in enumerate((*target.corpus, *(damaged(target.corpus, name, seed, i) for i in range(count)))):
        begin = time.process_time()
        try:
            target.use(data)
            outcome = "read"
        except target.refusals:
            outcome = "refused"
        except Exception as error:
            outcome = type(error).__name__
        if time.process_time() - begin > MAX_SECONDS:
            outcome = "slow"
        if number < len(target.corpus):
            # A corpus that is refused damages nothing.
            outcome = "sound" if outcome == "read" or name == "templates" else f"a sound input is {outcome}"
        outcomes[outcome] += 1
        if outcome not in ("read", "refused", "sound"):
            wrong.append(f"{name} {seed}/{number - len(target.corpus)}: {outcome}: {data[:200]!r}")
    return outcomes, wrong


def targets(folder: Path, runner: BoundedProcess) -> dict[str, Callable[[], Target]]:
    def place(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    return {
        "bodies": bodies,
        "frames": wire_frames,
        "safetensors": lambda: safetensors(place("safetensors")),
        "configs": lambda: configs(place("configs")),
        "tokenizers": lambda: tokenizers(place("tokenizers")),
        "constraints": constraints,
        "templates": lambda: templates(runner),
    }


def run_campaign(counts: dict[str, int], seed: int) -> dict[str, Any]:
    """Every target, so many mutations of each."""
    runner = BoundedProcess(sandbox.__name__, sandbox.MAX_CPU_SECONDS)
    report: dict[str, Any] = {"mutations": sum(counts.values()), "parsers": {}}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        result = targets(Path(folder), runner)
        before = peak_bytes()
        for name, count in counts.items():
            outcomes, more = attack(result[name](), name, count, seed)
            report["parsers"][name] = dict(sorted(outcomes.items()))
            wrong += more
        grown = peak_bytes() - before
    runner.close()
    if grown > MAX_BYTES:
        wrong.append(f"memory grew by {grown} bytes")
    return report | {"memory_growth_bytes": grown, "violations": len(wrong), "examples": wrong[:5]}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
