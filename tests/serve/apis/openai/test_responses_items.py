"""/v1/responses: items of all kinds become the messages of a chat."""

from __future__ import annotations

from headrace.serve.apis.openai.responses_input import NamedItem, messages_of
from headrace.serve.call.call import ChatCall
from headrace.text.pictures.marks import Pictures
from headrace.text.traits import Traits


def test_items_become_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"at": "Ulm"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Rain."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    named = [NamedItem(f"input[{index}]", item) for index, item in enumerate(items)]
    warnings = ChatCall(messages=[]).warnings
    messages = [
        message.template_form(Traits(takes_null=True)) for message in messages_of("Go.", named, warnings, Pictures())
    ]
    assert messages[:2] == [{"role": "system", "content": "Go.\n\nBe brief."}, {"role": "user", "content": "Weather?"}]
    assert messages[2]["reasoning_content"] == "Ask."
    assert [call["function"]["name"] for call in messages[2]["tool_calls"]] == ["weather", "time"]
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"}
    assert (messages[4]["content"], warnings) == ("noon", [])
    assert messages[5:] == [{"role": "assistant", "content": "Rain."}, {"role": "assistant", "content": "No."}]
