"""The dialect of each type of model: the section on dialects of docs/compatibility.md.

A row names the formats of calls and the styles of reasoning that the published chat templates of a type show. What
works is found out by speaking and reading answers in each (`measured`). `tests/laws/test_dialects.py` holds the table
to the types, `compatibility` writes the section.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.support.reading import Read, read, tool_parser
from tests.support.speaking import Answer, calls_text, layout_of, says_first, speak

from headrace.grammar.compile import build_matcher, compile_grammar
from headrace.grammar.vocabulary import Vocabulary, make_tokenizer
from headrace.protocol.errors import RequestError
from headrace.serve.call.dialect import Dialect
from headrace.text.reasoning import NO_STYLE, STYLES
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.formats import FORMATS


class Family(NamedTuple):
    """`dialects`: (format of calls, style of reasoning, models). `why`: why there is none. `sources`: by the models of
    a row, the template that shows it, if it is not their own as it stands."""

    dialects: tuple[tuple[str | None, str | None, str], ...] = ()
    why: str = ""
    sources: Mapping[str, str] = MappingProxyType({})


HEAD = """
## Dialects

How the models of each type write calls and reasoning, as is found without a flag; [tools](howto-tools.md#formats) has
the names. "Template" says by what: the published chat template, another's, or "not seen", where none was at hand and
the row rests on what others serve the model with. Where the published template has no place for the `tools` of a
request, they stand in the system message [as text](howto-tools.md#models-without-tools). The other cells say what came
out when an answer was spoken and read.

"""
COLUMNS = (
    "type",
    "models",
    "template",
    "calls",
    "reasoning",
    "one call",
    "reasoning apart",
    "two calls",
    "replay",
    "strict schema",
)
COLUMNS += ("streamed = whole",)
BASE = "base models, whose templates have no calls"
_QWEN3 = Family((("hermes", "qwen3", "Qwen3"), ("qwen3_coder", None, "Qwen3-Coder")))
_QWEN35 = Family((("qwen3_coder", "qwen3", "Qwen3.5, 3.6"),))
_GEMMA = Family(why="the templates of Gemma 1 to 3 have no calls")
_GEMMA4 = Family((("gemma4", "gemma4", "Gemma 4"),))
_MISTRAL = Family((("mistral", None, "Mistral"), ("mistral", "mistral", "Magistral")))
UNSEEN = "not seen"
TEXT = "published; tools as text"
_ERNIE = Family((("hermes", "ernie45", "ERNIE 4.5 Thinking"),), sources={"ERNIE 4.5 Thinking": UNSEEN})
_LFM2 = Family((("lfm2", None, "LFM2"), ("lfm2", "qwen3", "LFM2.5")))
FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        (("hermes", "qwen3", "Trinity Mini"), ("qwen3_coder", "qwen3", "Trinity Large Thinking")),
        sources={"Trinity Mini": UNSEEN, "Trinity Large Thinking": "not seen; vLLM's recipe"},
    ),
    "apertus": Family((("apertus", "apertus", "Apertus"),)),
    "bitnet": Family(why="the template of BitNet b1.58 2B4T has no calls"),
    "cohere2": Family((("command_r7b", "command_r7b", "Command R7B, A"),)),
    "deepseek_v2": Family((("deepseek_v3", None, "DeepSeek V2.5"),)),
    "deepseek_v3": Family(
        (
            ("deepseek_v3", "qwen3", "DeepSeek V3, R1, V3.1"),
            ("deepseek_v32", "qwen3", "DeepSeek V3.2"),
            ("deepseek_v4", "qwen3", "DeepSeek V4"),
        )
    ),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": _ERNIE,
    "exaone4": Family((("hermes", "qwen3", "EXAONE 4.0"),)),
    "falcon_h1": Family(
        (("hermes", None, "Falcon-H1"), ("hermes", "qwen3", "Falcon-H1R")), sources={"Falcon-H1R": UNSEEN}
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm": Family((("hermes", None, "GLM-4-9B"),), sources={"GLM-4-9B": TEXT}),
    "glm4": Family((("glm4", None, "GLM-4-0414"),)),
    "glm4_moe": Family((("glm45", "qwen3", "GLM-4.5 to 5.2, Laguna"),)),
    "glm4_moe_lite": Family((("glm45", "qwen3", "GLM-4.7-Flash"),)),
    "gpt2": Family(why=BASE),
    "gpt_oss": Family((("openai", "openai_gptoss", "gpt-oss"),)),
    "granite": Family((("granite", "granite", "Granite 3"), ("hermes", None, "Granite 4"))),
    "granitemoehybrid": Family((("hermes", None, "Granite 4"),)),
    "hunyuan_v1_dense": Family((("hunyuan_a13b", "hunyuan_a13b", "Hunyuan"),), sources={"Hunyuan": UNSEEN}),
    "hunyuan_v1_moe": Family((("hunyuan_a13b", "hunyuan_a13b", "Hunyuan-A13B"),), sources={"Hunyuan-A13B": "vLLM's"}),
    "hy_v3": Family((("hy_v3", "hy_v3", "Hy 3"),)),
    "kimi_k2": Family((("kimi_k2", None, "Kimi K2"), ("kimi_k2", "qwen3", "Kimi K2 Thinking, K2.5"))),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "llama": Family((("llama3_json", None, "Llama 3.1 to 3.3"), ("hermes", None, "Hermes 2, 3"))),
    "llama4_text": Family(
        (("llama3_json", None, "Llama 4"), ("pythonic", None, "Llama 4, vLLM's template")),
        sources={"Llama 4, vLLM's template": "vLLM's"},
    ),
    "minimax_m2": Family((("minimax_m2", "qwen3", "MiniMax M2"), ("minimax_m3", "minimax_m3", "MiniMax M3"))),
    "ministral3": _MISTRAL,
    "mistral": _MISTRAL,
    "mistral4": _MISTRAL,
    "mixtral": Family((("mistral", None, "Mixtral"),)),
    "muse_glimmer": Family((("muse_glimmer", "muse_glimmer", "Muse Glimmer"),)),
    "nemotron": Family(why=BASE),
    "nemotron_h": Family((("nemotron_json", "qwen3", "Nemotron Nano 2"), ("qwen3_coder", "qwen3", "Nemotron 3"))),
    "olmo2": Family(why="the templates of OLMo 2 have no calls"),
    "olmo3": Family(
        (("hermes", "qwen3", "OLMo 3 Think"), ("olmo3", None, "OLMo 3, vLLM's template")),
        sources={"OLMo 3 Think": TEXT, "OLMo 3, vLLM's template": "vLLM's"},
    ),
    "phi3": Family(
        (("hermes", None, "Phi-4-mini"), ("phi4_mini_json", None, "Phi-4-mini, another's template")),
        sources={"Phi-4-mini": TEXT, "Phi-4-mini, another's template": "vLLM's, SGLang's, llama.cpp's"},
    ),
    "qwen2": Family((("hermes", None, "Qwen2.5"), ("hermes", "qwen3", "QwQ"))),
    "qwen2_5_vl": Family((("hermes", None, "Qwen2.5-VL"),)),
    "qwen2_moe": Family((("hermes", None, "Qwen2-57B-A14B"),)),
    "qwen3": _QWEN3,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_moe": _QWEN3,
    "qwen3_next": Family((("hermes", "qwen3", "Qwen3-Next"),)),
    "qwen3_vl": Family((("hermes", "qwen3", "Qwen3-VL"),)),
    "qwen3_vl_moe": Family((("hermes", "qwen3", "Qwen3-VL"),)),
    "seed_oss": Family((("seed_oss", "seed_oss", "Seed-OSS"),)),
    "smollm3": Family((("hermes", "qwen3", "SmolLM3"),)),
    "starcoder2": Family(why=BASE),
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["place", "count"],
            },
        },
    }
    for name in ("find_place", "look")
]
USE = ToolUse.of(TOOLS, "auto", True)
CALLS = (("find_place", {"place": 'Ys "x" {y}', "count": 7}), ("look", {"place": "10115", "count": -1}))
PROMPT = "<|start|>assistant"
_TOKENS = [bytes([i]) for i in range(256)] + [b"<eos>"]
_TOKENIZER = make_tokenizer(Vocabulary(_TOKENS, [256], [256]))


def expected(answer: Answer) -> Read:
    calls = [(name, json.dumps(values, ensure_ascii=False)) for name, values in answer.calls]
    return answer.content, answer.reasoning, calls


def reads(tools: str | None, style: str | None, answer: Answer, letters: bool = False) -> bool:
    """Whether an answer that is spoken in a dialect is read as it was meant."""
    form, marks = FORMATS[tools or "hermes"], STYLES[style] if style else NO_STYLE
    text = speak(answer, form, marks, PROMPT)
    parser = tool_parser(tools or "hermes", USE.schemas, style=style, prompt=PROMPT)
    return read(parser, list(text) if letters else [text]) == expected(answer)


def again(tools: str, style: str | None, answer: Answer) -> bool:
    """Whether what was read, put back as the model's turn and read again, is the same."""
    form, marks = FORMATS[tools], STYLES[style] if style else NO_STYLE

    def once(text: Answer) -> Read:
        parser = tool_parser(tools, USE.schemas, style=style, prompt=PROMPT)
        return read(parser, [speak(text, form, marks, PROMPT)])

    first = once(answer)
    back = Answer(first[1], first[0], tuple((name, json.loads(arguments)) for name, arguments in first[2]))
    return once(back) == first


def holds(tools: str) -> bool:
    """Whether the grammar of required calls takes a call that follows the schema, and none that does not."""
    use = ToolUse.of(TOOLS, "required", False)
    constraint, enforced = Dialect(tools).constraint(use, PROMPT, None)
    if constraint is None or not enforced:
        return False
    values: dict[str, Any] = {"place": "Ys", "count": 7}
    return follows(constraint, written(tools, values)) and not follows(constraint, written(tools, {"place": "Ys"}))


def written(tools: str, values: dict[str, Any]) -> str:
    form, header = FORMATS[tools], layout_of(FORMATS[tools], "").header
    text = calls_text(form, [("find_place", values)])
    # A grammar has Python's texts in JSON's quotes.
    text = text.replace("'", '"') if layout_of(form, "").body == "python" else text
    return ("find_place".join(header) if header[0] else "") + text


def follows(constraint: Any, text: str) -> bool:
    matcher = build_matcher(_TOKENIZER, compile_grammar(constraint), constraint)
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


@functools.cache
def measured(tools: str | None, style: str | None) -> tuple[str, ...]:
    """Return the cells of a dialect: one call, reasoning, two calls, replay, strict schema, streamed as whole."""
    if tools is None:
        return ("no",) * 6
    thought = "I think." if style else ""
    text = "" if says_first(FORMATS[tools]) else "Let me see."
    one, two = Answer(thought, text, CALLS[:1]), Answer(thought, text, CALLS)
    try:
        strict = holds(tools)
    except RequestError:
        strict = False
    outcomes = (
        reads(tools, style, one),
        reads(tools, style, Answer(thought, "Hello.", ())) if style else None,
        reads(tools, style, two),
        again(tools, style, two),
        strict,
        all(reads(tools, style, answer, letters=True) for answer in (one, two)),
    )
    return tuple("none" if each is None else "yes" if each else "no" for each in outcomes)


def section() -> str:
    """Return the section of the page."""
    text = HEAD + f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|\n"
    for kind, family in FAMILIES.items():
        for tools, style, models in family.dialects:
            names = f"`{tools}` | " + (f"`{style}`" if style else "none")
            seen = family.sources.get(models, "published")
            text += f"| {kind} | {models} | {seen} | {names} | " + " | ".join(measured(tools, style)) + " |\n"
        if family.why:
            text += f"| {kind} | all | none | none: {family.why} |" + " none |" * 7 + "\n"
    return text


if __name__ == "__main__":
    print(section())
