"""A conversation in a browser: first screen, documents, messages that do not fit, tools, reasoning, search."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.inspector import browser
from tests.inspector.test_chat import ended, kept, ready, set_knobs

Open = Callable[..., Any]


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def bodies(page: Any) -> list[dict[str, Any]]:
    """The chats that the page requests from now on."""
    chats: list[dict[str, Any]] = []
    page.on(
        "request", lambda request: request.url.endswith("/chat/completions") and chats.append(request.post_data_json)
    )
    return chats


def scripted(page: Any, *answers: list[dict[str, Any]]) -> None:
    """Let the next chats be answered with these deltas in place of a model's."""
    rest = list(answers)

    def reply(route: Any) -> None:
        deltas = rest.pop(0)
        chunks = [{"choices": [{"delta": delta, "token_ids": [5]}]} for delta in deltas]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}], "seed": 7})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", reply)


def test_the_first_screen_names_the_model_and_sends_an_example(open_page: Open) -> None:
    page = open_page("/")
    ready(page)
    page.locator(".welcome", has_text="8.33M parameters").wait_for()
    assert page.locator(".welcome h2").inner_text() == "builtin"
    assert "cannot answer questions" in page.locator(".welcome").inner_text()
    assert page.locator(".examples button").count() == 3
    assert browser.violations(page) == []
    set_knobs(page, max_tokens=4)
    example = page.locator(".examples button").nth(1)
    text = example.inner_text()
    example.click()
    ended(page, 1)
    assert page.locator(".question p").inner_text() == text
    assert page.locator(".welcome").count() == 0


def test_a_message_that_does_not_fit_is_marked_and_left_out(open_page: Open) -> None:
    page = open_page("/")
    ready(page)
    set_knobs(page, max_tokens=4)
    chats = bodies(page)
    send(page, "first")
    ended(page, 1)
    send(page, "word " * 3000)
    page.locator(".question.left-out", has_text="Does not fit into the context of 2,048 tokens").wait_for()
    assert browser.violations(page) == []
    # The browser reports the refusal, and nothing else.
    assert [error for error in page.errors if "400" not in error] == []
    page.errors.clear()
    send(page, "third")
    ended(page, 3)
    assert [each["content"] for each in chats[2]["messages"] if each["role"] == "user"] == ["first", "third"]
    assert [each["role"] for each in chats[2]["messages"]] == ["user", "assistant", "user"]
    page.reload()
    ready(page)
    assert page.locator(".question.left-out").count() == 1
    # The control: a short message is not marked, nor is one that another error refuses.
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "no"}}))
    send(page, "fourth")
    page.get_by_role("alert").get_by_text("no", exact=True).wait_for()
    assert page.locator(".question.left-out").count() == 1
    page.errors.clear()


def test_documents_are_sent_with_the_message_and_stay_text(open_page: Open, tmp_path: Path) -> None:
    page = open_page("/")
    ready(page)
    set_knobs(page, max_tokens=3)
    chats = bodies(page)
    name, text = "<img src=x onerror=alert(1)>.txt", "a ``` fence\n<script>alert(1)</script>"
    files = {name: text.encode(), "bad.bin": b"\xff\xfe\x00", "zero.txt": b"a\0b", "large.txt": b"x" * (2**20 + 1)}
    page.get_by_label("Files").set_input_files(
        [{"name": each, "mimeType": "text/plain", "buffer": content} for each, content in files.items()]
    )
    alert = page.get_by_role("alert")
    alert.filter(has_text="bad.bin is no text in UTF-8; zero.txt is no text in UTF-8; large.txt has 1.0 MiB").wait_for()
    page.locator(".documents", has_text=name).wait_for()
    assert browser.violations(page) == []
    send(page, "What is in it?")
    ended(page, 1)
    assert chats[0]["messages"][-1]["content"] == f"{name}:\n````\n{text}\n````\n\nWhat is in it?"
    page.reload()
    page.locator(".question summary").click()
    assert page.locator(".question .documents pre").text_content() == text
    assert page.locator(".question img, .question script").count() == 0
    # It stays with the message when that is changed.
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Your message").fill("And now?")
    page.keyboard.press("Enter")
    ended(page, 1)
    assert chats[1]["messages"][-1]["content"].endswith("````\n\nAnd now?")
    # One that was added by mistake is taken out.
    page.get_by_label("Files").set_input_files([{"name": "b.txt", "mimeType": "text/plain", "buffer": b"b"}])
    page.get_by_role("button", name="Take b.txt out").click()
    assert page.locator(".composer .documents").count() == 0


