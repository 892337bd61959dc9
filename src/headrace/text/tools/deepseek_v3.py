"""DeepSeek's marks around calls: name and arguments in a fenced block (V3, R1), or bare on both sides of the
separator (V3.1)."""

from __future__ import annotations

from headrace.text.tools.form import Part, Wanted, json_of, sequence
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import IllFormed, Reading

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

openers = (CALLS, CALL)
starts = ()
other_marks = (CALLS_END, CALL_END, SEPARATOR)


def read(call: ToolParser) -> Reading[None]:
    text = call.text
    yield from text.take(CALLS)
    first = True
    while True:
        yield from text.space()
        if not first and ((yield from text.take(CALLS_END)) or not (yield from text.peek())):
            return
        yield from text.expect(CALL)
        name = yield from text.until(SEPARATOR)
        fenced = (yield from text.peek()) != "{"
        if fenced:
            if name.strip() != "function":
                raise IllFormed
            name = yield from text.until("\n")
            yield from text.expect("```json")
            yield from text.space()
        call.name(name.strip())
        yield from call.arguments()
        yield from text.space()
        if fenced:
            yield from text.expect("```")
            yield from text.space()
        yield from text.expect(CALL_END)
        call.done()
        first = False


def form(wanted: Wanted) -> Part:
    fenced = "```json" in wanted.template
    calls = []
    for name, schema in wanted.schemas.items():
        begin = f"function{SEPARATOR}{name}\n```json\n" if fenced else f"{name}{SEPARATOR}"
        end = f"\n```{CALL_END}" if fenced else CALL_END
        calls.append(sequence(wanted.text(CALL + begin), json_of(schema), wanted.text(end)))
    return sequence(wanted.text(CALLS), wanted.several(calls, "\n" if fenced else ""), wanted.text(CALLS_END))
