"""`CrashReports` writes a file for each death of an engine, without a word or a token of a prompt.

A report has the reason, the stacks, the last steps as shapes, the open requests as ids and counts, the counters, the
versions and the configuration without its keys. A bounded number of files of bounded size, readable by their owner
alone. Called by `engine.replica`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace import __version__
from headrace.engine.open_requests import OpenRequest
from headrace.engine.records.black_box import BlackBox
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.step import EngineInfo, Stats

logger = logging.getLogger("headrace.engine")

MAX_REPORTS = 10
MAX_OPEN = 128
"""Open requests that a report describes; of further ones it has the number."""
MAX_STACK_LINES = 400
MAX_REPORT_BYTES = 2**18
PACKAGES = ("torch", "numpy", "msgspec", "llguidance", "starlette", "uvicorn", "tokenizers")
_PREFIX = "crash-"
# The server's own reasons. Any other text is an exception's message, which may quote a request.
_PLAIN = re.compile(r"(frozen: [\w .,]+|exit status -?\d+|the engine[\w' ]+(\(exit status -?\d+\))?)")


class CrashReports:
    """A folder of reports.

    Args:
        folder: made when it is first needed; "~" is the user's home.
        engine, server: the configuration, which is reported without keys.
    """

    def __init__(self, folder: str, engine: EngineConfig, server: ServerConfig) -> None:
        self.folder = Path(folder).expanduser()
        self._config = {"engine": without_keys(engine), "server": without_keys(server)}
        self._num = 0

    def write(
        self,
        reason: str,
        box: BlackBox | None,
        entries: Sequence[OpenRequest],
        info: EngineInfo | None,
        stats: Stats,
        total: Stats,
        num_restarts: int,
    ) -> Path | None:
        """Write a report and log its path. Returns None if that fails, which is logged too."""
        self._num += 1
        now = datetime.datetime.now(datetime.UTC)
        steps = [] if box is None else [msgspec.structs.asdict(step) for step in box.steps()]
        report: dict[str, Any] = {
            "headrace": __version__,
            "time": now.isoformat(timespec="milliseconds"),
            "reason": plain_reason(reason),
            "num_restarts": num_restarts,
            "versions": versions(),
            "machine": machine(),
            "config": self._config,
            "engine": info,
            "stats": stats,
            "total": total,
            "num_open": len(entries),
            "open": [shape_of(entry) for entry in entries[:MAX_OPEN]],
            "stacks": [] if box is None else box.stacks()[-MAX_STACK_LINES:],
            "unfinished_step": None if box is None else box.unfinished(),
            "monotonic_time": time.monotonic(),
            "steps": steps,
        }
        # A report that is too long loses its oldest steps first.
        while len(data := msgspec.json.format(msgspec.json.encode(report), indent=1)) > MAX_REPORT_BYTES:
            if not steps:
                report["open"], report["stacks"] = [], []
            report["steps"] = steps = steps[len(steps) // 2 + 1 :]
        name = f"{_PREFIX}{now:%Y%m%d-%H%M%S}-{os.getpid()}-{self._num}.json"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / name
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            for old in sorted(self.folder.glob(f"{_PREFIX}*.json"), key=_age)[:-MAX_REPORTS]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.error("no report of the death was written: %s", error)
            return None
        logger.error("a report of the death, without prompts, is in %s", path)
        return path


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except FileNotFoundError:  # another server of this user has just removed it
        return 0.0, path.name


def plain_reason(reason: str) -> str:
    """Return why the engine died, without quoting a request: of an exception only its kind."""
    if _PLAIN.fullmatch(reason):
        return reason
    kind = reason.partition(":")[0]
    return kind if re.fullmatch(r"[A-Za-z_]\w{0,80}( in the server)?", kind) else "an exception"


def without_keys(config: EngineConfig | ServerConfig) -> dict[str, Any]:
    """Return the fields of a config that differ from the default; of keys only that they are set."""
    fields = {}
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            fields[field.name] = "set" if "key" in field.name else value
    return fields


def shape_of(entry: OpenRequest) -> dict[str, Any]:
    """Return the description of an open request."""
    request = entry.request
    return {
        "request_id": request.request_id,
        "call_id": entry.stream.call_id,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "num_delivered": len(entry.delivered),
        "max_tokens": request.params.max_tokens,
        "temperature": request.params.temperature,
        "is_constrained": request.params.structured_outputs is not None,
        "is_beam_search": request.beam is not None,
        "is_started": entry.started,
        "is_told": entry.is_sent,
        "num_strikes": entry.num_strikes,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, the system, and the packages that matter to an engine."""
    by_name = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for name in PACKAGES:
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            by_name[name] = "not installed"
    return by_name


def machine() -> dict[str, Any]:
    """Return the number of processors, the load and the memory, in bytes."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "architecture": platform.machine(),
        "num_cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "total_bytes": memory.total,
        "available_bytes": memory.available,
    }
