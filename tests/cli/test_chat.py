"""`headrace chat`: commands, interrupts and errors of a conversation, and Markdown on a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli import conversation
from headrace.cli.chat import Local, Remote
from headrace.cli.conversation import Conversation, Message
from headrace.cli.remote import authorization
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams


class Echo:
    """A source that answers with the last message, a word a piece, and notes the requests."""

    is_interruptible = True

    def __init__(self) -> None:
        self.model = "echo"
        self.num_tokens = 0
        self.requests: list[tuple[list[Message], SamplingParams]] = []
        self.is_closed = False

    def switch(self, model: str) -> None:
        self.model = model

    def answer(self, messages: list[Message], params: SamplingParams) -> Generator[str]:
        self.requests.append(([*messages], params))
        try:
            for word in str(messages[-1]["content"]).split():
                if word == "^C":
                    os.kill(os.getpid(), signal.SIGINT)
                elif word == "fail":
                    raise HeadraceError("the source failed")
                else:
                    self.num_tokens += 1
                    yield f"{word} "
        finally:
            self.is_closed = True


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Conversation]:
    """Hold a conversation of these lines with an `Echo`, as if they were typed."""

    def call(*lines: str, system: str | None = None, terminal: bool = True) -> Conversation:
        typed = iter(lines)

        def read(_: str) -> str:
            for line in typed:
                if line == "^C":
                    raise KeyboardInterrupt
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", Terminal() if terminal else io.StringIO("".join(f"{x}\n" for x in lines)))
        session = Conversation(Echo(), SamplingParams(max_tokens=8), system)
        session.run()
        return session

    return call


def contents(session: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in session.messages]


@pytest.mark.parametrize("interruptible", [True, False])
def test_ctrl_c_stops_the_answer_and_not_the_program(
    talk: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch, interruptible: bool
) -> None:
    monkeypatch.setattr(Echo, "is_interruptible", interruptible)
    before = signal.getsignal(signal.SIGINT)
    session = talk("one two ^C three four", "^C", "five")
    stopped = "one two "
    expected = [("user", "one two ^C three four"), ("assistant", stopped), ("user", "five"), ("assistant", "five ")]
    assert contents(session) == expected
    assert isinstance(session.source, Echo)
    assert session.source.is_closed, "the source ends what was stopped"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_ends_its_turn_only(talk: Callable[..., Conversation], capsys: pytest.CaptureFixture[str]) -> None:
    session = talk("well fail", "again")
    assert contents(session) == [("user", "again"), ("assistant", "again ")]
    assert "headrace: the source failed" in capsys.readouterr().err
    with pytest.raises(HeadraceError, match="the source failed"):
        talk("well fail", "again", terminal=False)


def test_commands_do_not_reach_the_model(talk: Callable[..., Conversation], capsys: pytest.CaptureFixture[str]) -> None:
    session = talk(
        "/help", "/reboot", "//home", "/set top_k 5", "/set stop END", "/set", "/set top_k -7", "/set nope 1", "x"
    )
    assert isinstance(session.source, Echo)
    assert [messages[-1]["content"] for messages, _ in session.source.requests] == ["/home", "x"]
    assert session.source.requests[-1][1] == SamplingParams(max_tokens=8, top_k=5, stop=["END"])
    printed = capsys.readouterr().err
    for usage, _ in conversation.COMMANDS.values():
        assert usage in printed
    for words in ("no command /reboot", "top_k 5", "top_k: -7 is not allowed", "no setting nope"):
        assert words in printed


def test_exit_ends_a_conversation_as_quit_does(talk: Callable[..., Conversation]) -> None:
    for word in ("/quit", "/exit"):
        assert contents(talk("a", word, "b")) == [("user", "a"), ("assistant", "a ")]


def test_system_reset_and_model(talk: Callable[..., Conversation]) -> None:
    session = talk("a", "/system Be brief.", "b", "/reset", "c", "/model other", system="Be long.")
    assert isinstance(session.source, Echo)
    assert [[m["content"] for m in messages] for messages, _ in session.source.requests] == [
        ["Be long.", "a"],
        ["Be brief.", "a", "a ", "b"],
        ["Be brief.", "c"],
    ]
    assert session.source.model == "other"
    assert contents(talk("a", "/system", system="Be long.")) == [("user", "a"), ("assistant", "a ")]


def test_a_saved_conversation_goes_on(
    talk: Callable[..., Conversation], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kept.json"
    first = talk("a", f"/save {file}", system="Be long.")
    assert talk(f"/load {file}").messages == first.messages
    (tmp_path / "other.json").write_text(json.dumps({"messages": [{"role": 1}]}))
    talk(f"/load {tmp_path / 'other.json'}", f"/load {tmp_path}", f"/save {tmp_path}", "/save")
    printed = capsys.readouterr().err
    assert "not a saved conversation" in printed
    assert printed.count("Is a directory") + printed.count("No such file") == 3


def test_a_terminal_shows_markdown_wrapped_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setenv("TERM", "dumb")  # 80 columns, and nothing is drawn twice
    with conversation._Page() as page:
        for piece in (
            "Some **bold** wor",
            "ds, " + "and more words " * 5 + ".\n",
            "\n```\n",
            "a = 1\n\nb = 2\n```\n\nend",
        ):
            page.write(piece)
    lines = [line.strip() for line in screen.getvalue().splitlines() if line.strip()]
    assert lines == ["Some bold words, " + "and more words " * 4 + "and", "more words .", "a = 1", "b = 2", "end"]


def test_a_listing_is_one_block_whatever_empty_lines_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    blocks: list[str] = []
    monkeypatch.setattr("rich.markdown.Markdown", lambda text: blocks.append(text) or text)
    with conversation._Page() as page:
        page.write("one\n\n```\na = 1\n\nb = 2\n```\n\ntwo\n")
        assert blocks == ["one", "```\na = 1\n\nb = 2\n```", "two\n"]


def test_elsewhere_text_is_written_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    with conversation._Page() as page:
        page.write("**bold**\n\n")
        page.write("more")
    assert capsys.readouterr().out == "**bold**\n\nmore\n"


def test_of_several_keys_of_the_environment_the_first_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", " first second ")
    assert authorization(None) == {"Authorization": "Bearer first"}
    assert authorization("another") == {"Authorization": "Bearer another"}
    monkeypatch.setenv("HEADRACE_API_KEY", " ")
    assert authorization(None) == {}


@pytest.mark.parametrize(("key", "words"), [(None, "it needs a key"), ("wrong", "its key was not accepted")])
def test_a_server_that_wants_a_key_is_there(monkeypatch: pytest.MonkeyPatch, key: str | None, words: str) -> None:
    import httpx

    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    monkeypatch.setattr(httpx.Client, "get", lambda *_, **__: httpx.Response(401, json={}))
    with pytest.raises(HeadraceError, match=f"{words}; give it in HEADRACE_API_KEY"):
        Remote("http://127.0.0.1:9", None, key)


def test_an_error_reply_is_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "top_k: too small"}})

    client: Any = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **_: client(transport=httpx.MockTransport(refuse)))
    with pytest.raises(HeadraceError, match="answered 400: top_k: too small$"):
        list(Remote("http://server", "m", None).answer([], SamplingParams()))


def test_on_a_terminal_each_answer_has_its_pace(
    talk: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([10.0, 10.25, 10.5, 10.75])
    monkeypatch.setattr(conversation, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with monkeypatch.context() as terminal:
        terminal.setattr(sys, "stdout", Terminal())
        terminal.setenv("TERM", "dumb")
        talk("one two three", terminal=False)
    assert "3 tokens, 4.0 tok/s, first token after 0.25 s" in capsys.readouterr().err
    times = iter([0.0, 1.0, 2.0])
    talk("one two", terminal=False)
    assert "token" not in capsys.readouterr().err
    # Of a server that does not count, and of an answer without text.
    times = iter([0.0, 1.5, 0.0])
    pace = conversation.Pace()
    pace.tick()
    assert pace.text(0) == "first token after 1.50 s"
    assert conversation.Pace().text(1) == "no text"


def test_a_servers_count_of_tokens_is_its_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    first = {"choices": [{"delta": {"content": "a b"}}], "usage": None}
    events = [first, {"choices": [], "usage": {"completion_tokens": 7}}]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["stream_options"] == {"include_usage": True}
        return httpx.Response(200, text=text)

    client: Any = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **_: client(transport=httpx.MockTransport(answer)))
    remote = Remote("http://server", "m", None)
    assert "".join(remote.answer([], SamplingParams())) == "a b"
    assert remote.num_tokens == 7


@pytest.mark.parametrize(
    ("body", "temperature"),
    [('{"default_generation_settings": {"params": {"temperature": 0.3}}}', 0.3), ("{}", 0.8), ("no JSON", 0.8)],
)
def test_a_servers_defaults_are_its_own_or_llama_servers(
    body: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    answer = httpx.Response(200, text=body, request=httpx.Request("GET", "http://server/props"))
    monkeypatch.setattr(httpx.Client, "get", lambda *_, **__: answer)
    expected = {"temperature": temperature, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert Remote("http://server", "m", None).defaults() == expected


def test_the_models_advice_precedes_the_defaults_of_a_chat() -> None:
    with closing(Local(EngineConfig(model="builtin"))) as source:
        assert source.defaults() == {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
