"""Fixtures that every tier may use, and the count per tier that is printed before pytest's own closing line."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A process that a test starts reads the compiled modules which the first one left, and so does the next run of pytest;
# to compile them costs more than many tests.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# No test calls a server through TLS, and httpx loads the certificates for each client, which takes longer than most
# calls. A folder is looked into when one is needed.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch: processes that share the cores already have nothing to gain from a second thread each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import headrace  # noqa: F401 (before torch: it says how the threads of torch wait)

ROOT = Path(__file__).resolve().parents[1]

# No deadline: the machine may be shared, and a slow moment is not a bug. In CI the examples are the same every time,
# so that a change is judged by what it did; everywhere else they are new ones, and so the search goes on.
hypothesis.settings.register_profile("house", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("house")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data folder beside the repository (real checkpoints, tokenizers, corpora); the test is skipped without it."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no ../shared/data beside the repository")
    return path


@pytest.fixture(scope="session")
def model() -> str:
    """A model that is always there: the built-in one."""
    return "builtin"


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A test that sets up the server's logging leaves the logger as it was: others read what is logged."""
    logger = logging.getLogger("headrace")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def pytest_collection_finish() -> None:
    """Let the loggers of torch hand on what is logged: pytest attaches its handlers, six times in a test, to each that
    does not, and there are fifty."""
    for name, logger in logging.Logger.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave the modules and the items out of what the garbage collector walks: they stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Leave out too what the tests of a file have imported and cached: models of transformers, trees of all sources. A
    walk takes a second with them, and there are many walks."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


_places: dict[pytest.Item, int] = {}
"""The order in which tests were collected, whatever a plugin makes of it."""


def pytest_itemcollected(item: pytest.Item) -> None:
    _places[item] = len(_places)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave all but every n-th case of a test with `sampled(n)` to the slow tests; `sampled(n, first)` counts from that
    case, so that several tests share the values of a parameter. With an n that shares no factor with the number of
    values of an inner parameter, each value of each parameter is in the sample.

    The tests of a file that is marked `in_order` stay in its order where a plugin shuffles the others.
    """
    num_cases: Counter[tuple[str, str]] = Counter()
    steps: dict[Path, list[pytest.Item]] = {}
    for item in sorted(items, key=_places.__getitem__):
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0], str(mark.args)
            every, first = (*mark.args, 0)[:2]
            if num_cases[name] % every != first:
                item.add_marker("slow")
            num_cases[name] += 1
        if item.get_closest_marker("in_order"):
            steps.setdefault(item.path, []).append(item)
    left = {path: iter(each) for path, each in steps.items()}
    items[:] = [next(left[item.path]) if item.path in left else item for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a worker of pytest-xdist reports travels as UTF-8, which what a test logs may not be."""
    return encodable((yield))


def encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {key: encodable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(encodable(each) for each in value)
    return value


_counts: dict[str, Counter[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    tier = file.split("/")[1] if file.count("/") > 1 else "other"
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        outcome = "error" if report.when == "setup" and report.failed else report.outcome
        _counts.setdefault(tier, Counter())[outcome] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for tier, outcomes in sorted(_counts.items()):
        output = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        terminalreporter.write_line(f"{tier:<9} {output}")
