"""Hostile files for the campaign C-18: sound models and stored entries, and mutations of them that know their form.

A mutation is a function of (seed, number): any can be made again. Called by `hostile_files`.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.programs import fuzz_gguf
from tests.support.checkpoints import CONFIG, llama_tensors, write_llama
from tests.support.server import write_tokenizer

from headrace.engine.build import build_engine
from headrace.protocol.config import EngineConfig

VOCAB = 256
NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, 5e-324)
WORDS = ("", "\x00", "a" * 100_000, "../../etc/passwd", "/etc/passwd", "\ud800", "é" * 300, "NaN", "{{ x }}", "<eos>")
LONG_DIGITS = "9" * 4_299
DEEP = 5_000
PLACES = ("NaN", "Infinity", "-Infinity", "1e999", LONG_DIGITS, "-" + LONG_DIGITS, "[" * DEEP + "]" * DEEP,
          '{"a":' * DEEP + "1" + "}" * DEEP)  # fmt: skip
"""Values as JSON's text has them, and Python's objects do not."""
REGEXES = ("(a+)+$", "(a|a)*b", "(.*a){25}", "((((((a{1,99}){1,99}){1,99})))", "(?=(a*)*)b", "[", "\\p{L}+(?!x)")
TEMPLATES = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{{ messages[99].content }}",
    "{% if",
    "{{ 2 ** (10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "(" * 20_000,
    "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "",
)
GROWING = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 5_000},
    {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"} for _ in range(8)]},
    {"type": "Prepend", "prepend": "a" * 1_000_000},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    {"type": "Precompiled", "precompiled_charsmap": "A" * 1000},
)  # fmt: skip
SPLITS = tuple(
    {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in REGEXES
)


MAX_GROWN = 2**26
"""Bytes of a list that a mutation makes."""
GROWTH = 2**28
"""Bytes by which one case may raise a worker's peak of resident memory, and a live process its own."""
NAME = "hostile"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "aaaa x"}], "max_tokens": 2, "seed": 1}
MAX_REFUSAL = 2_000
"""Letters of a refusal, which may quote a short value."""
PYTHON = re.compile(r"Traceback|File \"|\b[A-Z]\w*(Error|Exception)\b|<class |object at 0x|internal error")
"""What no client should read."""


class Case(NamedTuple):
    """A mutated folder: its `kind`, the file that was changed in it, and how."""

    kind: str
    file: str
    how: str


# -- the judgement of replies -------------------------------------------------------------------------------------


def fault_of(case: Case, status: int, text: str) -> str:
    """What is wrong with a reply, or nothing."""
    if status < 400:
        return "" if is_json(text) else f"{status} with a body that is no JSON: {text[:200]}"
    if len(text) > MAX_REFUSAL:
        return f"{status} with {len(text):,} letters: {text[:200]}"
    # A template's own error is quoted as it is.
    text = text.partition("; it says: ")[0]
    if (match := PYTHON.search(text)) is not None:
        return f"{status} with {match[0]!r}: {text[:300]}"
    # A tensor's name is a field of a header or an index.
    stem = Path(case.file).name.split(".")[0]
    if not any(word in text for word in (Path(case.file).name, stem, "template", "tokenizer", ".weight", ": ")):
        return f"{status} names neither file nor field: {text[:300]}"
    return ""


def is_json(text: str) -> bool:
    try:
        json.loads(text)
        return True
    except ValueError:
        return False


# -- mutations ---------------------------------------------------------------------------------------------------