def test_tools_are_cards_whose_results_go_back(open_page: Open) -> None:
    page = open_page("/")
    ready(page)
    arguments = '{"city": "<b>Bern</b>"}'
    calls = [
        {"index": 0, "id": "c0", "function": {"name": "weather", "arguments": arguments[:9]}},
        {"index": 0, "function": {"arguments": arguments[9:]}},
        {"index": 1, "id": "c1", "function": {"name": "<img src=x onerror=alert(1)>", "arguments": "not json <i>"}},
    ]
    scripted(page, [{"tool_calls": [call]} for call in calls], [{"content": "It is **warm**."}])
    chats = bodies(page)
    page.get_by_text("Settings", exact=True).click()
    tools = page.get_by_label("Tools, a list in JSON")
    tools.fill("{")
    send(page, "How is it?")
    page.get_by_role("alert").filter(has_text="Tools: ").wait_for()
    assert chats == []
    tools.fill('[{"name": "weather", "parameters": {"type": "object"}}]')
    page.get_by_text("Settings", exact=True).click()
    send(page, "How is it?")
    page.locator(".card code span").first.wait_for()
    assert json.loads(page.locator(".card code").first.text_content() or "") == json.loads(arguments)
    assert page.locator(".card code").nth(1).text_content() == "not json <i>"
    assert page.locator(".card img, .card b, .card i").count() == 0
    assert chats[0]["tools"] == [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]
    assert browser.violations(page) == []
    page.get_by_label("Result of weather").fill("20 °C <u>")
    page.get_by_role("button", name="Give the result").first.click()
    page.locator(".card pre", has_text="20 °C <u>").wait_for()
    assert len(chats) == 1
    page.locator(".card textarea").fill("none")
    page.get_by_role("button", name="Give the result").click()
    page.locator(".answer strong", has_text="warm").wait_for()
    *_, answer, first, second = chats[1]["messages"]
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [arguments, "not json <i>"]
    assert (first, second) == (
        {"role": "tool", "content": "20 °C <u>", "tool_call_id": "c0"},
        {"role": "tool", "content": "none", "tool_call_id": "c1"},
    )
    page.reload()
    assert page.locator(".card").count() == 4


def test_reasoning_is_folded_with_its_time(open_page: Open) -> None:
    page = open_page("/")
    ready(page)
    scripted(page, [{"reasoning_content": "I *think* $x$."}, {"content": "So."}])
    send(page, "Why?")
    ended(page, 1)
    summary = page.locator(".reasoning summary")
    assert summary.inner_text().startswith("Reasoning, ")
    assert page.locator(".reasoning[open]").count() == 0
    summary.click()
    page.locator(".reasoning em", has_text="think").wait_for()
    assert browser.violations(page) == []
    assert [message["times"]["thought"] > 0 for message in kept(page)[0]["messages"][1:]] == [True]


def test_conversations_are_found_by_their_words(open_page: Open, tmp_path: Path) -> None:
    page = open_page("/")
    ready(page)
    scripted(page, *([{"content": word}] for word in ("Ant", "Bear [x](javascript:alert(1))", "Cow")))
    for text in ("one", "two", "three"):
        page.get_by_role("button", name="New", exact=True).click()
        send(page, text)
        ended(page, 1)
    search = page.get_by_role("searchbox", name="Search in conversations")
    search.fill("bear")
    page.locator(".conversations", has_text="1 of 3").wait_for()
    assert page.locator(".conversations li").all_inner_texts() == ["two"]
    search.fill("o")
    assert page.locator(".conversations li").all_inner_texts() == ["three", "two", "one"]
    search.fill("nothing has this")
    page.locator(".conversations", has_text="0 of 3").wait_for()
    assert browser.violations(page) == []


def test_keys_stop_and_edit(open_page: Open) -> None:
    page = open_page("/")
    ready(page)
    set_knobs(page, max_tokens=1500, seed=1, temperature=3, min_p=0, top_k=0, top_p=1)
    send(page, "Tell me a long story.")
    page.locator(".answer .text p").wait_for()
    # From anywhere on the page.
    page.locator("nav a").first.focus()
    page.keyboard.press("Escape")
    assert "stopped" in ended(page, 1).inner_text()
    page.get_by_label("Message", exact=True).fill("x")
    page.keyboard.press("ArrowUp")
    assert page.get_by_label("Your message").count() == 0
    page.get_by_label("Message", exact=True).fill("")
    page.keyboard.press("ArrowUp")
    page.get_by_label("Your message").wait_for()
    page.wait_for_function("() => document.activeElement.value === 'Tell me a long story.'")
    page.keyboard.press("Escape")
    assert page.get_by_label("Your message").count() == 0


def test_the_page_scrolls_to_a_new_message(open_page: Open) -> None:
    page = open_page("/", viewport=browser.PHONE)
    ready(page)
    scripted(page, [{"content": "a\n\n" * 80}], [{"content": "b"}])
    send(page, "one")
    ended(page, 1)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_function("() => scrollY === 0")
    page.get_by_label("Message", exact=True).evaluate("field => { field.value = 'two'; field.form.requestSubmit(); }")
    ended(page, 2)
    page.wait_for_function("() => document.documentElement.scrollHeight - innerHeight - scrollY < 5")


def test_two_settings_are_compared_with_one_seed(open_page: Open) -> None:
    page = open_page("/#compare")
    page.get_by_label("Prompt", exact=True).fill("Tell me a story.")
    page.get_by_label("seed").fill("7")
    for field in page.get_by_label("max tokens").all():
        field.fill("24")
    chats = bodies(page)
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("status").filter(has_text="The answers differ from token").wait_for()
    assert [(each["seed"], each["temperature"]) for each in chats] == [(7, 0.2), (7, 1.2)]
    page.locator("[data-side]", has_text="distinct-2").filter(has_text="perplexity").nth(1).wait_for()
    assert browser.violations(page) == []
    # The control: the same settings give the same tokens.
    for field in page.get_by_label("temperature").all():
        field.fill("0.5")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("status").filter(has_text="The same 24 tokens on both sides.").wait_for()
    left, right = page.locator(".sides .text").all_inner_texts()
    assert left == right
    page.set_viewport_size(browser.PHONE)
    assert not browser.is_wider_than_the_screen(page)
