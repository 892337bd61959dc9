"""The checks of `headrace doctor`: a verdict for each known cause of trouble, with its remedy.

They use the report of `doctor.examine`, and examine further things: a port, limits of the process, quotas, earlier
crashes. They change nothing. Called by `cli.doctor`.
"""

from __future__ import annotations

import datetime
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace import env
from headrace.doctor import formatted
from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import HeadraceError
from headrace.serve.gates.accept import MAX_RAISED_FILES
from headrace.serve.gates.connection import SPARE_FILES

MIN_FILES = 256
ENOUGH_FILES = 1088
"""1024 connections and other open files."""
LOW_MEMORY_BYTES = 2**30
LOW_DISK_BYTES = 2**30
RECENT_S = 86400.0
CGROUP = Path("/sys/fs/cgroup")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")

Report = dict[str, dict[str, Any]]


class Check(msgspec.Struct, frozen=True):
    """`verdict` is ok, warn (it works, but slowly or not for long) or bad (it does not work). `advice` names the
    remedy, unless it is ok."""

    name: str
    verdict: str
    found: str
    advice: str = ""

    @classmethod
    def warn_if(cls, has_problem: bool, name: str, text: str, advice: str) -> Check:
        """Return a warning with its advice, or that all is well."""
        return cls(name, "warn", text, advice) if has_problem else cls(name, "ok", text)


def check_all(report: Report, host: str, port: int) -> list[Check]:
    """Run every check. A check that raises an error becomes a warning, and the others run all the same."""
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("native kernels", lambda: native(report)),
        ("processors", lambda: processors(report)),
        ("memory", lambda: memory(report)),
        ("model", lambda: model(report)),
        ("port", lambda: listening(host, port)),
        ("limits", limits),
        ("disk", disk),
        ("settings", lambda: settings(report)),
        ("crashes", crashes),
    ]
    checks: list[Check] = []
    for name, part in parts:
        try:
            checks += part()
        except (HeadraceError, OSError, ValueError, KeyError) as error:
            checks.append(Check(name, "warn", f"could not be found out: {error}", "tell us, with what this printed"))
    return checks


def is_bad(checks: list[Check]) -> bool:
    return any(check.verdict == "bad" for check in checks)


def native(report: Report) -> Iterator[Check]:
    state = report["native"]
    if "problem" in state:
        remedy = "install a C++17 compiler and install headrace again; until then it computes with torch, slowly"
        if env.isa() is not None:
            remedy = "unset HEADRACE_ISA"
        verdict = "bad"
        if report["backends"].get("default") == "cuda":
            verdict, remedy = "warn", f"none for backend cuda, which runs here; for --backend cpu: {remedy}"
        yield Check("native kernels", verdict, state["problem"], remedy)
        return
    best = state["isas"][-1]
    yield Check("native kernels", "ok", f"{', '.join(state['isas'])}; {state['threads']} threads")
    if best == "scalar" and env.isa() is None:
        advice = "none: the results are the same, and slow; a processor with AVX2 is many times as fast"
        yield Check("instruction set", "warn", "this processor has none that there are kernels for", advice)
    elif env.isa() is not None:
        yield Check("instruction set", "warn", f"HEADRACE_ISA={env.isa()}", "unset HEADRACE_ISA to use the best one")
    else:
        yield Check("instruction set", "ok", best)


def processors(report: Report) -> Iterator[Check]:
    cpu = report["cpu"]
    allowed, load = cpu["cores_allowed"], cpu["load_1min"]
    quota = cpu_quota(CGROUP / "cpu.max")
    if quota is not None and quota < allowed:
        advice = (
            f"give --num-threads {max(1, int(quota))}: with more, all threads stand still when the share is used up"
        )
        yield Check("processors", "warn", f"{allowed} cores, but a quota of {quota:g}", advice)
    else:
        yield Check("processors", "ok", f"{allowed} cores")
    is_loaded = load > 0.75 * allowed
    advice = "see with top what else computes; each step waits for its slowest thread"
    yield Check.warn_if(is_loaded, "load", f"{load:g} on {allowed} cores" if is_loaded else f"{load:g}", advice)
    if GOVERNOR.is_file() and GOVERNOR.read_text().strip() == "powersave":
        yield Check("frequency", "warn", "powersave", "cpupower frequency-set -g performance")


def cpu_quota(path: Path) -> float | None:
    """Return the number of cores that the control group may use, or None for no bound."""
    if not path.is_file():
        return None
    share, _, period = path.read_text().partition(" ")
    return int(share) / int(period) if share.isdigit() else None


def memory(report: Report) -> Iterator[Check]:
    import psutil

    state = report["memory"]
    free = state["available_bytes"]
    limit = state.get("cgroup_limit_bytes")
    if limit is not None:
        used = CGROUP / "memory.current"
        free = min(free, limit - (int(used.read_text()) if used.is_file() else 0))
    weights = report["model"].get("weight_bytes", 0)
    text = f"{formatted('_bytes', free)} free, the weights have {formatted('_bytes', weights)}"
    if weights > free:
        advice = "quantise (--quantization int4), take a smaller model, or end what else holds memory"
        yield Check("memory", "bad", text, advice)
    elif free < max(LOW_MEMORY_BYTES, 1.25 * weights):
        advice = "bound the cache with --kv-cache-memory-bytes, or the system will kill the engine when it fills"
        yield Check("memory", "warn", text, advice)
    else:
        yield Check("memory", "ok", text)
    swap = psutil.swap_memory()
    if swap.total and swap.used > max(2**28, 0.25 * swap.total):
        advice = "end what fills the memory: weights that are swapped out make each step wait for the disk"
        yield Check("swap", "warn", f"{swap.used / 2**30:.1f} GiB in use", advice)


