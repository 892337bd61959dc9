"""Describes this machine and this installation: versions, CPU, memory, kernels, backends, model, hub. Printed by
`headrace doctor`, and meant to be pasted into a bug report.

Each section is examined alone; one that fails reports why and does not hide the rest. Changes nothing, fetches
nothing, and loads no model. Knows no engine.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import pkgutil
import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace import env, gguf, hub
from headrace.checkpoint.mapped import MappedFile
from headrace.protocol.errors import HeadraceError
from headrace.quant.base import stated_activations
from headrace.quant.threads import num_cores

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = ("numpy", "tokenizers", "huggingface_hub", "starlette", "uvicorn", "msgspec", "torch")
# The flags of /proc/cpuinfo that kernels can use; the rest is left out. asimddp is what ARM calls dotprod.
CPU_FLAGS = (
    "avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 asimd asimddp i8mm bf16 sve svei8mm sve2"
).split()
ACTIVATIONS = (
    "int8 (W8A8), 16 bits (W8A16) for the matrices that int8 spoils, as measured at load; --activations sets it"
)
STATED_ACTIVATIONS = {
    "16bit": "16 bits (W8A16), as the checkpoint's method keeps outliers so; --activations int8 is faster",
    "fp8": "16 bits on the CPU; the checkpoint states fp8, which torch_ref computes with --activations fp8",
    "int8 by row": "16 bits (W2A16); the checkpoint's method rounds each row to int8",
}
"""By the activations with which a checkpoint's method multiplies (`quant.base.stated_activations`)."""
NEEDS_TORCH = "only the reference backend, GPUs and headrace quantize need it"
PROBE_BYTES = 2**30  # well above any last-level cache

# By measured quantity: its unit for people, and how many plain units (bytes, operations) that is.
LIMITS = {"read": ("GB/s", 1e9), "int8": ("TOPS", 1e12), "f32": ("GFLOPS", 1e9)}

Section = dict[str, Any]


def examine(model: str = "builtin", *, probe_bytes: int | None = None) -> dict[str, Section]:
    """Return the report of `headrace doctor`, as JSON-ready sections. Bytes are plain numbers, rates in GB/s (1e9).

    Args:
        model: the one to look for; a hub id is looked up in the local cache only.
        probe_bytes: size of the buffer whose read speed is measured, `PROBE_BYTES` for None; 0 leaves the measurement
            out.
    """
    return {
        "versions": versions(),
        "cpu": cpu(),
        "memory": memory(PROBE_BYTES if probe_bytes is None else probe_bytes),
        "native": native_state(),
        "torch": torch_state(),
        "triton": triton_state(),
        "backends": backends(),
        "model": model_state(model),
        "hub": hub_state(),
        "environment": environment(),
    }


def versions() -> Section:
    section: Section = {"headrace": headrace.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            section[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            section[name] = "not installed"
    return section | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}


def cpu(path: Path = Path("/proc/cpuinfo")) -> Section:
    """Return name, cores, nodes of memory and vector extensions. On systems without /proc/cpuinfo the latter are left
    empty."""
    import psutil

    from headrace.fleet.engines.local import allowed, nodes_of

    text = path.read_text(errors="replace") if path.exists() else ""
    # Linux on ARM has numbers in place of a name.
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    numbers = dict(re.findall(r"^CPU (implementer|part)\s*: (\w+)$", text, re.MULTILINE))
    other = ", ".join(f"{what} {number}" for what, number in numbers.items()) or platform.processor()
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    nodes = nodes_of(allowed())
    return {
        "name": name[1] if name else other,
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(logical=True),
        "cores_allowed": sum(map(len, nodes)),
        "memory_nodes": len(nodes) if len(nodes) < 2 else f"{len(nodes)}: {placement(nodes)}",
        "features": [flag for flag in CPU_FLAGS if flags and flag in flags[1].split()],
        "load_1min": round(os.getloadavg()[0], 2),
    }


def placement(nodes: list[list[int]]) -> str:
    """Return how engines are placed on several nodes of memory, each of which has some of the processors."""
    each = ", ".join(f"{len(node)} processors from {min(node)}" for node in nodes)
    return f"{each}; weights of one node are read slowly from another: --data-parallel-size auto has an engine on each"


def huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str:
    """Return whether the weights lie on huge pages, which are asked for: of small ones a processor's table of pages
    holds a few MB."""
    if not path.exists():
        return "not told by this system"
    chosen = re.search(r"\[(\w+)\]", path.read_text(errors="replace"))
    if chosen and chosen[1] in ("always", "madvise"):
        return f"{chosen[1]}: the weights lie on them"
    return f"{chosen[1] if chosen else 'unknown'}: the weights lie on small pages; as root: echo madvise > {path}"


def memory(probe_bytes: int) -> Section:
    import psutil

    now = psutil.virtual_memory()
    section: Section = {"total_bytes": now.total, "available_bytes": now.available}
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        section["cgroup_limit_bytes"] = int(text)
    section["huge_pages"] = huge_pages()
    if probe_bytes:
        section["read_gb_per_s"] = round(read_bandwidth(probe_bytes), 1)
        section["read_probe_bytes"] = probe_bytes
    return section


def read_bandwidth(num_bytes: int, repeats: int = 5) -> float:
    """GB/s at which a thread for each core reads its part of one buffer, best of `repeats`: a quick lower bound of the
    machine's."""
    import numpy as np

    buffer = np.ones(max(1, num_bytes // 8), np.int64)
    pieces = np.array_split(buffer, num_cores())
    best = math.inf
    with ThreadPoolExecutor(len(pieces)) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.ndarray.max, pieces))
            best = min(best, time.perf_counter() - start)
    return buffer.nbytes / best / 1e9


def torch_state() -> Section:
    """Describe torch, which the reference backend, GPUs and `headrace quantize` need."""
    if importlib.util.find_spec("torch") is None:
        return {"installed": f"no; {NEEDS_TORCH}: pip install 'headrace[torch]'"}
    import torch

    section: Section = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda or "not in this build",
        "gpus": [],
    }
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        section["gpus"].append(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}")
    return section


