"""Markdown becomes nodes of the page: the common forms, and nothing that runs, loads or leads elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.inspector import browser
from tests.support.serving import Served

# Renders each text, and returns its HTML and what is in it that must not be.
RENDER = """async (texts) => {
  const { markdown } = await import("/inspector/markdown.js");
  const { h, render } = await import("/inspector/lib.js");
  const tags = "P H3 H4 H5 H6 PRE CODE STRONG EM DEL A UL OL LI BLOCKQUOTE HR DIV " +
    "TABLE THEAD TBODY TR TH TD BR SPAN BUTTON INPUT".split(" ");
  const names = "href target rel tabindex aria-label role scope start class type checked disabled title".split(" ");
  return texts.map((text) => {
    const root = document.createElement("div");
    render(h("div", null, markdown(text)), root);
    const wrong = [...root.firstChild.querySelectorAll("*")].flatMap((each) => [
      ...(tags.includes(each.tagName) ? [] : [each.tagName]),
      ...[...each.attributes].filter(({ name }) => !names.includes(name)).map(({ name }) => name),
      ...(each.href === undefined || /^(https?|mailto):$/.test(new URL(each.href).protocol) ? [] : [each.href]),
    ]);
    return { html: root.firstChild.innerHTML, text: root.textContent, wrong };
  });
}"""


@pytest.fixture(scope="module")
def page(chromium: Any, server: Served) -> Iterator[Any]:
    with browser.watched_page(chromium, server.url) as page:
        page.goto("/inspect")
        yield page


LINK = 'target="_blank" rel="noopener noreferrer"'
TABLE = '<div class="scroll" tabindex="0" role="region" aria-label="table"><table><thead><tr>'


def listing(language: str, code: str) -> str:
    """The HTML of a listing, before it is coloured."""
    return (
        f'<div class="listing"><div class="bar-of"><span>{language}</span><button type="button" class="copy">Copy'
        f'</button></div><pre tabindex="0" role="region" aria-label="code {language}"><code>{code}</code></pre></div>'
    )


def formula(source: str) -> str:
    """The HTML of a formula within a line, before it is typeset."""
    return f'<span class="formula">{source}</span>'


def display(source: str) -> str:
    """The HTML of a formula of its own line, before it is typeset."""
    return f'<span class="formula display" tabindex="0" role="group" aria-label="formula">{source}</span>'


FORMS = {
    "# One\n## Two #": "<h3>One</h3><h4>Two</h4>",
    "a **b** *c* _d_ ~~e~~ `f*g*`": "<p>a <strong>b</strong> <em>c</em> <em>d</em> <del>e</del> <code>f*g*</code></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "***both*** ___too___": "<p><strong><em>both</em></strong> <strong><em>too</em></strong></p>",
    "**a *b*** *c **d***": "<p><strong>a <em>b</em></strong> <em>c <strong>d</strong></em></p>",
    "snake_case_name 2 * 3 * 4 \\*x\\*": "<p>snake_case_name 2 * 3 * 4 *x*</p>",
    "one\ntwo\n\nthree": "<p>one two</p><p>three</p>",
    "one  \ntwo\\\nthree<br>four": "<p>one<br>two<br>three<br>four</p>",
    "- a\n- b\n  - c\n\n1. x\n2. y": '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="1">'
    "<li>x</li><li>y</li></ol>",
    "3) x": '<ol start="3"><li>x</li></ol>',
    "- [x] a\n- [ ] **b**": '<ul><li class="task"><input type="checkbox" disabled="" aria-label="done">a</li>'
    '<li class="task"><input type="checkbox" disabled="" aria-label="to do"><strong>b</strong></li></ul>',
    "> a\n> b": "<blockquote><p>a b</p></blockquote>",
    "---": "<hr>",
    "```py\nif a < b:\n  `x`\n```\nz": listing("py", "if a &lt; b:\n  `x`") + "<p>z</p>",
    # An answer that is still coming.
    "```\nopen": listing("", "open"),
    "[a](https://b.example/c)": f'<p><a href="https://b.example/c" {LINK}>a</a></p>',
    '[a](https://b.example/c_(d) "e f")': f'<p><a href="https://b.example/c_(d)" {LINK}>a</a></p>',
    "![a *b*](https://b.example/c.png)!": f'<p><a href="https://b.example/c.png" {LINK}>image: a *b*</a>!</p>',
    "![](https://b.example/c.png)": f'<p><a href="https://b.example/c.png" {LINK}>image: b.example</a></p>',
    "see https://b.example/c.": f'<p>see <a href="https://b.example/c" {LINK}>https://b.example/c</a>.</p>',
    "|a|b|\n|-|:-:|\n|1|**2**|": f'{TABLE}<th scope="col">a</th><th scope="col" class="center">b</th></tr></thead>'
    '<tbody><tr><td>1</td><td class="center"><strong>2</strong></td></tr></tbody></table></div>',
    "|a|\n|-:|\n|`1\\|2`|": f'{TABLE}<th scope="col" class="right">a</th></tr></thead>'
    '<tbody><tr><td class="right"><code>1|2</code></td></tr></tbody></table></div>',
    "a $x^2$ b \\(y\\)": f"<p>a {formula('$x^2$')} b {formula(chr(92) + '(y' + chr(92) + ')')}</p>",
    "$$\nx\n$$\nz": display("$$\nx\n$$") + "<p>z</p>",
    "so:\n\\[x\\]": f"<p>so:</p>{display(chr(92) + '[x' + chr(92) + ']')}",
    "```math\nx\n```": display("x"),
    # Prices and variables of a shell are none.
    "$5 or $10, US$3-US$4, $HOME and $PATH": "<p>$5 or $10, US$3-US$4, $HOME and $PATH</p>",
    "\\$x$ and a$b$": "<p>$x$ and a$b$</p>",
    "$$\nopen": "<p>$$ open</p>",
}

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1)) [b](data:text/html,<script>) [c](vbscript:x) [d](//evil.example) [e](\x01javascript:x)",
    "![a](https://evil.example/pixel.png)",
    '[a](https://x.example" onclick="alert(1))',
    '```js" onload="alert(1)\n```',
    "&lt;script&gt;",
    "[a]: javascript:alert(1)\n[a]",
    "<https://x.example><b>",
    "{{constructor.constructor('alert(1)')()}} __proto__ constructor",
    '![a" onerror="alert(1)](https://x.example/i.png) ![b](javascript:alert(1)) ![c](data:image/svg+xml,<svg>)',
    "|<img src=x onerror=alert(1)>|b|\n|:-:|-:|\n|<script>alert(1)</script>|[x](javascript:alert(1))|",
    "- [x] <img src=x onerror=alert(1)>\n- [ ] [a](javascript:alert(1))",
    "```html\n<script>alert(1)</script><img src=x onerror=alert(1)>\n```",
    "```__proto__\nx\n```\n```constructor\nx\n```\n```../../x\ny\n```",
]


def test_common_forms(page: Any) -> None:
    results = page.evaluate(RENDER, list(FORMS))
    assert {text: each["html"] for text, each in zip(FORMS, results, strict=True)} == FORMS


def test_hostile_texts_stay_texts(page: Any) -> None:
    results = page.evaluate(RENDER, HOSTILE)
    assert [each["wrong"] for each in results] == [[] for _ in HOSTILE]
    assert results[0]["text"] == HOSTILE[0]
    assert all("evil.example" not in link for link in page.evaluate("performance.getEntries().map(({ name }) => name)"))


def test_what_must_not_be_there_is_noticed(page: Any) -> None:
    planted = RENDER.replace(
        'h("div", null, markdown(text))', 'h("div", null, h("img"), h("a", { href: text, onclick: "x" }))'
    )
    [result] = page.evaluate(planted, ["javascript:alert(1)"])
    assert result["wrong"] == ["IMG", "javascript:alert(1)"]


# A beginning, a repeated piece, and an end. Of each an expression with two ways to take a blank tries a trillion.
LONG = [
    ("a|b\n", " ", "x"),
    ("a|b\n-", " ", "x"),
    ("a|b\n:", " ", ":"),
    ("a|b\n|", " -|", "x"),
    ("# ", " ", "x\u2028y"),
    ("- ", " ", "x\u2028y"),
    ("1. ", " ", "x\u2028y"),
    ("# a", " #", "x"),
    ("--", " ", "x"),
    ("[a](", " ", "x y"),
    ("~~~", " ", "x"),
]
# Renders the texts after the call, so that a page that hangs does not hold up the test, and then says so.
LATER = """(texts) => setTimeout(async () => {
  const { markdown } = await import("/inspector/markdown.js");
  for (const [begin, piece, end] of texts) markdown(begin + piece.repeat(1_500_000) + end);
  document.body.dataset.rendered = texts.length;
})"""


def test_S_10_long_lines_render_at_once(page: Any) -> None:
    page.evaluate(LATER, LONG)
    page.locator(f"body[data-rendered='{len(LONG)}']").wait_for()


def test_S_10_control_an_expression_that_reads_a_whole_row_hangs(chromium: Any, server: Served) -> None:
    from playwright.sync_api import TimeoutError as Late

    def greedy(route: Any) -> None:
        text = route.fetch().text()
        check = 'cellsOf(lines[i + 1] ?? "").every((cell) => /^:?-+:?$/.test(cell))'
        assert check in text
        row = r"/^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/.test(lines[i + 1] ?? '')"
        route.fulfill(body=text.replace(check, row), content_type="text/javascript")

    with browser.watched_page(chromium, server.url) as page:
        page.route("**/markdown.js", greedy)
        page.goto("/inspect")
        page.evaluate(LATER, LONG[1:2])
        with pytest.raises(Late):
            page.locator("body[data-rendered]").wait_for(timeout=2_000)


def test_random_texts_render_in_bounded_time(page: Any) -> None:
    rng = random.Random(7)
    pieces = [
        *HOSTILE,
        *FORMS,
        "*",
        "**",
        "_",
        "`",
        "```",
        "~~",
        "[",
        "](",
        ")",
        "> ",
        "- ",
        "1. ",
        "|",
        "\n",
        "\n\n",
        "    ",
        "#",
    ]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(1, 60))) for _ in range(300)]
    # Each of these takes a parser that looks ahead without a bound quadratic or exponential time.
    texts += [
        piece * 20_000 for piece in ("*", "**a", "_a", "`", "[", "[a](", "> ", "- ", "*a **b ", "|", "https://", "\\")
    ]
    texts += ["- a\n" * 20_000, "> " * 10_000 + "x", "\n".join(" " * i + "- x" for i in range(500))]
    results = page.evaluate(RENDER, texts)
    assert [each["wrong"] for each in results if each["wrong"]] == []
    # Letters do not vanish, but for the language of a listing and the address of a link.
    for text, each in zip(texts, results, strict=True):
        assert each["text"].strip() or "```" in text or "](" in text or not any(letter.isalpha() for letter in text)
