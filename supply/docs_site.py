"""Hooks of mkdocs for `make site`: the order of pages, links to files of the repository, nothing of third parties.

docs/index.md is the only list of pages: each of its sections is one of the site, with the pages that it links to. A
page that it does not link to ends the build. A link to a folder, or to its README.md, brings all pages of the folder.
README.md and its like are pages of the site too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BESIDE = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "rules.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages in the root of the repository, and their names on the site."""
TITLES = {"start.md": "Start here", "rules.md": "Rules for contributors"}
DECISIONS = "adr/index.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(?ms)^( *)```.*?^\1```$")
ITEM = re.compile(r"([-*]|\d+\.) ")
FOREIGN = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|object)\b[^>]*\b(?:src|href|data)=[\"']?(?:https?:)?//[^>]*>"
)


class SiteError(Exception):
    """A page that is missing from the map."""


def contents(folder: str, pages: Sequence[str]) -> list[str]:
    """The pages of a folder of the docs, its own page first."""
    inside = sorted(page for page in pages if page.startswith(f"{folder}/"))
    own = [page for page in inside if page in (f"{folder}/README.md", f"{folder}/index.md")]
    return own + [page for page in inside if page not in own]


def navigation(index: str, pages: Sequence[str]) -> list[Any]:
    """The sections of the map with their pages, in mkdocs' form. Raises `SiteError` for a page that is in none.

    Args:
        index: the text of docs/index.md. Pages that it links to before its first section stand alone.
        pages: all pages, relative to docs, those that are generated included.
    """
    nav: list[Any] = ["index.md"]
    seen = {"index.md"}
    for number, section in enumerate(re.split(r"(?m)^## ", index)):
        title, _, text = section.partition("\n")
        entries: list[Any] = []
        for _, label, target in LINK.findall(text):
            path = os.path.normpath(target.partition("#")[0])
            page = BESIDE.get(path.removeprefix("../"), path)
            folder = os.path.dirname(page) if os.path.basename(page) == "README.md" else page
            if folder not in ("", ".") and (inside := [name for name in contents(folder, pages) if name not in seen]):
                entries.append({label[:1].upper() + label[1:]: inside})
                seen.update(inside)
            elif page in pages and page not in seen:
                entries.append({TITLES[page]: page} if page in TITLES else page)
                seen.add(page)
        nav += [{title.strip(): entries}] if number and entries else entries
    if missing := sorted(set(pages) - seen):
        names = {page: name for name, page in BESIDE.items()}
        listed = ", no ".join(names.get(page, f"docs/{page}") for page in missing)
        raise SiteError(f"docs/index.md links to no {listed}: add a row to one of its tables")
    return nav


def list_of_decisions(folder: Path) -> str:
    """The page of the decisions: their titles, in order."""
    titles = {
        path.name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in folder.glob("*.md")
    }
    return "# Decisions\n\n" + "".join(f"- [{title}]({name})\n" for name, title in sorted(titles.items()))


def outside_code(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of a page: whether each is a fenced block, and its text."""
    at = 0
    for match in FENCE.finditer(text):
        yield False, text[at : match.start()]
        yield True, match[0]
        at = match.end()
    yield False, text[at:]


def with_links(text: str, source: Path, repository: str) -> str:
    """A page whose links leave the site only for files that exist.

    A link to a file of the repository becomes one to `repository`, or bare text where no address is known. A link to a
    folder of docs becomes one to its page. Any other link stays; mkdocs complains of those that lead nowhere.

    Args:
        text: the page.
        source: its file, in docs or in the root of the repository.
        repository: the repository's address, or nothing.
    """
    folder = source.parent if DOCS in source.parents else DOCS

    def replaced(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        path, mark, anchor = target.partition("#")
        place = Path(os.path.normpath(source.parent / path))
        if not path or re.match(r"[a-z]+:", path) or path.startswith("/"):
            return match[0]
        if place.parent == ROOT and place.name in BESIDE:
            place = DOCS / BESIDE[place.name]
        elif place.is_dir() and DOCS in place.parents:
            place /= "README.md" if (place / "README.md").is_file() else "index.md"
        elif not place.exists():
            return match[0]
        if DOCS in place.parents:
            return f"{picture}[{label}]({os.path.relpath(place, folder)}{mark}{anchor})"
        name = place.relative_to(ROOT).as_posix()
        return f"[{label}]({repository.rstrip('/')}/blob/main/{name}{mark}{anchor})" if repository else label

    return "".join(part if is_code else LINK.sub(replaced, part) for is_code, part in outside_code(text))


def with_lists(text: str) -> str:
    """A page with an empty line before each list, and before each item that follows one of several paragraphs: without
    it Python's Markdown takes them for text."""
    lines: list[str] = []
    previous, is_code, is_loose = "", False, False
    for line in text.split("\n"):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if ITEM.match(line) and not is_code:
            is_first = not previous.startswith(" ") and not ITEM.match(previous)
            lines += [""] if previous and (is_first or is_loose) else []
            is_loose = False
        is_loose |= is_fence or not line
        lines.append(line)
        previous = line
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """A page whose tables have plain bars in code: Python's Markdown shows the backslash before one."""

    def plain(line: str) -> str:
        return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line

    return "".join(part if is_code else "\n".join(map(plain, part.split("\n"))) for is_code, part in outside_code(text))


def of_third_parties(html: str) -> list[str]:
    """Elements that load something from another host."""
    return [match[0] for match in FOREIGN.finditer(html) if 'rel="canonical"' not in match[0]]


# -- what mkdocs calls -------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    from markdown.extensions import Extension
    from mkdocs.exceptions import PluginError

    class Indentation(Extension):
        """Two blanks belong to an item of a list, as they do where the repository is browsed."""

        def extendMarkdown(self, md: Any) -> None:
            md.tab_length = 2

    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")] + [DECISIONS, *BESIDE.values()]
    try:
        config["nav"] = navigation((DOCS / "index.md").read_text(encoding="utf-8"), pages)
    except SiteError as error:
        raise PluginError(str(error)) from error
    config["markdown_extensions"].append(Indentation())
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, DECISIONS, content=list_of_decisions(DOCS / "adr")))
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    names = {site: name for name, site in BESIDE.items()}
    uri: str = page.file.src_uri
    source = ROOT / names[uri] if uri in names else DOCS / uri
    return with_tables(with_lists(with_links(markdown, source, config["repo_url"] or "")))


def on_post_build(config: Any) -> None:
    from mkdocs.exceptions import PluginError

    for path in Path(config["site_dir"]).rglob("*.html"):
        if found := of_third_parties(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.name} loads something from another host: {found[0]}")
