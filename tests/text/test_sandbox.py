"""The template's sandbox: nothing gets out of it (S-07), nothing outlasts its bounds (S-08)."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import jinja2
import psutil
import pytest

import headrace
from headrace.protocol.errors import RequestError
from headrace.text import sandbox
from headrace.text.bounded import BoundedProcess
from headrace.text.templates import ChatTemplate
from headrace.text.traits import MAX_CALL, Traits

USER = {"role": "user", "content": "hi"}

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.name }}",
    "{{ joiner.__init__.__globals__.os.name }}",
    "{{ namespace.__init__.__globals__.os.name }}",
    "{{ namespace().__class__.__init__.__globals__ }}",
    "{{ lipsum.__globals__.os.name }}",
    "{{ lipsum.__globals__['os']['name'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.name }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ()|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set f = '{0.__init__.__globals__}'.format %}{{ f(cycler) }}",
    "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "{{ ['{0.__class__}'.format]|map('list')|list }}{{ ['{0.__class__}'.format][0](1) }}",
    "{{ '%s'.__mod__(cycler.__init__.__globals__) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__.sys.modules['os'].name }}",
    "{{ strftime_now.__code__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ dict.mro() }}",
    "{{ range.__class__.__mro__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = ''.__class__ %}{{ ns.__class__ }}",
    "{% for a in [1] %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__class__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._environment.globals }}",
    "{{ messages.__class__ }}",
    "{{ messages.append(1) }}{{ messages|length > 1 and '<class' }}",
    "{{ messages[0].update({'role': '<class'}) }}{{ messages[0].role }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [1]|groupby('__class__') }}",
    "{{ [[1]]|sum(attribute='__class__', start=[]) }}",
    "{{ [1]|map('attr', '__class__')|list }}",
    "{{ 1 .__class__ }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}{{ p }}",
    "{% extends '/etc/passwd' %}",
]
MARKS = ["<class", "posix", "__globals__", "<module", "<function", "root:", "<code", "object at", "__builtins__"]


@pytest.fixture(scope="module")
def runner() -> Iterator[BoundedProcess]:
    bounded_process = BoundedProcess(sandbox.__name__, 0.3)
    yield bounded_process
    bounded_process.close()


def rendered(source: str, runner: BoundedProcess) -> str:
    return ChatTemplate({"default": source}, {}, runner).render([USER])


@pytest.mark.parametrize("source", ESCAPES)
def test_S_07_nothing_gets_out(source: str, runner: BoundedProcess) -> None:
    try:
        text = rendered(source, runner)
    except RequestError:
        return
    assert not any(mark in text for mark in MARKS)


def test_S_07_control_the_payloads_work_without_the_sandbox() -> None:
    open_environment = jinja2.Environment(loader=jinja2.FileSystemLoader("/"))
    open_environment.globals.update(raise_exception=rendered, strftime_now=rendered)
    got_out = 0
    for source in ESCAPES:
        try:
            text = open_environment.from_string(source).render(messages=[dict(USER)])
        except Exception:  # An attack that needs more than an open environment; only the count matters.
            continue
        got_out += any(mark in text for mark in MARKS)
    assert got_out >= 30


def test_S_07_only_the_sandbox_knows_jinja() -> None:
    root = Path(headrace.__file__).parent
    using = {str(path.relative_to(root)) for path in root.rglob("*.py") if "import jinja2" in path.read_text()}
    assert using == {"text/sandbox.py"}


DEEP = "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
DEEP += "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
TWICE = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{{ range(10**9)|list }}",
    "string product": "{{ 'a' * 10**10 }}",
    "list product": "{{ ([0] * 10**9)|length }}",
    "power": "{{ 9**(9**9) }}",
    "power at run time": "{% set n = messages|length + 8 %}{{ n**(n**n) }}",
    "shared lists, printed": DEEP + "{{ ns.x }}",
    "shared lists, as JSON": DEEP + "{{ ns.x|tojson }}",
    "shared lists, compared": DEEP + "{{ ns.x == ns.y }}",
    "doubling": TWICE + "{{ ns.x }}",
    "hoarding": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x + ['%d' % i ~ 'a' * 10**6] %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "center": "{{ 'a'|center(10**10) }}",
    "width": "{{ '%09999999999d' % 1 }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "indent": "{{ ('a\n' * 10**6)|indent(10**5) }}",
    "JSON indent": "{{ [[1]]|tojson(indent=10**10) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "parentheses": "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
    "lists": "{{ " + "[" * 6000 + "]" * 6000 + " }}",
    "blocks": "{% for a in [1] %}" * 300 + "{% endfor %}" * 300,
    "source": "x" * (sandbox.MAX_SOURCE + 1),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BOMBS)
def test_S_08_bombs_are_stopped(name: str, runner: BoundedProcess) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(RequestError, match="the chat template takes; it says"):
        rendered(BOMBS[name], runner)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time of the process, if it had to be killed, with its start and earlier renderings: seconds on a loaded
    # machine, where a bomb that nothing stops takes minutes.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
    assert rendered("{{ messages[0].content }}", runner) == "hi", "the next rendering is not harmed"


def test_S_08_control_the_bound_on_time_is_what_stops_a_loop(runner: BoundedProcess) -> None:
    with pytest.raises(RequestError, match=r"more than 0\.3 s of processor time"):
        rendered(BOMBS["nested loops"], runner)


def test_S_08_deep_variables_are_refused(runner: BoundedProcess) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="not too deep"):
        ChatTemplate({"default": "x"}, {}, runner).render([USER], documents=deep)
    with pytest.raises(RequestError, match="plain JSON"):
        ChatTemplate({"default": "x"}, {}, runner).render([USER], documents=[2**70])
    with pytest.raises(RequestError, match="plain JSON"):
        ChatTemplate({"default": "x"}, {}, runner).render([USER], documents=[object()])


def test_S_08_others_go_on_beside_a_bomb(runner: BoundedProcess) -> None:
    bounded_process = BoundedProcess(
        sandbox.__name__, sandbox.MAX_CPU_SECONDS
    )  # with the whole second that a server gives
    done = threading.Event()

    def explode() -> None:
        with pytest.raises(RequestError):
            rendered(BOMBS["nested loops"], bounded_process)
        done.set()

    thread = threading.Thread(target=explode)
    thread.start()
    num_rendered = 0
    while not done.is_set():
        assert rendered("{{ messages[0].content }}", runner) == "hi"
        num_rendered += 1
    thread.join()
    bounded_process.close()
    assert num_rendered > 50, "another runner's jobs do not wait for it"


def test_threads_share_a_runner(runner: BoundedProcess) -> None:
    wrong = []

    def work(word: str) -> None:
        template = ChatTemplate({"default": "{{ messages[0].content }}" + word}, {}, runner)
        wrong.extend(text for _ in range(50) if (text := template.render([USER])) != "hi" + word)

    threads = [threading.Thread(target=work, args=(f" {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_killed_process_is_started_again(runner: BoundedProcess) -> None:
    assert rendered("x", runner) == "x"
    first = runner.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert rendered("y", runner) == "y"
    assert runner.pid != first


def test_closing_ends_the_process() -> None:
    bounded_process = BoundedProcess(sandbox.__name__, sandbox.MAX_CPU_SECONDS)
    assert rendered("x", bounded_process) == "x"
    pid = bounded_process.pid
    assert pid is not None
    bounded_process.close()
    assert not psutil.pid_exists(pid)
    bounded_process.close()


def test_large_prompts_pass(runner: BoundedProcess) -> None:
    text = "é" * 10**6
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {}, runner)
    assert template.render([{"role": "user", "content": text}]) == text


def test_S_08_traits_are_found_within_the_same_bounds(runner: BoundedProcess, caplog: pytest.LogCaptureFixture) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with caplog.at_level(logging.WARNING, "headrace.server"):
        assert ChatTemplate({"default": endless}, {}, runner).traits() == Traits()
    assert "more than 0.3 s of processor time" in caplog.text
    long = (
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments }}{{ 'x' * 99999 }}{% endfor %}"
    )
    assert len(ChatTemplate({"default": long}, {}, runner).traits().call) == MAX_CALL