def native_state() -> Section:
    """Describe the native kernels: instruction sets of build and machine, and which of them serves each operator."""
    from headrace.backends.native import native

    try:
        module, reason = native()
    except HeadraceError as error:
        return {"problem": str(error)}
    if module is None:
        return {"problem": f"no native kernels, {reason}"}
    by_isa: dict[str, list[str]] = {}
    for op, isa in sorted(module.served().items()):
        by_isa.setdefault(f"served_by_{isa}", []).append(op)
    layouts = [module.layout(kind) for kind in ("i2", "i3", "i4", "i5", "i6", "i8", "f8", "k", "f")]
    return {"isas": module.isas(), "threads": module.num_threads(), "layouts": layouts, **by_isa}


def triton_state() -> Section:
    """Describe the kernels of backend cuda: how they would run here, and their names."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return {"installed": f"no {' and no '.join(missing)}; backend cuda needs them: pip install 'headrace[cuda]'"}
    import torch

    from headrace.backends.cuda import kernels

    return {
        "version": importlib.metadata.version("triton"),
        "run": "on the GPU" if torch.cuda.is_available() else "as their twins in torch, for tests: there is no GPU",
        "kernels": kernels.names(),
    }


def limits(seconds: float = 0.5, most_bytes: int = 2**31) -> list[Section]:
    """Measure the machine's highest rates, to compare others with: one entry for each quantity, on one thread and on
    all of the team. `rate` is the median of nine pieces (`least` and `most` their range) in `unit`, 1e9 or 1e12 a
    second; a multiply-add counts as two operations. Takes about `seconds` for each. The buffer that is read has
    `most_bytes`, or a quarter of the free memory: well above any cache.

    Raises `NativeMissingError` where the native kernels are not there.
    """
    from headrace.backends.native import require_native

    module = require_native()
    rows: list[Section] = []
    for threads in sorted({1, module.num_threads()}):
        for row in module.limits(threads, seconds, most_bytes):
            unit, scale = LIMITS[row["what"]]
            rates = {name: round(row[name] / scale, 3) for name in ("rate", "least", "most")}
            rows.append({"what": row["what"], "isa": row["isa"], "threads": threads, **rates, "unit": unit})
    return rows


def default_backend() -> str:
    """Return the backend that runs without --backend, or why none does."""
    from headrace import backends as operators

    try:
        return operators.choose_backend("auto", "auto")[0]
    except HeadraceError as error:
        return f"none: {error}"


def backends() -> Section:
    """Name the backends, models and formats that this installation has."""
    from headrace import backends as operators
    from headrace import models
    from headrace.quant import formats

    names = (module.name for module in pkgutil.iter_modules(formats.__path__))
    return {
        "backends": operators.names(),
        "default": default_backend(),
        "models": models.names(),
        "formats": sorted("unquantised" if name == "none" else name for name in names),
    }


def model_state(model: str) -> Section:
    """Describe a model by its headers. No weights are read, nothing is fetched."""
    section: Section = {"name": model}
    try:
        directory = local_directory(model)
        if directory.is_file():
            return section | gguf_facts(directory)
        config = hub.read_config(directory)
        section |= {"directory": str(directory), "model_type": config.get("model_type")}
        files = sorted(directory.glob("*.safetensors"))
        section["weight_bytes"] = sum(file.stat().st_size for file in files)
        section["num_parameters"] = sum(
            math.prod(entry.shape) for file in files for entry in MappedFile(file).entries.values()
        )
        section["context_length"] = config.get("max_position_embeddings", config.get("n_positions"))
        section["tokenizer"] = (directory / "tokenizer.json").exists()
        if isinstance(stored := config.get("quantization_config"), dict):
            activations = STATED_ACTIVATIONS.get(stated_activations(stored), ACTIVATIONS)
            section |= {"quantization": str(stored.get("quant_method")), "activations": activations}
    except (HeadraceError, OSError, ValueError) as error:
        section["problem"] = str(error)
    return section


def gguf_facts(path: Path) -> Section:
    """Describe a GGUF file by its metadata and directory of tensors. Raises `CheckpointError`."""
    file = gguf.read(path)
    architecture = file.text("general.architecture")
    return {
        "file": str(path),
        "model_type": architecture,
        "weight_bytes": sum(info.size for info in file.tensors.values()),
        "num_parameters": sum(math.prod(info.shape) for info in file.tensors.values()),
        "block_types": ", ".join(sorted({info.type for info in file.tensors.values()})),
        "context_length": file.integer(f"{architecture}.context_length"),
        "tokenizer": "tokenizer.ggml.tokens" in file.fields,
        "activations": ACTIVATIONS,
    }


def local_directory(model: str) -> Path:
    """Resolve as `hub.resolve`, but look a hub id up in the local cache only."""
    if model == "builtin" or Path(model).expanduser().exists() or model.count("/") != 1:
        return hub.resolve(model)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    if not isinstance(config, str):
        raise HeadraceError(f"{model} is neither a directory nor in the hub's local cache")
    return Path(config).parent


def hub_state() -> Section:
    from huggingface_hub import constants, get_token

    return {
        "cache": constants.HF_HUB_CACHE,
        "offline": bool(constants.HF_HUB_OFFLINE),
        "token": "set" if get_token() else "not set",
    }


def environment() -> Section:
    return {
        "HEADRACE_DEBUG": env.debug_level(),
        "HEADRACE_API_KEY": "set" if env.api_key() else "not set",
        "HEADRACE_ISA": env.isa() or "not set",
    }


def formatted(name: str, value: Any) -> str:
    """Format one value for people: bytes in GiB or MB, lists joined, None as a dash."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == [] or value == "":
        return "-"
    if isinstance(value, list):
        return ", ".join(str(part) for part in value)
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 1e6:.1f} MB"
    if name.startswith("num_") and isinstance(value, int):
        return f"{value:,}"
    return f"{value} GB/s" if name.endswith("gb_per_s") else str(value)


