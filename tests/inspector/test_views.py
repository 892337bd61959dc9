"""The views of /inspect: their numbers are the server's, and the page's stores and sums those of the Python side."""

from __future__ import annotations

import json
import math
import re
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.inspector import browser
from tests.support.journal import notes_of_life, recorded
from tests.support.server import HTTP
from tests.support.serving import serve

from headrace.core.journal import Step
from headrace.insight.live import BlockMap, as_dict

OpenPage = Callable[..., Any]
PROMPT = "Once upon a time there was a little girl who lived near the forest with her mother."
MODULE = "async (given) => { const {%s} = await import('/inspector/%s.js'); %s }"


def steps_of(folder: Path, seed: int) -> list[Step]:
    """The watched steps of an engine without a model, through evictions, preemptions and guesses."""
    core = recorded(folder / f"{seed}.log", seed=seed)
    assert core.journal is not None
    core.journal.watch(True)
    steps = [note.step for note in notes_of_life(core, seed)]
    core.close()
    return steps


def plain(step: Step) -> dict[str, Any]:
    """A step as the server sends it."""
    fields: dict[str, Any] = json.loads(msgspec.json.encode(as_dict(step)))
    return fields


def fact(page: Any, name: str) -> int:
    """A number of the page, by its name."""
    text = page.locator(f"[data-fact='{name}']").first.inner_text()
    return int(re.sub(r"[^0-9]", "", text))


def metric(server: Any, name: str) -> int:
    match = re.search(rf"^headrace:{name}{{[^}}]*}} (\S+)$", HTTP.get(f"{server.url}/metrics").text, re.M)
    assert match is not None, name
    return int(float(match[1]))


TWIN = """
  const blocks = new BlockMap();
  return given.map((events) => {
    blocks.apply(events);
    const tables = [...blocks.tables].map(([user, table]) => [user, [...table]]).sort((a, b) => a[0] - b[0]);
    const holders = [...blocks.holders].map(([block, users]) => [block, [...users].sort((a, b) => a - b)]);
    return [tables, [...blocks.cached].sort((a, b) => a - b), holders.sort((a, b) => a[0] - b[0])];
  });
"""