def json_text(value: Any, rng: random.Random) -> tuple[bytes, str]:
    """`value` with some places changed, as JSON, and the name of the change."""
    value = json.loads(json.dumps(value))
    hows = []
    place = None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        nodes = _nodes(value)
        if not nodes:
            break
        holder, key = rng.choice(nodes)
        how = rng.choice(("number", "text", "word", "kind", "drop", "swap", "place", "grow", "twice", "new"))
        match how:
            case "number":
                holder[key] = rng.choice(NUMBERS)
            case "word":
                holder[key] = rng.choice(WORDS)
            case "text":
                holder[key] = json.dumps(holder[key])
            case "kind":
                holder[key] = rng.choice((None, True, [], {}, [[]], {"a": {}}, "x", 0))
            case "drop":
                del holder[key]
            case "swap":
                other, name = rng.choice(nodes)
                try:
                    holder[key], other[name] = other[name], holder[key]
                except (KeyError, IndexError, ValueError):
                    continue
            case "place":
                place = f"@@{rng.randrange(10**9)}@@"
                holder[key] = place
            case "grow":
                num = rng.choice((2, 100, 20_000))
                try:
                    part = json.dumps(holder[key])
                except (ValueError, RecursionError):
                    return b"[]", "recursive"
                # Copies: a later change is one of a single place.
                holder[key] = [json.loads(part) for _ in range(max(2, min(num, MAX_GROWN // len(part))))]
            case "twice" if isinstance(holder, dict):
                holder[f"{key}\x00twice"] = rng.choice(NUMBERS)
            case "new" if isinstance(holder, dict):
                holder[rng.choice(("__class__", "auto_map", "type", "quantization_config", "rope_scaling"))] = {"a": 1}
        hows.append(how)
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    except ValueError:
        return b"[]", "recursive"
    text = text.replace("\\u0000twice", "")
    if place is not None:
        text = text.replace(f'"{place}"', rng.choice(PLACES))
    return text.encode("utf-8", "surrogatepass"), "+".join(hows)


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """The places of a tree: (holder, key). Of long lists the first and last."""
    result, queue = [], [value]
    while queue:
        each = queue.pop()
        keys: list[Any] = (
            list(each) if isinstance(each, dict) else list(range(len(each))) if isinstance(each, list) else []
        )
        for key in keys if len(keys) < 40 else [*keys[:8], *keys[-8:]]:
            result.append((each, key))
            queue.append(each[key])
    return result


def raw(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Bytes cut, flipped, doubled or put in."""
    text = bytearray(data)
    how = rng.choice(("cut", "flip", "flips", "double", "insert", "empty", "zeros"))
    at = rng.randrange(len(text) + 1)
    match how:
        case "cut":
            del text[at:]
        case "flip" if text:
            text[at % len(text)] ^= 1 << rng.randrange(8)
        case "flips" if text:
            for _ in range(20):
                text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        case "double":
            text[at:at] = text[: rng.randrange(1000)]
        case "insert":
            text[at:at] = rng.randbytes(rng.randrange(1, 30))
        case "empty":
            text.clear()
        case "zeros":
            text[at : at + 64] = bytes(len(text[at : at + 64]))
    return bytes(text), how


def mutate_json(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    changed, how = json_text(json.loads(data), rng) if rng.random() < 0.85 else raw(data, rng)
    path.write_bytes(changed)
    return how


def mutate_tokenizer(path: Path, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return mutate_json(path, rng)
    value = json.loads(path.read_bytes())
    how = rng.choice(("normalizer", "split", "vocab", "merges", "added"))
    match how:
        case "normalizer":
            value["normalizer"] = rng.choice(GROWING)
        case "split":
            value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [rng.choice(SPLITS), value["pre_tokenizer"]]}
        case "vocab":
            number = rng.choice((-1, 2**31, 2**32 - 1, 2**40, 10**30))
            value["model"]["vocab"][rng.choice(list(value["model"]["vocab"]))] = number
        case "merges":
            value["model"]["merges"] = [["a", "b"]] * rng.choice((1, 100_000)) + [["ab"], [1, 2], "x"][
                : rng.randrange(4)
            ]
        case "added":
            value["added_tokens"][0] |= {"id": rng.choice((-1, 2**31, 2**40)), "content": rng.choice(WORDS)}
    path.write_bytes(json.dumps(value).encode("utf-8", "surrogatepass"))
    return how


def mutate_header(path: Path, rng: random.Random) -> str:
    """Of a safetensors file: the length of the header, or its values."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.2:
        length = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1, len(data)))
        path.write_bytes(struct.pack("<Q", length) + header + rest)
        return "length"
    if rng.random() < 0.2:
        changed, how = raw(data, rng)
        path.write_bytes(changed)
        return how
    changed, how = json_text(json.loads(header), rng)
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + rest[: rng.choice((len(rest), len(rest), 0, 7))])
    return how


def mutate_template(path: Path, rng: random.Random) -> str:
    value = json.loads(path.read_bytes())
    template = rng.choice(TEMPLATES)
    if rng.random() < 0.3:
        template = value["chat_template"] + template
    value["chat_template"] = (
        template if rng.random() < 0.9 else rng.choice(([template], {"a": template}, 5, [{"name": 1}]))
    )
    path.write_text(json.dumps(value))
    return "template"


def mutate_bytes(path: Path, rng: random.Random) -> str:
    changed, how = raw(path.read_bytes(), rng)
    path.write_bytes(changed)
    return how


def mutate_place(path: Path, rng: random.Random) -> str:
    """Something else in a file's place, or a file beside it whose name is odd."""
    how = rng.choice(("pipe", "folder", "circle", "device", "nowhere", "name", "twin"))
    if how in ("name", "twin"):
        name = rng.choice((b"\xff", b"\xed\xa0\x80", b"a\nb", b"\x1b[31m", b"%s{0}", b"x" * 200))
        odd = Path(os.fsdecode(os.fsencode(path.parent) + b"/" + name + os.fsencode(path.suffix)))
        odd.write_bytes(path.read_bytes() if how == "name" else path.read_bytes()[:9])
        return how
    path.unlink()
    match how:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to({"circle": path.name, "device": "/dev/zero", "nowhere": "absent"}[how])
    return how


PLACED = ("config.json", "tokenizer.json", "model.safetensors", "headrace.json", "generation_config.json")
Mutator = Callable[[Path, random.Random], str]
KINDS: dict[str, tuple[str, tuple[tuple[str, Mutator], ...]]] = {
    "tokenizer": ("plain", (("tokenizer.json", mutate_tokenizer),)),
    "config": ("plain", (("config.json", mutate_json), ("generation_config.json", mutate_json))),
    "header": ("plain", (("model.safetensors", mutate_header),)),
    "index": ("sharded", (("model.safetensors.index.json", mutate_json), ("model-00000.safetensors", mutate_header))),
    "template": ("plain", (("tokenizer_config.json", mutate_template), ("tokenizer_config.json", mutate_json))),
    "settings": ("plain", (("headrace.json", mutate_json),)),
    "gguf": ("gguf", (("model.gguf", mutate_bytes),)),
    "packed": ("packed", (("*.packed", mutate_bytes), ("*.packed.measured", mutate_json))),
    "place": ("plain", tuple((name, mutate_place) for name in PLACED)),
    "drafter": ("drafter", (("drafter/config.json", mutate_json), ("drafter/model.safetensors", mutate_header))),
    "stored": ("stored", (("*/*.json", mutate_json), ("*/*.bin", mutate_bytes))),
}
"""For each kind the sound folder that is changed, and the files with their mutators."""


def mutate(base: Path, target: Path, kind: str, seed: int, number: int) -> Case:
    """Copy the sound folder of a kind to `target`, and change one of its files."""
    rng = random.Random(f"{kind}/{seed}/{number}")
    name, files = KINDS[kind]
    shutil.copytree(base / name, target)
    if kind == "gguf":
        (target / "model.gguf").write_bytes(fuzz_gguf.damaged(fuzz_gguf.seeds(), seed, number))
        return Case(kind, "model.gguf", "gguf")
    pattern, mutator = rng.choice(files)
    path = rng.choice(sorted(target.glob(pattern)))
    return Case(kind, str(path.relative_to(target)), mutator(path, rng))


# -- sound folders -----------------------------------------------------------------------------------------------


def engine_config(path: Path, kind: str = "") -> EngineConfig:
    """The settings under which the engine of a folder's model is made."""
    more: dict[str, Any] = {}
    if kind == "packed":
        more["quantization"] = "int8"
    if kind == "drafter":
        more["speculative_config"] = {
            "method": "draft_model",
            "model": str(path / "drafter"),
            "num_speculative_tokens": 2,
        }
    return EngineConfig(
        model=str(path / "model.gguf" if kind == "gguf" else path), device="cpu", num_threads=1,
        kv_cache_memory_bytes=2**20, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, **more,
    )  # fmt: skip


def plain(folder: Path, num_shards: int = 0) -> Path:
    """A tiny model that an engine runs: 256 tokens, the bytes."""
    write_llama(folder, llama_tensors(CONFIG | {"vocab_size": VOCAB}), num_shards, vocab_size=VOCAB)
    write_tokenizer(folder, VOCAB)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20, "eos_token_id": [255]}))
    settings = {"system": "Be brief.", "sampling": {"temperature": 0.5}}
    (folder / "headrace.json").write_text(json.dumps(settings))
    return folder


def sound(base: Path) -> None:
    """Write the sound folders, all but that of stored entries, which a server writes."""
    plain(base / "plain")
    plain(base / "sharded", num_shards=2)
    plain(base / "drafter")
    plain(base / "drafter" / "drafter")
    plain(base / "packed")
    config = engine_config(base / "packed", "packed")
    build_engine(
        EngineConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | {"save_packed": True})
    ).close()
    (base / "gguf").mkdir()
    (base / "gguf" / "model.gguf").write_bytes(fuzz_gguf.seeds()[0])