@contextlib.contextmanager
def printed_table() -> Iterator[Table]:
    """Yield a table to fill, and print it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    yield table
    Console(highlight=False).print(table)


def show(report: dict[str, Section]) -> None:
    """Print the report as one table, as wide as the terminal."""
    with printed_table() as table:
        for title, style in (("section", "bold"), ("what", "cyan")):
            table.add_column(title, style=style, no_wrap=True)
        table.add_column("found", overflow="fold")
        for section, entries in report.items():
            for index, (name, value) in enumerate(entries.items()):
                label = name.removesuffix("_bytes").removesuffix("_gb_per_s").removeprefix("num_")
                label = label if label.isupper() else label.replace("_", " ")
                first = section if index == 0 else ""
                table.add_row(first, label, formatted(name, value), style="red" if name == "problem" else None)
            table.add_section()


def show_limits(rows: list[Section]) -> None:
    """Print the limits as a table: the quantity, its instructions, and the rates by number of threads."""
    threads = sorted({row["threads"] for row in rows})
    by_kind: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for row in rows:
        cell = f"{row['rate']:.3g} ({row['least']:.3g}-{row['most']:.3g})"
        by_kind[row["what"], row["isa"]][row["threads"]] = cell
    with printed_table() as table:
        for title in ("limit", "instructions"):
            table.add_column(title, no_wrap=True)
        for num in threads:
            table.add_column(f"{num} thread{'s' if num > 1 else ''} (range)", justify="right", no_wrap=True)
        table.add_column("unit", no_wrap=True)
        for (what, isa), cells in by_kind.items():
            table.add_row(what, isa, *(cells[num] for num in threads), LIMITS[what][0])