def test_the_page_follows_the_blocks_as_python_does(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page("/inspect#numbers")
    follow = MODULE % ("BlockMap", "live", TWIN)
    for seed in range(3):
        streams = [plain(step)["blocks"] for step in steps_of(tmp_path, seed)]
        twin, states = BlockMap(), []
        for events in streams:
            twin.apply(events)
            tables = [[user, [list(pair) for pair in table.items()]] for user, table in sorted(twin.tables.items())]
            holders = [[block, sorted(users)] for block, users in sorted(twin.holders.items())]
            states.append([tables, sorted(twin.cached), holders])
        assert page.evaluate(follow, streams) == states
        assert page.evaluate(follow, [twin.snapshot(0)["blocks"]]) == states[-1:]
        # Control: without the events that drop blocks, the states differ.
        lost = [[event for event in events if event[0] != 1] for events in streams]
        assert page.evaluate(follow, lost) != states


def test_the_bits_of_floats_and_the_sums_of_batches(open_page: OpenPage) -> None:
    page = open_page("/inspect#numbers")
    values = [0.0, 1.0, -2.5, 0.1, 65504.0, 6e-8, -1e-5, 3.140625, 2049.0]
    script = "return given.map((number) => [codeOf(number, FLOATS.float16), codeOf(number, FLOATS.bfloat16)]);"
    codes = page.evaluate(MODULE % ("codeOf, FLOATS", "views/floats", script), values)
    assert [half for half, _ in codes] == [struct.unpack("<H", struct.pack("<e", value))[0] for value in values]
    for value, (_, brain) in zip(values, codes, strict=True):
        [near] = struct.unpack("<f", struct.pack("<I", brain << 16))
        assert math.isclose(value, near, rel_tol=2**-8)
    script = """
      const all = Array.from({length: 256}, (_, code) => floatOf(code, FLOATS["float8 E4M3"]));
      return [Math.max(...all.filter((each) => each < Infinity)), all.filter(Number.isNaN).length, all[1], all[0x38]];
    """
    assert page.evaluate(MODULE % ("floatOf, FLOATS", "views/floats", script), []) == [448, 2, 2**-9, 1]
    # Four requests of 4, 1, 1 and 1 steps, all there from the beginning, in batches of two: 4 + 1 steps.
    script = """
      const runs = given.map((end, seqId) => ({seqId, arrived: 0, begin: 0, end, reads: 0}));
      const {num, rows, places} = batched({runs, places: 2});
      return [num, rows, utilisation({num, rows, places})];
    """
    assert page.evaluate(MODULE % ("batched, utilisation", "views/schedule", script), [4, 1, 1, 1]) == [5, 7, 0.7]
    assert page.evaluate(MODULE % ("batched, utilisation", "views/schedule", script), [4, 1, 4, 1]) == [8, 10, 0.625]
    # A request of 3 tokens of a prompt and 4 steps after: 3 + (4 + 5 + 6 + 7) rows without a cache, 7 with it.
    script = "return Object.values(rowsOf(7, 3));"
    assert page.evaluate(MODULE % ("rowsOf", "views/blocks", script), []) == [7, 7 + 3 + 4 + 5 + 6]


def state_of(server: Any) -> dict[str, Any]:
    """The state that the page is sent."""
    live = HTTP.get(f"{server.url}/inspect/live").text
    state: dict[str, Any] = json.loads(next(line for line in live.splitlines() if line.startswith("data: "))[6:])[
        "state"
    ]
    return state


def test_the_numbers_are_those_of_the_server(open_page: OpenPage, server: Any) -> None:
    page = open_page("/inspect#blocks")
    page.locator(".status", has_text="builtin · ready").wait_for()
    before = metric(server, "num_steps_total")
    body = {"prompt": [PROMPT, PROMPT + " The dog"], "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    assert HTTP.post(f"{server.url}/v1/completions", json=body).status_code == 200
    # The steps reach the page after the answer.
    count = "async () => (await import('/inspector/live.js')).live.steps.length"
    num_steps = metric(server, "num_steps_total") - before
    page.wait_for_function(f"async (num) => await ({count})() === num", arg=num_steps)
    # The server's state is up to half a second old.
    while (state := state_of(server))["num_steps"] < before + num_steps:
        time.sleep(0.1)
    # The page draws the steps some time after it has them: its facts may be those of an earlier one until then.
    num_cached = state["num_blocks_cached"]
    facts = {"running": 0, "held": 0, "cached": num_cached, "free": 2048 - num_cached}
    page.wait_for_function(
        """facts => Object.entries(facts).every(([name, value]) =>
          document.querySelector(`[data-fact=${name}]`)?.textContent === value.toLocaleString("en-US"))""",
        arg=facts,
    )
    assert fact(page, "blocks") == state["num_blocks"] == 2048
    assert state["num_blocks_held"] == 0

    page.goto("/inspect#cache")
    page.wait_for_function(
        "(num) => document.querySelector(`[data-fact='prompt tokens']`)?.textContent === num.toLocaleString('en-US')",
        arg=metric(server, "prefix_cache_queries_total"),
    )
    assert fact(page, "of them cached") == metric(server, "prefix_cache_hits_total")
    page.locator(".tree .text", has_text="Once upon a time").first.wait_for()

    page.goto("/inspect#requests")
    page.locator("td a").first.click()
    page.locator("tfoot").wait_for()
    name = page.url.rpartition("/")[2]
    [explanation] = HTTP.get(f"{server.url}/v1/requests/{name}/explain").json()["data"]
    assert page.locator(".sentences li").all_inner_texts() == explanation["sentences"]
    assert page.locator(".waterfall tbody tr").count() == len(explanation["parts"])
    assert page.locator("tfoot .number").inner_text() == page.locator("[data-fact=latency]").inner_text()

    page.goto("/inspect#limits")
    page.locator("[data-fact=parameters]").wait_for()
    limits = HTTP.get(f"{server.url}/inspect/limits").json()
    assert fact(page, "parameters") == limits["num_parameters"]
    assert page.locator(".chart canvas").count() == 1


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_the_views_go_by_keyboard(open_page: OpenPage, server: Any) -> None:
    page = open_page("/inspect#steps")
    page.locator(".status", has_text="builtin · ready").wait_for()
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    HTTP.post(f"{server.url}/v1/completions", json=body)
    page.locator("[data-fact='tokens a step']:not(:text-is('0'))").wait_for()
    page.locator("figure canvas").first.focus()
    press(page, "ArrowLeft")
    page.locator(".selection", has_text="decode rows").wait_for()
    assert page.locator("button[aria-pressed=true]").inner_text() == "Go on"
    last = page.locator(".selection").first.inner_text()
    press(page, "ArrowLeft")
    page.wait_for_function("(text) => document.querySelector('.selection').textContent !== text", arg=last)
    page.locator("input[type=range]").focus()
    press(page, "Home")
    page.locator("[data-fact=steps]", has_text=re.compile("^1$")).wait_for()
    page.locator("summary", has_text="Steps as a table").focus()
    press(page, "Enter")
    rows = page.locator("figure").first.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 1

    page.goto("/inspect#speculation")
    page.locator(".no-guesses", has_text="No drafter is on.").wait_for()

    page.goto("/inspect#blocks")
    page.locator("figure canvas").first.focus()
    press(page, "Home", "ArrowRight")
    page.locator(".selection", has_text="Block 1: ").wait_for()

    page.goto("/inspect#numbers")
    value = page.locator("output.value")
    value.wait_for()
    page.get_by_label("Format").select_option("bfloat16")
    number = float(value.inner_text())
    page.get_by_role("button", name="sign bit 15").focus()
    press(page, "Enter")
    page.locator("output.value", has_text=re.compile(f"^{re.escape(f'{-number:g}')}$")).wait_for()
    press(page, "Tab", "Space")
    page.wait_for_function("document.querySelector('output.value').textContent.length > 0")
    assert abs(float(value.inner_text())) != abs(number)
    page.locator("figure canvas").focus()
    press(page, "End")
    page.locator("h2", has_text="Weight 127").wait_for()


@pytest.mark.parametrize("settings", [{"viewport": browser.PHONE}, {"color_scheme": "dark"}], ids=["phone", "dark"])
def test_every_view_shows_a_recording(open_page: OpenPage, tmp_path: Path, settings: dict[str, Any]) -> None:
    steps = steps_of(tmp_path, 3)
    page = open_page("/inspect#blocks", **settings)
    page.set_input_files("input[type=file]", tmp_path / "3.log")
    page.get_by_role("status").filter(has_text=f"{len(steps)} steps").wait_for()
    blocks, middle = BlockMap(), len(steps) // 2
    for step in steps[:middle]:
        blocks.apply(step.blocks or [])
    page.locator(".recording input[type=range]").fill(str(middle))
    page.wait_for_function(
        "(num) => document.querySelector('[data-fact=held]')?.textContent === String(num)", arg=len(blocks.holders)
    )
    assert fact(page, "cached") == len(blocks.cached - blocks.holders.keys())
    for name in ("blocks", "steps", "requests", "cache", "speculation", "limits"):
        page.locator(f"nav a[href='inspect#{name}']").click()
        page.locator(f"main.{name} h1").wait_for()
        assert page.locator(".recording.shown").count() == 1
        assert browser.violations(page) == []
        assert not browser.is_wider_than_the_screen(page), name
        if name == "steps":
            panel = steps[middle - fact(page, "steps") : middle]
            tokens = sum(sum(step.lens) + sum(num for _, num, _ in step.guesses) for step in panel)
            assert page.locator("[data-fact='tokens a step']").inner_text() == f"{tokens / len(panel):.1f}"
        if name == "speculation":
            guesses = [guess for step in steps[:middle] for guess in step.guesses]
            assert fact(page, "drafted") == sum(num for _, num, _ in guesses)
            assert fact(page, "kept") == sum(num for _, _, num in guesses)
            page.get_by_role("button", name="Step back").click()
            page.locator(".round").wait_for()
    page.get_by_role("button", name="Back to live").click()
    page.locator(".status", has_text="builtin · ready").wait_for()


def test_the_engine_is_held_and_goes_step_by_step(open_page: OpenPage, server: Any) -> None:
    page = open_page("/inspect#blocks")
    page.locator(".status", has_text="builtin · ready").wait_for()
    hold = page.get_by_role("button", name="Hold the engine")
    hold.focus()
    press(page, "Enter")
    page.get_by_text("The engine waits between two steps").wait_for()
    before = metric(server, "num_steps_total")
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
    threading.Thread(target=lambda: HTTP.post(f"{server.url}/v1/completions", json=body)).start()
    while HTTP.get(f"{server.url}/load").json()["server_load"] < 1:
        time.sleep(0.01)
    page.get_by_role("button", name="16 steps").click()
    while metric(server, "num_steps_total") < before + 16:
        time.sleep(0.01)
    # Held for as long as it is looked at: more than the time after which a hold ends by itself.
    page.get_by_role("button", name="One step").click()
    while metric(server, "num_steps_total") < before + 17:
        time.sleep(0.01)
    page.wait_for_timeout(300)
    assert metric(server, "num_steps_total") == before + 17
    page.wait_for_function("() => document.querySelector('[data-fact=running]').textContent === '1'")
    # Blocks of 16 tokens: what is not filled is in the last one.
    page.locator("[data-fact=waste]", has_text="%").wait_for()
    num = fact(page, "held")
    size, live = state_of(server)["block_size"], "async () => (await import('/inspector/live.js')).live.positions"
    [position] = page.evaluate(f"async () => [...(await ({live})()).values()].slice(-1)")
    # The page may still show the step before.
    page.locator("[data-fact=waste]", has_text=f"{100 * (1 - position / (num * size)):.1f} %").wait_for()
    assert browser.violations(page) == []
    # To leave the view lets the engine go on.
    page.locator("nav a[href='inspect#plan']").click()
    while metric(server, "num_requests_running"):
        time.sleep(0.05)


SLOW_STEPS = """
const send = window.fetch;
window.fetch = async (to, request) => {
  if (request?.body === '{"num_steps":1}') await new Promise((go) => setTimeout(go, 500));
  return send(to, request);
};
null;
"""


def test_a_late_order_does_not_hold_an_engine_that_was_let_go(open_page: OpenPage) -> None:
    page = open_page("/inspect#blocks")
    page.evaluate(SLOW_STEPS)
    orders: list[Any] = []
    page.on(
        "request", lambda each: each.url.endswith("/inspect/hold") and orders.append(each.post_data_json["num_steps"])
    )
    page.get_by_role("button", name="Hold the engine").click()
    page.get_by_text("The engine waits between two steps").wait_for()
    page.get_by_role("button", name="One step").click()
    page.get_by_role("button", name="Let the engine go on").click()
    page.get_by_role("button", name="Hold the engine").wait_for()
    page.wait_for_timeout(600)
    assert orders[-2:] == [1, None]
    assert page.get_by_role("button", name="Hold the engine").is_visible()


def test_many_blocks_are_shown_by_sequence_and_by_place(chromium: Any) -> None:
    with serve("builtin", "--num-gpu-blocks-override", "75000", "--max-model-len", "2048") as served:
        for settings in ({}, {"viewport": browser.PHONE, "color_scheme": "dark"}):
            with browser.watched_page(chromium, served.url, **settings) as page:
                page.goto("/inspect#blocks")
                page.locator(".status", has_text="builtin · ready").wait_for()
                assert page.get_by_label("Order the blocks").input_value() == "sequence"
                page.get_by_role("button", name="Hold the engine").click()
                page.get_by_text("The engine waits between two steps").wait_for()
                body = {"prompt": [PROMPT, PROMPT * 9], "max_tokens": 40, "ignore_eos": True}
                thread = threading.Thread(target=lambda: HTTP.post(f"{served.url}/v1/completions", json=body))  # noqa: B023
                thread.start()
                while page.locator("[data-fact=running]").inner_text() != "2":
                    page.get_by_role("button", name="One step").click()
                    page.wait_for_timeout(100)
                page.locator("figure canvas").first.focus()
                press(page, "Home", "Enter")
                page.locator("section[aria-label='Block table']").wait_for()
                press(page, "Escape")
                assert browser.violations(page) == []
                assert not browser.is_wider_than_the_screen(page)
                page.get_by_label("Order the blocks").select_option("by place")
                page.locator("figcaption", has_text="A cell is 32 blocks").wait_for()
                # Small enough to be seen at once, and each block after one more key.
                height = page.locator("figure canvas").first.bounding_box()["height"]
                assert height < 700
                page.locator("figure canvas").first.focus()
                press(page, "Home")
                page.locator(".selection", has_text="Blocks 0 to 31: Enter shows each").wait_for()
                press(page, "Enter", "Home")
                page.locator(".selection", has_text="Block 0: held by ").wait_for()
                assert browser.violations(page) == []
                page.get_by_role("button", name="All blocks").click()
                page.locator("figcaption", has_text="A cell is 32 blocks").wait_for()
                page.get_by_role("button", name="Let the engine go on").click()
                thread.join()


def test_the_guesses_are_words_and_their_absence_is_said(chromium: Any) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}'
    with serve("builtin", "--speculative-config", config) as served, browser.watched_page(chromium, served.url) as page:
        page.goto("/inspect#speculation")
        page.locator(".no-guesses", has_text="The drafter (ngram) is on. There were no steps yet").wait_for()
        # One token: there is nothing to guess.
        body = {"prompt": "The", "max_tokens": 1, "temperature": 0}
        HTTP.post(f"{served.url}/v1/completions", json=body)
        sentence = re.compile(r"The drafter \(ngram\) is on, and saw nothing worth guessing in the last \d+ steps?\.")
        page.locator(".no-guesses", has_text=sentence).wait_for()
        body = {"prompt": "the big dog and the big cat and the big dog and the big", "max_tokens": 24, "temperature": 0}
        text = HTTP.post(f"{served.url}/v1/completions", json=body | {"ignore_eos": True}).json()["choices"][0]["text"]
        page.locator(".round code").first.wait_for()
        words = page.locator(".round li.kept code, .round li.bonus code, .round li.corrected code:last-child")
        for word in words.all_inner_texts():
            assert word.replace("␣", " ").replace("⏎", "\n") in text
        assert "guess 1 " not in page.locator(".round").inner_text()
        assert browser.violations(page) == []


def test_a_file_that_is_no_recording_is_refused_in_words(open_page: OpenPage, tmp_path: Path) -> None:
    (tmp_path / "no.log").write_text("no")
    page = open_page("/inspect#blocks")
    page.set_input_files("input[type=file]", tmp_path / "no.log")
    page.get_by_role("alert").filter(has_text="no recording").wait_for()
    page.errors.clear()


def test_the_fleet_has_a_row_for_each_engine(open_page: OpenPage, server: Any) -> None:
    page = open_page("/inspect#fleet")
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    assert HTTP.post(f"{server.url}/v1/completions", json=body).status_code == 200
    [replica] = HTTP.get(f"{server.url}/fleet").json()["replicas"]
    row = page.locator("tbody tr")
    row.get_by_text(f"{replica['num_generated_tokens']:,}", exact=True).first.wait_for()
    assert row.count() == 1
    cells = row.locator("td").all_inner_texts()
    assert cells[:2] == ["0", "ready"]
    assert cells[3] == "0"
    assert page.locator("[data-fact=engines]").inner_text() == "1 of 1 ready"
    script = "return given.map(age);"
    assert page.evaluate(MODULE % ("age", "views/fleet", script), [5, 65, 7300, 200000]) == [
        "5 s", "1 min 5 s", "2 h 1 min", "2 d 7 h",
    ]  # fmt: skip
