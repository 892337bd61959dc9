"""The Berkeley function-calling cases, driven through the parsers: `python -m tests.programs.bfcl [EVERY]`.

For each case and each format: the prompt is rendered with the case's tools; then the expected calls are written as the
model would (by its own chat template where there is one: what it renders for an assistant's turn with these calls),
parsed, and compared; then parsed again for every split of the text. EVERY n-th case only, if given.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.reading import read, splits, tool_parser

from headrace.text.templates import ChatTemplate
from headrace.text.tools import detection
from headrace.text.tools.choice import ToolUse

FILES = ("simple_python", "multiple", "parallel", "live_simple", "live_parallel")
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "int": "integer", "bool": "boolean"}
TYPES |= {"str": "string", "String": "string", "ArrayList": "array", "HashMap": "object", "long": "integer"}
# Where only one call can be written.
ONE_CALL = "takes one call a turn"


class Case(NamedTuple):
    name: str
    question: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    calls: list[tuple[str, dict[str, Any]]]


def cases(data: Path) -> Iterator[Case]:
    """All cases that have an answer. Of several accepted values the first is taken."""
    for file in FILES:
        folder = data / "prompts" / "bfcl"
        lines = (folder / f"BFCL_v4_{file}.json").read_text(encoding="utf-8").splitlines()
        answers = (folder / "possible_answer" / f"BFCL_v4_{file}.json").read_text(encoding="utf-8").splitlines()
        truths = {answer["id"]: answer["ground_truth"] for answer in map(json.loads, answers)}
        for case in map(json.loads, lines):
            tools = [{"type": "function", "function": schema(function, top=True)} for function in case["function"]]
            calls = [(name, chosen(inputs)) for truth in truths[case["id"]] for name, inputs in truth.items()]
            yield Case(case["id"], case["question"][0], tools, calls)


def schema(inputs: Any, top: bool = False) -> Any:
    """The cases' Python-like types as JSON's."""
    if isinstance(inputs, list):
        return [schema(one) for one in inputs]
    if not isinstance(inputs, dict):
        return inputs
    result = {key: schema(value) for key, value in inputs.items()}
    kind = result.get("type")
    if isinstance(kind, str) and not top:
        result["type"] = TYPES.get(kind, kind)
        if result["type"] == "any":
            del result["type"]
    return result


def chosen(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The first accepted value of each parameter; one that may be left out is."""
    return {name: plain(values[0]) for name, values in inputs.items() if values and "" not in values}


def plain(value: Any) -> Any:
    """Accepted values are lists inside objects, too."""
    if isinstance(value, dict):
        return {key: plain(one[0] if isinstance(one, list) and one else one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


class Model(NamedTuple):
    """A format, what writes it, and the template to render prompts with."""

    name: str
    format: str
    template: ChatTemplate
    write: Callable[[Case], str | None]
    style: str | None = None


def models(data: Path) -> list[Model]:
    """The templates that write calls, and what the formats without one would write."""
    result = []
    sources = {
        "hermes-2-pro": "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
        "llama-3.1": "llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja",
        "mistral-v3": "mistral/v3.jinja",
        "mistral-v7": "mistral/v7.jinja",
        "mistral-v13": "mistral/v13.jinja",
        "mistral-v15": "mistral/v15.jinja",
        "qwen-3.8": "ollama/qwen38_chat_template.jinja",
        "nemotron-3": "ollama/nemotron3nano_chat_template.jinja2",
        "laguna": "ollama/laguna_v8_chat_template.jinja2",
        "deepseek-r1": "llama.cpp/llama-cpp-deepseek-r1.jinja",
    }
    for name, path in sources.items():
        source = (data / "templates" / path).read_text(encoding="utf-8")
        template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        form = detection.detect(template.traits(), [source])
        if form is None:
            raise ValueError(f"no format is found in {path}")
        think = "qwen3" if "</think>" in source else None
        result.append(Model(name, form, template, lambda case, template=template: by_template(template, case), think))
    chatml = result[0].template
    written = {"pythonic": pythonic, "granite": granite, "deepseek_v3": deepseek_v31, "llama3_json": llama_tagged}
    written |= {"functionary_v31": functionary, "firefunction": firefunction, "muse_glimmer": muse_glimmer}
    result += [Model(f"{form}, written", form, chatml, write) for form, write in written.items()]
    result.append(Model("command_r7b, written", "command_r7b", chatml, command_r7b, "command_r7b"))
    return result


def by_template(template: ChatTemplate, case: Case) -> str | None:
    """What the template makes of an assistant's turn with these calls; None where it can not write that many."""
    turn = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"{place:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(case.calls)
        ],
    }
    prompt = template.render(case.question, case.tools)
    whole, changes = template.rendering([*case.question, turn], case.tools, add_generation_prompt=False)
    if any(ONE_CALL in change.why for change in changes):
        return None
    # A turn without reasoning may lack the mark that opens it in the prompt.
    bare = prompt.removesuffix("<think>\n")
    head = prompt if whole.startswith(prompt) else bare
    if not whole.startswith(head):
        raise ValueError(f"the turn does not go on from the prompt: {prompt!r} {whole!r}")
    answer = whole[len(head) :].rstrip("\n")
    for end in ("</s>", "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "</assistant>"):
        answer = answer.removesuffix(end)
    return answer


def pythonic(case: Case) -> str:
    calls = (f"{name}({', '.join(f'{key}={value!r}' for key, value in inputs.items())})" for name, inputs in case.calls)
    return f"[{', '.join(calls)}]"


def granite(case: Case) -> str:
    calls = [{"name": name, "arguments": arguments} for name, arguments in case.calls]
    return "<|tool_call|>" + json.dumps(calls)


def deepseek_v31(case: Case) -> str:
    calls = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(inputs)}<｜tool▁call▁end｜>"
        for name, inputs in case.calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def llama_tagged(case: Case) -> str:
    calls = (json.dumps({"name": name, "parameters": inputs}, ensure_ascii=False) for name, inputs in case.calls)
    return "<|python_tag|>" + "; ".join(calls)


