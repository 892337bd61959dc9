"""The laws of the house as functions: each takes a module's name and source and returns what it breaks, as lines of
text. `tests/laws/test_*.py` apply them to every file of the repository, and to planted sources that must be caught.

A law is changed here, together with an ADR; see docs/adr/0001-layers-and-laws.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headrace"

MAX_FILE_LINES = 500
MAX_SRC_CODE_LINES = 36_000
MAX_PATH_CODE_LINES = 9_000
PATH = ("core", "runner", "sampling", "backends", "models")
MAX_CONFIG_FIELDS = 60
MAX_ENVIRONMENT_VARIABLES = 8

HEAVY = frozenset("torch numpy transformers safetensors".split())
SERVING = frozenset("fastapi starlette uvicorn httpx jinja2 prometheus_client tokenizers".split())


class Layer(NamedTuple):
    """Which headrace modules a layer may import (by prefix), and which libraries it must not."""

    may: tuple[str, ...]
    must_not: frozenset[str] = frozenset()


LEAVES = ("errors", "bounds", "env", "hub", "gguf", "builtin")
NO_TENSORS = HEAVY
NO_SERVING = SERVING
PURE = HEAVY | SERVING | {"typer", "rich", "psutil", "huggingface_hub"}

# By prefix of the module's name under headrace; the longest prefix counts. A layer may always import itself and
# `errors`. What stands at ROOTS puts the parts together and may import anything.
LAYERS: dict[str, Layer] = {
    "errors": Layer((), PURE | {"msgspec"}),
    "bounds": Layer(("errors",), PURE | {"msgspec"}),
    "env": Layer((), PURE),
    "hub": Layer(("errors", "builtin", "gguf"), HEAVY | SERVING),
    "gguf": Layer(("errors",), PURE | {"msgspec"}),
    "config": Layer(("errors", "drafters.config"), PURE),
    "types": Layer(("sampling.params", "sampling.beam"), PURE),
    "sampling.params": Layer(("bounds", "sampling.constraints"), PURE),
    "sampling.constraints": Layer(("bounds",), PURE),
    "sampling.beam": Layer(("bounds", "sampling.params"), PURE),
    "sampling": Layer(("types", "bounds"), SERVING | {"torch"}),
    # The schemas of structured output: the server compiles them, the runner follows them.
    "grammar": Layer(("sampling.constraints", "sampling.params", "bounds"), SERVING | {"torch"}),
    "core": Layer(("types", "sampling.params", "sampling.beam"), PURE | {"msgspec"}),
    "core.blocks": Layer((), PURE | {"msgspec"}),
    "core.prefix": Layer(("core.blocks",), PURE | {"msgspec"}),
    "executor": Layer(
        ("types", "core.engine", "config", "env", "compose", "server.transport", "server.black_box", "server.logs"),
        PURE,
    ),
    "executor.simulated": Layer(("types", "sampling.params"), PURE),
    # A packed model starts without torch, which takes a second to import: only what reads checkpoints may know it.
    "runner": Layer(
        ("types", "sampling", "grammar", "models", "backends", "drafters", "quant.schemes", "hub", "gguf", "bounds"),
        SERVING | {"torch"},
    ),
    "runner.loader": Layer(("runner", "backends.base", "quant", "hub"), SERVING),
    "runner.gguf_source": Layer(("runner", "backends.base", "quant", "gguf"), SERVING),
    # Who guess what the model says next. They may run models of their own, but know neither scheduler nor requests.
    "drafters": Layer(
        (
            "types",
            "sampling",
            "grammar.matchers",
            "bounds",
            "backends",
            "models",
            "core.blocks",
            "runner",
            "quant",
            "hub",
            "gguf",
            "builtin",
        ),
        SERVING | {"torch"},
    ),
    "drafters.config": Layer((), PURE),
    "models": Layer(("backends.base", "runner.loader.Weights"), SERVING | HEAVY),
    "models.rope": Layer(("backends.base", "models.config"), SERVING | {"torch", "transformers"}),
    "quant": Layer(("backends.base",), SERVING | {"transformers"}),
    "quant.schemes": Layer((), PURE),
    # Makes quantised checkpoints with models that run on the reference backend, a layer at a time.
    "quantize": Layer(("quant", "models", "backends", "runner", "hub", "gguf"), SERVING | {"transformers"}),
    # A GGUF file holds its tokenizer: what the server reads of it is written, and read back to be compared.
    "quantize.gguf_tokenizer": Layer(
        ("quantize", "gguf", "hub", "server.text", "server.tokenizer_files", "server.tokenizer_gguf"),
        SERVING | {"transformers"},
    ),
    "backends": Layer(("quant", "env", "_native"), SERVING | {"transformers"}),
    # It measures what the server sees; of the server only `http` knows that it is there.
    "insight": Layer(("types", "server.client", "server.outputs", "server.sink"), HEAVY),
    "insight.recording": Layer(("types", "core.engine"), PURE),
    "insight.replay": Layer(("types", "core.engine", "insight.recording"), PURE),
    "insight.tracing": Layer(("server.calls", "server.generation", "server.outputs"), HEAVY),
    "insight.quality": Layer(("backends.base",), SERVING | {"torch"}),
    "insight.audit": Layer(("hub",), PURE),
    "server": Layer(
        (
            "types",
            "sampling.params",
            "sampling.constraints",
            "sampling.beam",
            "grammar.compile",
            "grammar.vocabulary",
            "bounds",
            "env",
            "hub",
            "gguf",
            "core.engine",
            "executor.process",
        ),
        HEAVY,
    ),
    "server.http": Layer(("server", "types", "sampling.params", "bounds", "env", "hub", "insight"), HEAVY),
}

# The composition roots: the only modules that may read the config, beside those in CONFIG_READERS.
ROOTS = ("llm", "async_llm", "compose", "cli", "doctor", "__main__", "__init__")
CONFIG_READERS = (
    "config",
    "executor.process",
    "runner.build",
    "server.client",
    "server.crash_reports",
    "server.http",
    "server.links",
    "server.transport",
)

# core computes; it does not read clocks, files, sockets, or noise.
CORE_FORBIDDEN_MODULES = frozenset(
    "os io socket ssl time datetime random secrets uuid threading asyncio multiprocessing subprocess pathlib "
    "logging tempfile shutil signal selectors select ctypes".split()
)
CORE_FORBIDDEN_CALLS = frozenset("open print input breakpoint".split())

# S-01, S-03, S-06: ways in which bytes become code.
DANGEROUS_MODULES = frozenset("pickle cPickle cloudpickle dill marshal shelve jsonpickle".split())
DANGEROUS_CALLS = frozenset("eval exec compile __import__".split())
DANGEROUS_ATTRIBUTES = frozenset(
    "yaml.load yaml.unsafe_load torch.load torch.save numpy.load np.load dist.broadcast_object_list "
    "dist.all_gather_object dist.gather_object".split()
)
DANGEROUS_METHODS = frozenset("recv_pyobj send_pyobj broadcast_object_list".split())

BAD_NAME = re.compile(r"(Manager|Handler|Utils?|Helpers?|Mixin)(?=[A-Z_]|$)")
# Where the house stands is nobody's business. Written in two parts so that this file does not break its own law.
WORKPLACE = re.compile("(?<![\\w.])/" + "(work|root|home|opt|mnt|Users)/" + r"[\w.-]+")


def sources() -> Iterator[tuple[str, str]]:
    """(module name under headrace, source) of every module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield module_name(path), path.read_text(encoding="utf-8")


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def imports(source: str, module: str = "") -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything imported, wherever in the file, `if TYPE_CHECKING` included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ("headrace." + module).split(".")[: -node.level]
                base = ".".join([*parts, base]).rstrip(".")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func) in ("importlib.import_module", "import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def dotted(node: ast.expr) -> str:
    """'a.b.c' of a name or attribute, '' of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def layer_of(module: str) -> str | None:
    """The longest key of LAYERS that `module` lies under; None for a composition root."""
    found = [key for key in LAYERS if under(module, key)]
    return max(found, key=len) if found else None


def layer_violations(module: str, source: str) -> list[str]:
    """Imports by which `module` reaches past its neighbours (design: layers and laws)."""
    key = layer_of(module)
    if key is None:
        known = any(under(module, root) for root in ROOTS) or module in ("", "builtin")
        return [] if known else [f"{module}: no layer in tests/laws/rules.py; give it one"]
    layer = LAYERS[key]
    broken = []
    for line, name in imports(source, module):
        if not under(name, "headrace"):
            if name.split(".")[0] in layer.must_not:
                broken.append(f"{module}:{line}: {key} must not import {name}")
            continue
        inner = name.removeprefix("headrace").lstrip(".")
        if inner in ("", "__version__") or under(inner, "errors") or under(inner, key):
            continue
        if under(inner, "config") and module in CONFIG_READERS:
            continue
        if not any(under(inner, allowed) for allowed in layer.may):
            broken.append(f"{module}:{line}: {key} must not import headrace.{inner}")
    return broken


def core_violations(module: str, source: str) -> list[str]:
    """I/O, clocks and noise in the core, which is handed what it needs."""
    if not under(module, "core"):
        return []
    broken = [
        f"{module}:{line}: core must not import {name}"
        for line, name in imports(source, module)
        if name.split(".")[0] in CORE_FORBIDDEN_MODULES
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and dotted(node.func) in CORE_FORBIDDEN_CALLS:
            broken.append(f"{module}:{node.lineno}: core must not call {dotted(node.func)}")
    return broken


def danger_violations(module: str, source: str) -> list[str]:
    """S-01, S-03, S-06: no way from bytes to code. There is no allow-list."""
    broken = [
        f"{module}:{line}: imports {name}"
        for line, name in imports(source, module)
        if name.split(".")[0] in DANGEROUS_MODULES or name in DANGEROUS_ATTRIBUTES
    ]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in DANGEROUS_CALLS or name in DANGEROUS_ATTRIBUTES or method in DANGEROUS_METHODS:
            broken.append(f"{module}:{node.lineno}: calls {name or method}")
        for keyword in node.keywords:
            true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg == "trust_remote_code" and true:
                broken.append(f"{module}:{node.lineno}: trusts remote code")
            if keyword.arg == "shell" and true:
                broken.append(f"{module}:{node.lineno}: runs a shell")
    return broken


def habit_violations(module: str, source: str) -> list[str]:
    """No assert (it is gone under -O, S-05), no bare except, no error passed over in silence, no vague class names,
    and a docstring in every module that has anything in it."""
    tree = ast.parse(source)
    broken = []
    if tree.body and ast.get_docstring(tree) is None:
        broken.append(f"{module}: no docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            broken.append(f"{module}:{node.lineno}: assert is gone under python -O; raise an error")
        elif isinstance(node, ast.ExceptHandler):
            if node.type is None:
                broken.append(f"{module}:{node.lineno}: bare except")
            wide = node.type is not None and dotted(node.type) in ("Exception", "BaseException")
            if wide and all(isinstance(part, ast.Pass | ast.Continue) for part in node.body):
                broken.append(f"{module}:{node.lineno}: an error is passed over in silence")
        elif isinstance(node, ast.ClassDef) and BAD_NAME.search(node.name):
            broken.append(f"{module}:{node.lineno}: class {node.name} says nothing; name what it is")
    return broken


def environment_reads(source: str) -> list[int]:
    """Lines that read the process environment."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute | ast.Name)
        and dotted(node) in ("os.environ", "environ", "os.environb", "os.getenv", "getenv")
    ]


def environment_variables(source: str) -> set[str]:
    """headrace's own variables that a source names."""
    return set(re.findall(r"""["'](HEADRACE_[A-Z0-9_]+)["']""", source))


def environment_violations(module: str, source: str) -> list[str]:
    """The environment is read in env.py and nowhere else."""
    if module == "env":
        return []
    return [f"{module}:{line}: reads the environment" for line in environment_reads(source)]


def workplace_violations(name: str, text: str) -> list[str]:
    """Absolute paths of the place where this was written."""
    return [
        f"{name}:{number}: names {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in WORKPLACE.finditer(line)
    ]


def num_lines(source: str) -> int:
    return source.count("\n")


def num_code_lines(source: str) -> int:
    """Lines that hold code: not blank ones, comments or docstrings, so that explaining costs nothing (ADR 0012)."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - told)