def model(report: Report) -> Iterator[Check]:
    state = report["model"]
    if "problem" in state:
        advice = "give a directory with config.json and *.safetensors, a .gguf file, a hub id, or builtin"
        yield Check("model", "bad", state["problem"], advice)
        return
    kind, kinds = state.get("model_type"), report["backends"]["models"]
    if "file" not in state and kind not in kinds:
        yield Check("model", "bad", f"model_type {kind}", f"one of {', '.join(kinds)}; docs/howto-add-a-model.md")
    elif not state.get("weight_bytes"):
        yield Check("model", "bad", "no weights", "fetch the model's *.safetensors")
    else:
        yield Check("model", "ok", f"{state['name']}: {kind}, {state.get('num_parameters', 0):,} parameters")
    has_tokenizer = bool(state.get("tokenizer"))
    text = "there" if has_tokenizer else "none"
    yield Check.warn_if(not has_tokenizer, "tokenizer", text, "give --tokenizer, or send token ids for prompts")


def listening(host: str, port: int) -> Iterator[Check]:
    """Check whether a server could listen on this address."""
    name = f"{host} port {port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except PermissionError:
        yield Check("port", "bad", f"{name} needs rights", "give --port a number of 1024 or more")
    except OSError as error:
        advice = "if that is not your headrace, give another --port; a wrong --host shows here too"
        yield Check("port", "warn", f"{name}: {error.strerror}", advice)
    else:
        yield Check("port", "ok", f"{name} is free")


def limits() -> Iterator[Check]:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The server raises the limit when it starts.
    raised = MAX_RAISED_FILES if most == resource.RLIM_INFINITY else min(most, MAX_RAISED_FILES)
    files = soft if soft == resource.RLIM_INFINITY else max(soft, raised)
    text = (
        "no bound" if files == resource.RLIM_INFINITY else f"{files} open files, {max(0, files - SPARE_FILES)} clients"
    )
    verdict = "ok" if files == resource.RLIM_INFINITY or files >= ENOUGH_FILES else "warn"
    if verdict == "warn" and files < MIN_FILES:
        verdict = "bad"
    advice = "raise nofile in /etc/security/limits.conf, or LimitNOFILE in the unit"
    yield Check("open files", verdict, text, "" if verdict == "ok" else advice)
    for name, what in (("RLIMIT_AS", "address space"), ("RLIMIT_DATA", "data")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            advice = "ulimit -v unlimited; ulimit -d unlimited: bound the memory with --kv-cache-memory-bytes instead"
            yield Check(what, "warn", f"{soft / 2**30:.1f} GiB", advice)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes != resource.RLIM_INFINITY and processes < MIN_FILES:
        yield Check("processes", "bad", f"{processes}", "ulimit -u 4096: threads count too")


def disk() -> Iterator[Check]:
    """Check the disk of packed weights, crash reports and the built-in model."""
    folder = Path.home() / ".cache"
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    advice = "make room: packed weights, crash reports and the built-in model go there"
    yield Check.warn_if(free < LOW_DISK_BYTES, "disk", f"{free / 2**30:.1f} GiB free in {folder}", advice)


def settings(report: Report) -> Iterator[Check]:
    """Check the environment for settings that slow the engine down or mislead."""
    checks = []
    level = env.debug_level()
    if level >= 2:
        checks.append(Check("HEADRACE_DEBUG", "warn", str(level), "unset it: every step is checked, which is slow"))
    if (policy := env.tame_openmp()) != "passive":
        advice = "unset it: torch's threads spin, and a step can take 100 times as long"
        checks.append(Check("OMP_WAIT_POLICY", "warn", policy, advice))
    if report["hub"]["offline"] and "problem" in report["model"]:
        checks.append(Check("HF_HUB_OFFLINE", "warn", "set", "unset it, so that the model can be fetched"))
    yield from checks or [Check("settings", "ok", "none that is known to harm")]


def crashes() -> Iterator[Check]:
    """Check for reports of the engine's deaths in their default folder."""
    folder = Path(ServerConfig().crash_report_dir).expanduser()
    reports = sorted(folder.glob("crash-*.json"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    if not reports:
        yield Check("crashes", "ok", f"no report in {folder}")
        return
    newest = reports[-1]
    at = newest.stat().st_mtime
    text = f"{len(reports)} reports, the last of {datetime.datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"
    yield Check.warn_if(time.time() - at < RECENT_S, "crashes", text, f"read {newest}")


def show(checks: list[Check]) -> None:
    """Print the verdicts, the worst last, where they are not scrolled away."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    colours = {"ok": "green", "warn": "yellow", "bad": "red"}
    for check in sorted(checks, key=lambda check: list(colours).index(check.verdict)):
        console.print(Text.assemble((f"{check.verdict:<5}", colours[check.verdict]), f"{check.name}: {check.found}"))
        if check.advice:
            console.print(Text(f"     -> {check.advice}"))
