"""The chat in a browser, with the built-in model behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from tests.inspector import browser
from tests.security import rig
from tests.support import picture_model
from tests.support.picture_model import noisy
from tests.support.pictures import png
from tests.support.server import Live, inproc
from tests.support.serving import Served, gauge, serve, wait_for

from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

Open = Callable[..., Any]
LABELS = {"max_tokens": "max tokens", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}


def ready(page: Any) -> None:
    page.get_by_role("button", name="Send", exact=True).and_(page.locator(":enabled")).wait_for()


def ended(page: Any, num: int) -> Any:
    """The last of `num` answers, when it is whole."""
    page.locator(".answer").nth(num - 1).and_(page.locator("[aria-busy=false]")).wait_for()
    return page.locator(".answer").nth(num - 1)


def kept(page: Any) -> list[dict[str, Any]]:
    """The conversations of this browser."""
    script = (
        "Object.entries(localStorage).filter(([name]) => name.startsWith('headrace.conversation.')).map(([, v]) => v)"
    )
    return [json.loads(text) for text in page.evaluate(script)]


def set_knobs(page: Any, **knobs: float) -> None:
    page.get_by_text("Settings", exact=True).click()
    for name, value in knobs.items():
        page.get_by_label(LABELS.get(name, name), exact=True).fill(str(value))
    page.get_by_text("Settings", exact=True).click()


def test_a_whole_chat_by_keyboard(open_page: Open, server: Served) -> None:
    page = open_page("/", reduced_motion="reduce")
    ready(page)
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    while page.evaluate("document.activeElement.textContent.trim()") != "Settings":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    while page.evaluate("document.activeElement.closest('label')?.textContent.trim()") != "max tokens":
        page.keyboard.press("Tab")
    page.keyboard.type("12")
    page.keyboard.press("Tab")
    page.keyboard.type("7")
    while page.evaluate("document.activeElement.placeholder ?? ''")[:7] != "Message":
        page.keyboard.press("Shift+Tab")
    page.keyboard.type("Tell me a story.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("It has a dog.")
    page.keyboard.press("Enter")
    answer = ended(page, 1)
    body = {"messages": [{"role": "user", "content": "Tell me a story.\nIt has a dog."}], "seed": 7, "max_tokens": 12}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=240).json()
    assert " ".join(answer.locator(".text").inner_text().split()) == " ".join(
        reply["choices"][0]["message"]["content"].split()
    )
    assert re.search(r"[\d.]+ tok/s", answer.inner_text())
    assert f"context {reply['usage']['total_tokens']} of 2,048" in answer.inner_text()
    assert "seed 7" in answer.inner_text()
    while page.evaluate("document.activeElement.textContent.trim()") != "Why so slow?":
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    answer.locator("caption", has_text="went").wait_for()
    assert answer.locator(".why th", has_text="decode").is_visible()
    assert page.locator("[role=status]", has_text="The answer is there: 12 tokens.").count() == 1
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.text > :last-child'), '::after').animationName")
        == "none"
    )
    assert browser.violations(page) == []


def test_stop_edit_and_the_same_seed_again(open_page: Open, server: Served) -> None:
    page = open_page("/")
    ready(page)
    page.get_by_label("Message").fill("Tell me a story.")
    page.keyboard.press("Enter")
    page.locator(".answer .text p").wait_for()
    page.keyboard.press("Escape")
    assert "stopped" in ended(page, 1).inner_text()
    wait_for(server.url, "headrace:num_requests_running", 0)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Your message").fill("Tell me about a cat.")
    set_knobs(page, max_tokens=8)
    page.get_by_role("button", name="Send again").click()
    page.locator(".question", has_text="about a cat").wait_for()
    first = ended(page, 1).locator(".text").inner_text()
    assert page.locator(".answer").count() == page.locator(".question").count() == 1
    page.get_by_role("button", name="Same seed again").click()
    page.locator(".stats", has_text="the same 8 tokens as before").wait_for()
    assert page.locator(".answer .text").inner_text() == first
    # The control: other parameters, and the note says so.
    set_knobs(page, max_tokens=5)
    page.get_by_role("button", name="Same seed again").click()
    page.locator(".stats", has_text="differs from token 6 on").wait_for()


def test_a_token_has_alternatives_and_another_one_is_taken(open_page: Open, server: Served) -> None:
    page = open_page("/")
    ready(page)
    set_knobs(page, max_tokens=10, seed=3, temperature=1.5, top_k=2)
    page.get_by_label("Message").fill("Tell me a story.")
    page.keyboard.press("Enter")
    before = ended(page, 1).locator(".text").inner_text()
    page.get_by_role("button", name="Tokens").click()
    page.locator(".tokens [role=group] button").nth(9).wait_for()
    page.locator(".tokens [role=group] button").first.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator(".tokens tbody tr").first.wait_for()
    assert browser.violations(page) == []
    headings = page.locator(".tokens thead th").all_inner_texts()
    assert headings == ["token", "the model", "temperature 1.5", "min-p 0.05", "top-k 2", "top-p 0.95", "go on"]
    cells = [
        [0.0 if each == "–" else float(each.split()[0]) for each in row.locator("td.number").all_inner_texts()]
        for row in page.locator(".tokens tbody tr").all()
    ]
    columns = list(zip(*cells, strict=True))
    assert len(cells) == 10
    assert sum(columns[0]) <= 100.1
    assert columns[1][0] < columns[0][0], "a higher temperature takes from the likeliest"
    assert [share > 0 for share in columns[3]] == [True, True] + [False] * 8
    assert abs(sum(columns[3]) - 100) < 0.11
    # The same token gives the same text: noise belongs to a position.
    page.locator(".tokens tbody tr[aria-current=true] button").click()
    page.locator(".stats", has_text="the same token 5 was taken").wait_for()
    ended(page, 1)
    assert page.locator(".answer .text").inner_text() == before
    page.get_by_role("button", name="Tokens").click()
    page.locator(".tokens [role=group] button").nth(4).click()
    page.locator(".tokens tbody tr:not([aria-current]) button").first.click()
    page.locator(".stats", has_text="another token 5 was taken").wait_for()
    ended(page, 1)
    [conversation] = kept(page)
    assert len(conversation["messages"][1]["ids"]) == 10
    assert page.locator(".answer .text").inner_text() != before


def test_conversations_are_kept_in_the_browser(open_page: Open) -> None:
    page = open_page("/")
    ready(page)
    set_knobs(page, max_tokens=3)
    for text in ("first", "second"):
        page.get_by_role("button", name="New", exact=True).click()
        page.get_by_label("Message").fill(text)
        page.keyboard.press("Enter")
        ended(page, 1)
    page.reload()
    ready(page)
    assert page.locator(".conversations li").all_inner_texts() == ["second", "first"]
    page.once("dialog", lambda dialog: dialog.accept("My <b>story</b>"))
    page.get_by_role("button", name="Rename").click()
    page.locator(".conversations li", has_text="My <b>story</b>").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
    assert exported["title"] == "My <b>story</b>"
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    page.locator(".question", has_text="first").wait_for()
    assert [each["messages"][0]["content"] for each in kept(page)] == ["first"]
    # One whose page was closed while the answer came is shown as stopped; a damaged one is passed over.
    [conversation] = kept(page)
    conversation["messages"][1]["finish"] = None
    script = "(each) => localStorage.setItem(`headrace.conversation.${each.id}`, JSON.stringify(each))"
    page.evaluate(script, conversation)
    page.evaluate("localStorage.setItem('headrace.conversation.x', '{\"messages\": 1}')")
    page.reload()
    page.locator(".question", has_text="first").wait_for()
    assert "stopped" in ended(page, 1).inner_text()


def test_the_engine_is_shown_beside_the_answer(open_page: Open, server: Served) -> None:
    page = open_page("/", color_scheme="dark")
    ready(page)
    # With this seed the answer goes on to its last token.
    set_knobs(page, max_tokens=400, seed=1, temperature=3, min_p=0, top_k=0, top_p=1)
    page.get_by_label("Message").fill("Tell me a long story.")
    page.keyboard.press("Enter")
    page.locator(".engine", has_text=re.compile(r"step [\d,]+: you \+ 0; 1 token")).wait_for()
    page.locator(".engine", has_text=re.compile(r"KV cache: \d+ of 2,048 blocks held, \d+ by you")).wait_for()
    page.get_by_role("button", name="Stop").click()
    ended(page, 1)
    assert browser.violations(page) == []
    wait_for(server.url, "headrace:num_requests_running", 0)
    page.locator(".engine", has_text="KV cache: 0 of 2,048 blocks held").wait_for()
    assert gauge(server.url, "headrace:num_requests_running") == 0


def test_a_phone_has_no_sideways_scrolling(open_page: Open) -> None:
    page = open_page("/", viewport=browser.PHONE)
    ready(page)
    set_knobs(page, max_tokens=6)
    page.get_by_label("Message").fill("wide " * 40 + "w" * 200)
    page.keyboard.press("Enter")
    ended(page, 1)
    page.get_by_role("button", name="Tokens").click()
    page.locator(".tokens [role=group] button").first.click()
    page.locator(".tokens tbody tr").first.wait_for()
    assert not browser.is_wider_than_the_screen(page)
    assert browser.violations(page) == []
    page.evaluate("document.body.append(Object.assign(document.createElement('pre'), {textContent: 'w'.repeat(900)}))")
    page.evaluate("document.body.lastChild.style.overflow = 'visible'")
    assert browser.is_wider_than_the_screen(page)


def test_S_24_a_key_that_infers_has_the_chat_without_the_engine(
    chromium: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = ServerConfig(api_key_file=rig.write_keys(tmp_path), log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live, browser.watched_page(chromium, live.url) as page:
        page.goto("/")
        for key in ("wrong", rig.ALICE):
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use").click()
        ready(page)
        set_knobs(page, max_tokens=5)
        page.get_by_label("Message").fill("x")
        page.keyboard.press("Enter")
        assert "tok/s" in ended(page, 1).inner_text()
        assert page.locator(".engine").count() == page.get_by_label("API key").count() == 0
        assert "may not watch the engine" in page.locator("header").inner_text()
        # The browser reports each refusal, and nothing else.
        assert all("Failed to load resource" in error and re.search("40[13]", error) for error in page.errors)
        page.errors.clear()


def test_the_progress_of_a_prompt_and_the_choice_of_a_model(chromium: Any, tokenizer: Tokenizer) -> None:
    client = inproc(delay=0.05, max_num_batched_tokens=64)
    with (
        Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live,
        browser.watched_page(chromium, live.url) as page,
    ):
        cards = [{"id": name, "object": "model", "max_model_len": 2048} for name in ("fake", "another")]
        page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": cards}))
        page.route("**/api/show", lambda route: route.fulfill(json={"details": {"family": "llama"}}))
        page.goto("/")
        ready(page)
        page.get_by_label("Model").get_by_text("another · not loaded").wait_for(state="attached")
        assert page.get_by_label("Model").locator("option").all_inner_texts() == [
            "fake · loaded",
            "another · not loaded",
        ]
        page.evaluate(
            "window.models = []; const send = window.fetch; window.fetch = (to, request) => {"
            "if (request?.body) models.push(JSON.parse(request.body).model); return send(to, request); }; null"
        )
        set_knobs(page, max_tokens=2)
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Model").select_option("another")
        page.locator(".welcome h2").get_by_text("another", exact=True).wait_for()
        page.get_by_label("System prompt").fill("Be brief.")
        page.evaluate(
            "window.texts = []; new MutationObserver(() => texts.push(document.querySelector('.stats')?.textContent))"
            ".observe(document.body, { subtree: true, childList: true, characterData: true })"
        )
        page.get_by_label("Message").fill("x" * 1200)
        page.keyboard.press("Enter")
        ended(page, 1)
        reading = re.findall(r"reading ([\d,]+) of 1,2\d\d", " ".join(filter(None, page.evaluate("window.texts"))))
        numbers = [int(number.replace(",", "")) for number in reading]
        assert len(set(numbers)) > 1
        assert numbers == sorted(numbers)
        assert "another" in page.evaluate("window.models")
        [conversation] = kept(page)
        assert (conversation["model"], conversation["system"]) == ("another", "Be brief.")
        assert len(conversation["messages"][1]["promptIds"]) > 1200 + len("Be brief.")


def test_a_picture_is_sent_and_stays_in_the_conversation(chromium: Any, tmp_path: Path) -> None:
    picture_model.write(tmp_path / "model")
    (tmp_path / "spots.png").write_bytes(png(noisy(1, 1800, 900)))
    (tmp_path / "note.txt").write_text("A note.")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with serve(str(tmp_path / "model")) as served, browser.watched_page(chromium, served.url) as page:
        page.goto("/")
        ready(page)
        files = [tmp_path / "spots.png", tmp_path / "note.txt", tmp_path / "broken.png"]
        page.locator("input[type=file]").set_input_files(files)
        page.get_by_text("broken.png is no picture").wait_for()
        page.locator(".composer img[alt='spots.png']").wait_for()
        page.get_by_label("Message").fill("What is it?")
        set_knobs(page, max_tokens=4)
        page.get_by_role("button", name="Send", exact=True).click()
        assert ended(page, 1).locator("[role=alert]").count() == 0
        # Made smaller by the page: a browser keeps no large pictures.
        assert page.evaluate("document.querySelector('.question img').naturalWidth") == 1536
        assert browser.violations(page) == []
        assert not browser.is_wider_than_the_screen(page)
        [conversation] = kept(page)
        [picture, note] = conversation["messages"][0]["attachments"]
        assert picture["image"].startswith("data:image/jpeg;base64,")
        assert note["text"] == "A note."
        usage = conversation["messages"][1]["usage"]
        assert usage["prompt_tokens"] > 40  # the rows of seven tiles are 28 of them
        page.reload()
        page.locator(".question img[alt='spots.png']").wait_for()
