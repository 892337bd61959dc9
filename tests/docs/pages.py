"""The code blocks of the pages for users, and the commands in them.

Extracts fenced blocks, splits shell blocks into commands, and checks the words of a command without running it: flags
of `headrace`, arguments of scripts, targets of make, extras of pip. `tests/docs/test_pages.py` runs what can be run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import typer

from headrace.cli import reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    DOCS / "gpu.md",
    DOCS / "textbook.md",
    *sorted(DOCS.glob("howto-*.md")),
    *(DOCS / "maintainers" / f"{name}.md" for name in ("compare", "drafter-layouts", "release", "train-builtin")),
)
SHELLS = ("bash", "sh", "console")
AGENTS = ("cn", "open-webui")
"""Programs of others, of whose words nothing is known here."""
UsageError = typer.BadParameter.__mro__[1]
"""The base of errors of the command line: click's, or that of typer's own copy of click."""


class Block(NamedTuple):
    """A fenced block: the page's file name, the line of its first fence, the language and the text between."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, indented ones too."""
    matches = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", text, re.S | re.M)
    return [Block(page, text.count("\n", 0, match.start()) + 1, match[2], match[3]) for match in matches]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block. Raises ValueError at an open quotation mark."""
    part = ""
    for line in text.splitlines():
        part += line.removeprefix("$ ") if not part else "\n" + line
        if part.endswith("\\"):
            part = part[:-1]
            continue
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue
        part = ""
        command: list[str] = []
        for word in [*words, "&&"]:
            if word not in ("&&", "&", "|"):
                command.append(word)
            elif command:
                yield command
                command = []
    if part:
        raise ValueError(f"the block ends within a quotation: {part[-60:]}")


def program(words: Sequence[str]) -> str:
    """The name of the program that a command runs, without the folder of the environment."""
    name = words[0].rpartition("/")[2]
    return "pip" if name == "python" and list(words[1:3]) == ["-m", "pip"] else name


# -- commands that are not run ---------------------------------------------------------------------------------------


def check(words: Sequence[str]) -> None:
    """Check a command's words without running it. Raises ValueError."""
    name = program(words)
    if name == "headrace":
        check_headrace(words[1:])
    elif name in ("docker", "kubectl", "sudo"):
        if bad := [word for word in words if word.startswith("deploy/") and not (ROOT / word).is_file()]:
            raise ValueError(f"there is no {bad[0]}")
    elif list(words[1:2]) == ["-c"]:
        compile(words[2], "python -c", "exec")
    elif list(words[1:3]) == ["-m", "venv"]:
        pass
    elif name == "python":
        check_script(words[1:])
    elif name == "make":
        targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
        names = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
        if bad := [word for word in names if word not in targets]:
            raise ValueError(f"make has no target {bad[0]}")
    elif name == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        matches = re.findall(r"(?:^| )(?:\.|headrace)\[(\w+)\]", " ".join(words))
        if bad := [extra for extra in matches if extra not in extras]:
            raise ValueError(f"headrace has no extra {bad[0]}")
        if any(word.startswith("headrace") for word in words):
            raise ValueError("headrace is on no index: install the checkout")
    elif name == "pytest":
        if missing := [word for word in words[1:] if "/" in word and not (ROOT / word).exists()]:
            raise ValueError(f"there is no {missing[0]}")
    elif name not in ("git", "tail", "curl", "lm_eval", "npm", "export", "openssl", "ray", *AGENTS):
        raise ValueError(f"nothing is known of the command {name}")


def check_headrace(words: Sequence[str]) -> None:
    """Parse the flags of a `headrace` command, their values too."""
    known = {path.removeprefix("headrace "): command for path, command in reference.commands()}
    name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
    if name not in known:
        raise ValueError(f"headrace has no command {name}")
    try:
        known[name].make_context(f"headrace {name}", list(words[len(name.split()) :]))
    except UsageError as error:
        raise ValueError(f"headrace {name}: {error.format_message()}") from error


class Parsed(Exception):
    """Ends a script as soon as its arguments are parsed."""


def check_script(words: Sequence[str]) -> None:
    """Let `python -m MODULE ...` or `python FILE ...` parse its arguments, and no more."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(parser, *arguments)
        raise Parsed

    stderr = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(stderr):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "path", [str(ROOT), *sys.path])
        try:
            if words[0] == "-m":
                patch.setattr(sys, "argv", [words[1], *words[2:]])
                name = words[1]
                try:
                    module = importlib.import_module(
                        f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name
                    )
                except ImportError as error:
                    raise ValueError(f"python -m {name}: {error}") from error
                if not hasattr(module, "main"):
                    if words[2:]:
                        raise ValueError(f"python -m {name} takes no arguments")
                    return
                module.main()
            else:
                if not (ROOT / words[0]).is_file():
                    raise ValueError(f"there is no {words[0]}")
                patch.setattr(sys, "argv", list(words))
                patch.setattr(sys, "path", [str((ROOT / words[0]).parent), *sys.path])
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except Parsed:
            return
        except SystemExit as error:
            raise ValueError(f"{' '.join(words)}: {stderr.getvalue().strip()[-300:] or error}") from error
        finally:  # scripts import their neighbours by short names, such as `data`
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", "")).startswith(f"{ROOT}/training/"):
                    del sys.modules[name]
    raise ValueError(f"{' '.join(words)} parsed no arguments")


# -- curl ------------------------------------------------------------------------------------------------------------


def curl(words: Sequence[str], url: str) -> httpx.Response:
    """Send what `curl` would send to the server of the page, to `url` instead. Raises ValueError for another flag."""
    options = argparse.ArgumentParser(prog="curl", exit_on_error=False)
    options.add_argument("address")
    options.add_argument("-H", "--header", action="append", default=[])
    options.add_argument("-d", "--data")
    options.add_argument("-X", "--request")
    options.add_argument("-N", "--no-buffer", action="store_true")
    options.add_argument("-s", "--silent", action="store_true")
    args, rest = options.parse_known_args(list(words))
    if rest:
        raise ValueError(f"curl: {rest[0]} is not known here")
    address = re.fullmatch(r"(?:http://)?(?:localhost|127\.0\.0\.1):8000(/.*)", args.address)
    if not address:
        raise ValueError(f"curl: {args.address} is not the server of the pages")
    headers = {"Content-Type": "application/x-www-form-urlencoded"} if args.data is not None else {}
    headers |= {name: value.strip() for name, _, value in (header.partition(":") for header in args.header)}
    method = args.request or ("GET" if args.data is None else "POST")
    return httpx.request(method, url + address[1], content=args.data, headers=headers, timeout=240)


def check_reply(response: httpx.Response) -> None:
    """Raise ValueError if a request was refused, or has a field that means nothing."""
    if response.status_code >= 400:
        raise ValueError(f"status {response.status_code}: {response.text[:300]}")
    if "json" in response.headers.get("content-type", "") and (warnings := response.json().get("warnings")):
        raise ValueError(f"warnings: {warnings}")
