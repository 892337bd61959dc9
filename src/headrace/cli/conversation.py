"""`Conversation`: the messages, settings and slash commands of `headrace chat`, and how answers are printed.

On a terminal, answers are shown as Markdown, wrapped by word, and Ctrl-C stops an answer. Anywhere else they are
written as they come. Knows neither engine nor HTTP: a `Source` gives the answers.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace import builtin
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams

SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")

Message = dict[str, Any]


class Source(Protocol):
    """Where answers come from. With `is_interruptible`, an exception may be raised at any point of `answer`.

    Attributes:
        num_tokens: tokens of the last answer so far; 0 where the source does not say.
    """

    is_interruptible: bool
    num_tokens: int

    @property
    def model(self) -> str: ...

    def switch(self, model: str) -> None: ...

    def answer(self, messages: list[Message], params: SamplingParams) -> Generator[str]: ...


class Conversation:
    """A conversation with the model of `source`."""

    def __init__(self, source: Source, params: SamplingParams, system: str | None) -> None:
        self.source = source
        self.params = params
        self.messages: list[Message] = []
        self._set_system(system or "")
        self._is_stopped = False

    def run(self) -> None:
        """Read and answer lines until /quit, /exit or the end of input. On a terminal an error ends its turn only."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            if self.source.model == "builtin":
                _note(f"{builtin.ABOUT}.")
            _note(f"{self.source.model}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
        for line in _lines(is_terminal):
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            try:
                if text.startswith("/") and not text.startswith("//"):
                    self._command(text)
                elif text:
                    self._turn(text.removeprefix("/") if text.startswith("//") else text)
            except HeadraceError as error:
                if not is_terminal:
                    raise
                _note(f"headrace: {error}")

    def _turn(self, text: str) -> None:
        """Answer one message. An answer that is stopped stays in the conversation as far as it came."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        pace = Pace()
        try:
            with _Page() as page, self._interrupts(), suppress(KeyboardInterrupt), closing(self._pieces()) as answer:
                for piece in answer:
                    pieces.append(piece)
                    if piece:
                        pace.tick()
                    page.write(piece)
        except BaseException:
            self.messages = before
            raise
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if sys.stdout.isatty():
            _note(pace.text(self.source.num_tokens), "dim")

    def _pieces(self) -> Generator[str]:
        self._is_stopped = False
        with closing(self.source.answer(self.messages, self.params)) as pieces:
            for piece in pieces:
                if self._is_stopped:
                    return
                yield piece

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Let Ctrl-C stop the answer: at once, or after the step that runs where the source needs that."""

        def stop(number: int, frame: object) -> None:
            self._is_stopped = True
            if self.source.is_interruptible:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _command(self, text: str) -> None:
        name, _, argument = text[1:].partition(" ")
        if name not in COMMANDS:
            raise HeadraceError(f"there is no command /{name}; /help lists them, and // begins a message with a slash")
        COMMANDS[name][1](self, argument.strip())

    def _help(self, _: str) -> None:
        """List the commands."""
        rows = dict(COMMANDS.values())
        width = max(map(len, rows))
        _note("\n".join(f"{usage:<{width}}  {' '.join((run.__doc__ or '').split())}" for usage, run in rows.items()))

    def _reset(self, _: str) -> None:
        """Forget all but the system message."""
        self.messages = self.messages[:1] if self._system() is not None else []

    def _system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def _set_system(self, text: str) -> None:
        """Set the system message; without TEXT there is none."""
        rest = self.messages[1:] if self._system() is not None else self.messages
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def _set(self, argument: str) -> None:
        """Set a parameter of sampling; without a name, list them."""
        name, _, text = argument.partition(" ")
        if not name:
            _note("\n".join(f"{each} {json.dumps(getattr(self.params, each))}" for each in SETTINGS))
            return
        if name not in SETTINGS:
            raise HeadraceError(f"there is no setting {name}; there are {', '.join(SETTINGS)}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text  # a stop text without quotes
        self.params = msgspec.structs.replace(self.params, **{name: value})

    def _model(self, name: str) -> None:
        """Go on with another model; without NAME, name this one."""
        if name:
            self.source.switch(name)
        _note(self.source.model)

    def _save(self, file: str) -> None:
        """Write the messages to FILE, as JSON."""
        try:
            Path(file).write_text(json.dumps({"messages": self.messages}, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise HeadraceError(f"{file or 'FILE'}: {error.strerror}") from error

    def _load(self, file: str) -> None:
        """Go on with the messages of FILE."""
        try:
            saved = msgspec.json.decode(Path(file).read_bytes(), type=_Saved)
        except OSError as error:
            raise HeadraceError(f"{file or 'FILE'}: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise HeadraceError(f"{file}: not a saved conversation: {error}") from error
        self.messages = saved.messages

    def _quit(self, _: str) -> None:
        """End; so does Ctrl-D."""


class Pace:
    """When the text of one answer came."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._first: float | None = None

    def tick(self) -> None:
        """Note that some text came."""
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last

    def text(self, num_tokens: int) -> str:
        """Return the time to the first token, and the rate of those after it, in words."""
        if self._first is None:
            return "no text"
        words = f"first token after {self._first - self._start:.2f} s"
        if num_tokens > 1 and self._last > self._first:
            words = f"{num_tokens} tokens, {(num_tokens - 1) / (self._last - self._first):.1f} tok/s, {words}"
        return words


class _Saved(msgspec.Struct):
    """The file of /save."""

    messages: list[dict[str, str]]


COMMANDS: dict[str, tuple[str, Callable[[Conversation, str], None]]] = {
    "help": ("/help", Conversation._help),
    "reset": ("/reset", Conversation._reset),
    "system": ("/system [TEXT]", Conversation._set_system),
    "set": ("/set [NAME VALUE]", Conversation._set),
    "model": ("/model [NAME]", Conversation._model),
    "save": ("/save FILE", Conversation._save),
    "load": ("/load FILE", Conversation._load),
    "quit": ("/quit, /exit", Conversation._quit),
    "exit": ("/quit, /exit", Conversation._quit),
}


class _Page:
    """Prints an answer piece by piece. On a terminal, Markdown: whole blocks stay, the last one is drawn anew."""

    def __init__(self) -> None:
        self._rest = ""
        self._live: Any = None
        self._echo = contextlib.ExitStack()

    def __enter__(self) -> _Page:
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self._echo.enter_context(_no_echo())
            self._live = Live(console=Console(), transient=True, refresh_per_second=15)
            self._live.start()
        return self

    def write(self, piece: str) -> None:
        if self._live is None:
            sys.stdout.write(piece)
            sys.stdout.flush()
            return
        self._rest += piece
        for block in self._whole_blocks():
            self._print(block)
        self._live.update(self._drawn(self._rest))

    def __exit__(self, *_: object) -> None:
        if self._live is None:
            print()
            return
        self._live.update("")
        self._live.stop()
        self._echo.close()
        self._print(self._rest)

    def _print(self, block: str) -> None:
        from rich.markdown import Markdown

        if block.strip():
            self._live.console.print(Markdown(block))
            self._live.console.print()

    def _drawn(self, block: str) -> Any:
        """Return the visible form of an unfinished block: Markdown, or the last lines if it is longer than the
        screen."""
        from rich.markdown import Markdown
        from rich.text import Text

        console = self._live.console
        lines = Text(block).wrap(console, console.width)
        if len(lines) < console.height - 2:
            return Markdown(block)
        return Text("\n").join(lines[4 - console.height :])

    def _whole_blocks(self) -> Iterator[str]:
        """Take the blocks that an empty line ends; a fenced listing is one block."""
        is_fenced = False
        lines = self._rest.split("\n")
        start = 0
        for index, line in enumerate(lines[:-1]):
            is_fenced ^= line.lstrip().startswith(("```", "~~~"))
            if not is_fenced and not line.strip():
                yield "\n".join(lines[start:index])
                start = index + 1
        self._rest = "\n".join(lines[start:])


@contextlib.contextmanager
def _no_echo() -> Iterator[None]:
    """Keep the terminal from printing typed characters, such as ^C, into the text that is drawn anew."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _note(text: str, style: str = "") -> None:
    """Print a line that is no part of the conversation."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _lines(is_terminal: bool) -> Iterator[str]:
    if not is_terminal:
        yield from sys.stdin
        return
    with suppress(ImportError):  # editing and history, where Python was built with them
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:  # Ctrl-C at the prompt drops the line
            print()
        except EOFError:
            print()
            return
