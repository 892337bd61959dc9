"""`headrace top`: a running server in the terminal, as htop shows a machine. Reads `GET /inspect/live`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headrace.cli.remote import ADDRESS, CaCert, Url, address_of, authorization, client_of, reason
from headrace.protocol.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.insight.state import State

BAR = 40


class Look(NamedTuple):
    """What a server sends once a second: its engine's state, and its overload, as the page has it."""

    state: State
    overload: Mapping[str, Any]


def top(
    server: Annotated[str | None, typer.Argument(metavar="[URL]", help="The server, as by --url.")] = None,
    *,
    url: Url = ADDRESS,
    once: Annotated[bool, typer.Option("--once", help="Print one state as text, and exit.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="An administrator's key, if it has keys; better given in HEADRACE_API_KEY."),
    ] = None,
    cacert: CaCert = None,
) -> None:
    """Show a running server at work: its speed, its blocks and its requests. q ends it."""
    from rich.console import Console
    from rich.live import Live

    url = address_of(server or url)
    console = Console(width=None if sys.stdout.isatty() else 100)
    with closing(looks(url, api_key, cacert)) as source:  # type: ignore[type-var]
        before = next(source)
        if once:
            for line in lines(before.state, next(source)):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        with keys() as is_ended, Live(console=console, screen=sys.stdout.isatty(), auto_refresh=False) as live:
            try:
                live.update(screen(before.state, before, console.height), refresh=True)
                for look in source:
                    if is_ended():
                        return
                    live.update(screen(before.state, look, console.height), refresh=True)
                    before = look
            except KeyboardInterrupt:
                return
    raise HeadraceError(f"{url}: the server has ended")


def looks(url: str, api_key: str | None, cacert: Path | None = None) -> Iterator[Look]:
    """Yield what a server sends, once a second. Raises `HeadraceError` if there is none or it refuses."""
    import httpx
    import msgspec

    from headrace.insight.state import State

    try:
        with (
            client_of(url, cacert, 30.0) as client,
            client.stream("GET", f"{url}/inspect/live?follow=true", headers=authorization(api_key)) as reply,
        ):
            if reply.status_code != 200:
                reply.read()
                raise HeadraceError(f"{url} answered {reply.status_code}: {reason(reply)}")
            for line in reply.iter_lines():
                # The snapshot and the steps are for the inspector.
                if line.startswith('data: {"state":'):
                    event = msgspec.json.decode(line[6:])
                    yield Look(msgspec.convert(event["state"], State), event.get("overload", {}))
    except httpx.HTTPError as error:
        raise HeadraceError(f"{url}: {type(error).__name__}: {error}") from error
    except msgspec.MsgspecError as error:
        raise HeadraceError(f"{url}: not a headrace server of this version: {error}") from error


@contextmanager
def keys() -> Iterator[Callable[[], bool]]:
    """Read keys without echo. Yields a function that returns whether q was pressed. A terminal is as before at the
    end."""
    if not sys.stdin.isatty():
        yield lambda: False
        return
    import _thread
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    is_ended = threading.Event()

    def read() -> None:
        while not is_ended.is_set():
            if sys.stdin.read(1) in ("q", "Q", ""):
                is_ended.set()
                _thread.interrupt_main()

    tty.setcbreak(fd)
    threading.Thread(target=read, daemon=True).start()
    try:
        yield is_ended.is_set
    finally:
        is_ended.set()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def lines(before: State, look: Look) -> list[str]:
    """Return a look as lines of text: gauges, rates since `before`, and a line for each open request."""
    now, overload = look
    seconds = now.time - before.time

    def rate(name: str) -> float:
        return max(0.0, getattr(now, name) - getattr(before, name)) / seconds if seconds > 0 else 0.0

    num_free = now.num_blocks - now.num_blocks_held - now.num_blocks_cached
    queries = now.prefix_cache_queries
    refused = overload.get("refused")
    overloaded = f" · overloaded: {overload['why']}; {refused} are refused" if refused else ""
    hits = f"{100 * now.prefix_cache_hits / queries:.1f} %" if queries else "none yet"
    return [
        f"headrace · {now.model} · {'ready' if now.is_ready else 'not ready'}{overloaded}",
        f"tok/s     {rate('num_generated_tokens'):,.1f} generated, {rate('num_prompt_tokens'):,.1f} of prompts, "
        f"{rate('num_steps'):,.1f} steps/s",
        f"blocks    [{bar(now)}] {now.num_blocks_held:,} held, {now.num_blocks_cached:,} cached, {num_free:,} free",
        f"hit rate  {hits} of {queries:,} prompt tokens",
        f"limit     {limit(now)}",
        f"requests  {now.num_running:,} running, {now.num_waiting:,} waiting, {now.num_preemptions:,} preemptions",
        f"{'AGE':>9}  {'PHASE':<10}{'PROMPT':>17}  ID",
        *(
            f"{each.age:8.1f}s  {each.phase:<10}"
            f"{each.num_computed_prompt_tokens:>8,}/{each.num_prompt_tokens:<8,}  {each.id}"
            for each in now.requests
        ),
    ]


def limit(state: State) -> str:
    """Return the share of the machine's limit at which the last seconds decoded."""
    memory = state.memory
    if memory is None:
        return "nothing was decoded just now"
    source = "the memory's bandwidth" if memory.is_measured else "the fastest step so far"
    return f"{memory.share:.0%} of {memory.limit / 1e9:,.1f} GB/s, {source}"


def bar(state: State) -> str:
    """Return the blocks as `BAR` signs: # held, = cached, . free."""
    num_blocks = max(1, state.num_blocks)
    num_held = -(-BAR * state.num_blocks_held // num_blocks)
    num_cached = min(BAR - num_held, -(-BAR * state.num_blocks_cached // num_blocks))
    return "#" * num_held + "=" * num_cached + "." * (BAR - num_held - num_cached)


def screen(before: State, now: Look, height: int) -> Any:
    """Return the lines as a screen of `height` rows; the oldest requests come first."""
    from rich.text import Text

    rows = lines(before, now)
    num_hidden = max(0, len(rows) - (height - 2))
    if num_hidden:
        rows = [*rows[: height - 3], f"{num_hidden + 1:,} more"]
    text = Text("\n".join([*rows, "", "q ends"]), no_wrap=True, overflow="ellipsis")
    text.highlight_words([" · overloaded: "], "bold red")
    text.highlight_words(["tok/s ", "blocks  ", "hit rate", "limit   ", "requests "], "bold cyan")
    for phase, style in (("decode", "green"), ("prefill", "yellow"), ("queued", "dim"), ("preempted", "red")):
        text.highlight_words([f"s  {phase} "], style)
    return text
