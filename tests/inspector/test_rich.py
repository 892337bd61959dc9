"""Listings and formulas in a browser: typeset from text, loaded on demand, and nothing in them runs or leads away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.inspector import browser
from tests.support.serving import Served

# Renders a text into the page.
SHOW = """async (text) => {
  const { markdown } = await import("/inspector/markdown.js");
  const { h, render } = await import("/inspector/lib.js");
  document.querySelector("#shown")?.remove();
  document.body.append(Object.assign(document.createElement("div"), { id: "shown" }));
  render(h("div", null, markdown(text)), document.querySelector("#shown"));
}"""
# What must not be in the nodes, the handlers of events and addresses among them.
WRONG = """() => [...document.querySelectorAll("#shown *")].flatMap((each) => [
  ...(["SCRIPT", "IMG", "IFRAME", "OBJECT", "STYLE", "LINK", "A", "FORM", "IMAGE", "USE"].includes(
    each.tagName.toUpperCase()) ? [each.tagName.toUpperCase()] : []),
  ...[...each.attributes].filter(({ name }) => /^on|href|src|^data-|^style$|^id$/.test(name) && !(
    name === "style" && each.closest(".katex"))).map(({ name }) => name),
])"""
LOADED = "() => performance.getEntriesByType('resource').map(({ name }) => name)"

SAMPLES = {
    "bash": 'for x in "$@"; do echo $x; done  # all',
    "c": 'int main(void) { return printf("%d", 3); }',
    "cpp": "template <class T> T twice(T x) { return 2 * x; }",
    "css": "a:hover { color: #123456; }",
    "diff": "+ more\n- less",
    "go": 'func main() { fmt.Println("hello") }',
    "java": "public class A { int x = 3; }",
    "javascript": "const f = async (x) => `${x + 1}`;",
    "json": '{"a": [1, true, null]}',
    "python": "def merge(left: list[int]) -> str:\n    return f'{left}'  # text",
    "rust": "fn main() -> Result<(), E> { let x = 3u8; }",
    "sql": "SELECT name FROM users WHERE age > 3;",
    "typescript": "interface A { name: string }",
    "xml": "<a href='x'><!-- b --><script>alert(1)</script></a>",
    "yaml": "name: [a, 3]  # list",
}
FORMULAS = [
    r"\href{javascript:alert(1)}{x}",
    r"\url{javascript:alert(1)}",
    r"\includegraphics[height=1em]{https://evil.example/pixel.png}",
    r"\htmlId{page}{x}\htmlClass{foot}{y}\htmlData{a=b}{z}\htmlStyle{position:fixed}{w}",
    r"\text{<img src=x onerror=alert(1)><script>alert(1)</script>}",
    r"\color{red;background:url(https://evil.example)}x",
    r"\colorbox{url(https://evil.example)}{x}",
    r"\fcolorbox{red}{yellow}{x} \pmb{x} \overbrace{a+b} \sqrt{x}",
    r"\rule{9999em}{9999em}\kern9999em x\raisebox{9999em}{y}",
    r"\def\x{\x\x}\x",
    r"\gdef\alert#1{evil}\newcommand{\y}{\y}\y",
    "{" * 1000 + "}" * 1000,
    r"\frac{1}{" * 300 + "x" + "}" * 300,
    "x^{" * 900 + "x" + "}" * 900,
    r"\begin{matrix}" + "a&" * 900 + r"\end{matrix}",
    r"\left(" * 400,
    r"\constructor \__proto__ \toString",
]


@pytest.fixture
def page(chromium: Any, server: Served) -> Iterator[Any]:
    with browser.watched_page(chromium, server.url) as page:
        page.goto("/inspect#numbers")
        yield page


def settled(page: Any) -> None:
    """Wait until each formula is typeset, or says why not."""
    page.wait_for_function(
        "() => [...document.querySelectorAll('.formula')].every((each) => each.title || each.querySelector('.katex'))"
    )


def test_formulas_are_typeset_and_loaded_with_the_first(page: Any) -> None:
    page.evaluate(SHOW, "a **plain** text, and `$x$`\n\n```\nno language\n```")
    assert not [name for name in page.evaluate(LOADED) if "katex" in name or "highlight" in name]
    page.evaluate(SHOW, "so $a^2$ is\n$$\n\\frac{1}{2} \\boxed{x} \\phase{y}\n$$\nand $\\notacommand$ is not")
    settled(page)
    assert page.locator(".katex").count() == 2
    assert page.locator(".formula.display .katex-display math mfrac").count() == 1
    assert page.locator(".formula[title]").inner_text() == "$\\notacommand$"
    assert "notacommand" in (page.locator(".formula[title]").get_attribute("title") or "")
    page.evaluate("document.fonts.ready")
    assert page.evaluate("document.fonts.check('1em KaTeX_Main')")
    loaded = page.evaluate(LOADED)
    assert all("/inspector/" in name or "/inspect" in name for name in loaded)
    assert [name for name in loaded if name.endswith("KaTeX_Main-Regular.woff2")]
    assert browser.violations(page) == []


def test_listings_are_coloured_in_their_language(page: Any) -> None:
    for language, code in SAMPLES.items():
        page.evaluate(SHOW, f"```{language}\n{code}\n```")
        page.locator("#shown code span[class^=hl-]").first.wait_for()
        assert page.locator("#shown code").text_content() == code, language
        assert page.evaluate(WRONG) == []
        assert browser.violations(page) == [], language
    # A listing that still grows is plain, and so is one in an unknown language.
    page.evaluate(SHOW, "```whatever\nx = 1\n```\n```py\nx = 1\n```\n```py\nx = 2")
    page.locator("#shown code span[class^=hl-]").first.wait_for()
    assert [page.locator("#shown code").nth(i).locator("span").count() > 0 for i in range(3)] == [False, True, False]


def test_a_listing_is_copied(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate(SHOW, "```py\na = '<b>'\n```")
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "a = '<b>'"


def test_S_10_hostile_formulas_stay_formulas(page: Any) -> None:
    page.evaluate(SHOW, "\n\n".join(f"$${tex}$$" for tex in FORMULAS))
    settled(page)
    assert page.evaluate(WRONG) == []
    assert not [name for name in page.evaluate(LOADED) if "evil" in name]
    assert page.locator(".formula .katex").count() > 3
    # A browser's renderer ends with a stack that is too small for these.
    assert page.locator(".formula[title='the formula is nested too deeply']").count() >= 3
    # They stay in their place: nothing covers what is around them.
    assert not browser.is_wider_than_the_screen(page)
    assert page.evaluate("document.querySelector('nav a').getBoundingClientRect().top") >= 0
    page.locator("nav a").first.click(trial=True)


def test_control_a_formula_that_may_link_is_noticed(chromium: Any, server: Served) -> None:
    def trusting(route: Any) -> None:
        text = route.fetch().text()
        assert "trust: false" in text
        route.fulfill(body=text.replace("trust: false", "trust: true"), content_type="text/javascript")

    with browser.watched_page(chromium, server.url) as page:
        page.route("**/rich.js", trusting)
        page.goto("/inspect#numbers")
        page.evaluate(SHOW, "$\\href{javascript:alert(1)}{x}$ $\\htmlId{page}{x}$")
        settled(page)
        assert {"A", "href", "id"} <= set(page.evaluate(WRONG))


def test_S_10_a_hostile_listing_does_not_hold_the_page(page: Any) -> None:
    pieces = {"java": "$$", "python": "0", "typescript": "_", "cpp": "(", "css": "a=", "xml": "<a>", "bash": '"'}
    for language, piece in pieces.items():
        page.evaluate(SHOW, f"```{language}\n{(piece * 20_000)[:9_990]}\n```\n```{language}\n{piece * 20_000}\n```")
        page.wait_for_function("() => document.querySelectorAll('#shown code').length === 2")
    # Above the bound it stays plain.
    page.evaluate(SHOW, "```py\n" + "x = 1\n" * 2_000 + "```\n```py\nx = 1\n```")
    page.locator("#shown code span").first.wait_for()
    assert [page.locator("#shown code").nth(i).locator("span").count() > 0 for i in range(2)] == [False, True]