def functionary(case: Case) -> str:
    return "".join(f"<function={name}>{json.dumps(inputs)}</function>" for name, inputs in case.calls)


def firefunction(case: Case) -> str:
    return " functools" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in case.calls])


def command_r7b(case: Case) -> str:
    calls = (
        json.dumps({"tool_call_id": str(place), "tool_name": name, "parameters": inputs}, ensure_ascii=False)
        for place, (name, inputs) in enumerate(case.calls)
    )
    actions = ",\n    ".join(calls)
    return f"<|START_THINKING|><|END_THINKING|><|START_ACTION|>[\n    {actions}\n]<|END_ACTION|>"


def muse_glimmer(case: Case) -> str:
    """Strings bare, and all else as JSON."""
    calls = ""
    for name, inputs in case.calls:
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in inputs.items()}
        parameters = "".join(
            f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items()
        )
        calls += f'<atem:invoke name="{name}">\n{parameters}</atem:invoke>\n'
    return f"<atem:function_calls>\n{calls}</atem:function_calls>"


def check(model: Model, case: Case, counts: Counter[str], every_split: bool = True) -> None:
    """Raises AssertionError where the calls that come out are not those that were written."""
    use = ToolUse.of(case.tools, "auto", True)
    prompt = model.template.render(case.question, use.tools)
    for tool in use.tools:
        if model.template.sources[0].find("tools") >= 0 and tool["function"]["name"] not in prompt:
            raise AssertionError(f"{case.name}: the prompt does not tell of {tool['function']['name']}")
    text = model.write(case)
    if text is None:
        counts["more calls than the template writes"] += 1
        return
    inside = "</think>" in text

    def parsed(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
        parser = tool_parser(model.format, use.schemas, style=model.style, prompt=prompt if inside else "")
        content, _, calls = read(parser, pieces)
        return content, calls

    content, calls = parsed([text])
    result = [(name, json.loads(arguments)) for name, arguments in calls]
    assert result == case.calls, f"{model.name} {case.name}: {text!r} gave {result}"
    assert not content.strip(), f"{model.name} {case.name}: {text!r} left {content!r}"
    counts["texts"] += 1
    counts["calls"] += len(calls)
    for pieces in splits(text) if every_split else ():
        assert parsed(pieces) == (content, calls), f"{model.name} {case.name}: {pieces}"
        counts["splits"] += 1


def main(every: int = 1) -> None:
    """Check all and print the counts."""
    chosen_cases = list(cases(DATA))[::every]
    total: Counter[str] = Counter()
    for model in models(DATA):
        counts: Counter[str] = Counter()
        for case in chosen_cases:
            check(model, case, counts)
        print(f"{model.name:24} {', '.join(f'{count:,} {what}' for what, count in counts.items())}", flush=True)
        total += counts
    print(f"{'together':24} {', '.join(f'{count:,} {what}' for what, count in total.items())}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
