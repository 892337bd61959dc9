"""The laws of the house as functions: each takes a module's name and source and returns what it breaks, as lines of
text. `tests/laws/test_*.py` apply them to every file of the repository, and to planted sources that must be caught.

A law is changed here, together with an ADR; see docs/adr/0001-layers-and-laws.md.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headrace"

MAX_CONFIG_FIELDS = 94
MAX_ENVIRONMENT_VARIABLES = 8

HEAVY = frozenset("torch numpy transformers safetensors".split())
SERVING = frozenset("starlette python_multipart uvicorn httpx jinja2 prometheus_client tokenizers".split())


class Room(NamedTuple):
    """A folder or a file of the package: the rooms below it that it may import, and the libraries that it must not."""

    name: str
    may: str = ""
    must_not: frozenset[str] = frozenset()


NO_TORCH = SERVING | {"torch", "transformers"}
PURE = HEAVY | SERVING | {"typer", "rich", "psutil", "huggingface_hub"}
APIS = "protocol engine text serve.errors serve.gates serve.routing serve.call serve.storage"

# The storeys from the ground up. A room may import itself and what `may` names, all of it on lower floors; rooms of one
# floor do not import each other. The longest name that a module lies under is its room.
FLOORS: tuple[tuple[Room, ...], ...] = (
    (Room("protocol", "", PURE), Room("env", "", PURE)),
    # Files and JSON that strangers wrote.
    (Room("foreign", "protocol", PURE | {"msgspec"}),),
    (
        Room("builtin", "protocol", PURE),
        Room("gguf", "protocol foreign", PURE | {"msgspec"}),
        Room("migration", "protocol", PURE),
        # Connections between hosts, whose ends prove themselves.
        Room("secure", "protocol", HEAVY | SERVING),
    ),
    (
        Room("hub", "protocol builtin gguf foreign", HEAVY | SERVING),
        Room("other_engines", "protocol migration", PURE),
    ),
    (Room("core.blocks", "protocol", PURE | {"msgspec"}),),
    (
        Room("core", "protocol core.blocks", PURE | {"msgspec"}),
        Room("quant", "protocol foreign", SERVING | {"transformers"}),
        Room("sampling", "protocol", NO_TORCH),
        Room("grammar", "protocol", NO_TORCH),
    ),
    (
        # What the engine writes of its steps, and insight reads: structs that cross processes.
        Room("core.journal", "protocol core core.blocks", PURE),
        # Text needs no tensors: the server's process imports it.
        Room("text", "protocol gguf hub grammar", HEAVY | (SERVING - {"jinja2", "tokenizers"})),
        Room("backends", "protocol env quant", SERVING | {"transformers"}),
    ),
    (
        Room("backends.torch_ref", "protocol quant backends", SERVING | {"transformers"}),
        # What the ranks of every backend share.
        Room("backends.split", "protocol quant backends", HEAVY | SERVING),
        Room("models", "protocol backends", NO_TORCH),
    ),
    (
        # It checks its steps beside torch_ref.
        Room(
            "backends.cpu",
            "protocol env foreign quant backends backends.torch_ref backends.split",
            SERVING | {"transformers"},
        ),
        # The twins of its kernels are made of torch_ref's parts, and of the sampler's for the draw.
        Room(
            "backends.cuda",
            "protocol quant sampling backends backends.torch_ref backends.split",
            SERVING | {"transformers"},
        ),
    ),
    (Room("checkpoint", "protocol foreign gguf hub quant backends models", SERVING | {"transformers"}),),
    (
        # Several processes that compute one model.
        Room("parallel", "protocol backends models", NO_TORCH),
        # gloo, which moves what ranks of several hosts gather.
        Room("parallel.gloo", "protocol backends", SERVING | {"transformers"}),
        # They may run models of their own, but know neither scheduler nor requests.
        Room("drafters", "protocol builtin hub core.blocks quant sampling backends checkpoint models", NO_TORCH),
        # It runs the models of another library, on the reference backend.
        Room("transformers_models", "protocol quant backends backends.torch_ref checkpoint models", SERVING),
        # It runs model files over operators that count.
        Room("plan", "protocol gguf hub text quant checkpoint models", NO_TORCH),
    ),
    (
        Room("runner", "protocol sampling grammar backends drafters", NO_TORCH),
        Room("fleet", "protocol core core.blocks", PURE - {"msgspec"}),
        # NCCL, which does so between GPUs.
        Room("parallel.devices", "protocol env parallel.gloo", SERVING | {"transformers"}),
    ),
    # Ranks on several hosts: the connections of rank 0 to the others.
    (Room("parallel.hosts", "protocol secure parallel", NO_TORCH | {"numpy"}),),
    (
        # The engine's own process and the client of it: without torch, which takes a second to import.
        Room(
            "engine",
            "protocol env foreign gguf hub core quant sampling grammar text backends checkpoint models drafters runner "
            "core.journal secure parallel parallel.gloo parallel.devices parallel.hosts plan transformers_models",
            NO_TORCH | {"numpy"},
        ),
    ),
    (
        # An engine behind a connection instead of a socketpair.
        Room("fleet.remote", "protocol secure engine core.journal", HEAVY | SERVING),
        Room("fleet.engines", "protocol core engine fleet", NO_TORCH | {"numpy"}),
        Room("insight", "protocol foreign hub core core.blocks text engine core.journal", HEAVY),
        Room(
            "quantize",
            "protocol gguf hub quant text backends backends.torch_ref checkpoint models",
            SERVING | {"transformers"},
        ),
    ),
    (Room("serve.errors", "protocol engine", HEAVY),),
    (Room("serve.gates", "protocol foreign engine serve.errors", HEAVY),),
    (Room("serve.routing", "protocol engine serve.errors serve.gates", HEAVY),),
    (
        Room("serve.call", "protocol engine text", HEAVY),
        Room("serve.storage", "protocol engine text serve.errors serve.gates", HEAVY),
    ),
    # No API knows another: each makes a call of its own JSON.
    (
        Room("serve.apis.openai", APIS, HEAVY),
        Room("serve.apis.anthropic", APIS, HEAVY),
        Room("serve.apis.ollama", APIS, HEAVY),
        Room("serve.apis.llama_server", APIS, HEAVY),
        Room("serve.inspector", f"{APIS} plan insight", HEAVY),
    ),
    (
        Room(
            "serve",
            APIS
            + " env hub fleet.engines insight serve.inspector"
            + " serve.apis.openai serve.apis.anthropic serve.apis.ollama serve.apis.llama_server",
            HEAVY,
        ),
    ),
    # Actors of Ray Serve: an engine's server, and a whole server as its front.
    (Room("ray", "protocol hub secure engine fleet fleet.engines fleet.remote serve", HEAVY),),
)
ROOMS = {room.name: room for floor in FLOORS for room in floor}

# The composition roots, above all floors: they put the parts together and may import anything.
ROOTS = ("llm", "async_llm", "cli", "doctor", "labs", "__main__", "__init__")
# Other rooms are handed their numbers, never the config object.
CONFIG_ROOMS = ("protocol", "engine", "fleet.engines", "ray", "serve")

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
# Bare participles do not say what a variable holds, and in these phrases things are persons.
VAGUE_WORDS = frozenset(
    "found made own told given taken kept said asked wanted shown held drawn begun sent gone".split()
)
RIDDLES = re.compile(
    r"\b(?:" + "|".join(("(?:is|are) told", "asks for nothing", "nobody knows", "who guesses", "whoever")) + r")\b",
    re.I,
)
# Where the house stands is nobody's business. Written in two parts so that this file does not break its own law.
WORKPLACE = re.compile("(?<![\\w.])/" + "(work|root|home|opt|mnt|Users)/" + r"[\w.-]+")


@functools.cache
def tree_of(source: str) -> ast.Module:
    """The tree of a module, parsed once for all laws. They must not change it."""
    return ast.parse(source)


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
    for node in ast.walk(tree_of(source)):
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


def room_of(module: str) -> Room | None:
    """The room that `module` lies in: the longest of the names it is under; None for a composition root."""
    names = [name for name in ROOMS if under(module, name)]
    return ROOMS[max(names, key=len)] if names else None


def plan_violations() -> list[str]:
    """Entries of FLOORS that do not point down."""
    broken, below = [], set[str]()
    for floor in FLOORS:
        for room in floor:
            broken += [f"{room.name} may not rest on {name}" for name in room.may.split() if name not in below]
        below |= {room.name for room in floor}
    return broken


def layer_violations(module: str, source: str) -> list[str]:
    """Imports by which `module` reaches past the rooms that its own may import."""
    room = room_of(module)
    if room is None:
        is_root = not module or any(under(module, root) for root in ROOTS)
        return [] if is_root else [f"{module}: no room in tests/laws/rules.py; give it one"]
    broken = []
    for line, name in imports(source, module):
        if not under(name, "headrace"):
            if name.split(".")[0] in room.must_not:
                broken.append(f"{module}:{line}: {room.name} must not import {name}")
            continue
        inner = name.removeprefix("headrace").lstrip(".")
        if inner in ("", "__version__"):
            continue
        target = room_of(inner)
        if target is None:
            if not under(inner, "_native") or not under(room.name, "backends"):
                broken.append(f"{module}:{line}: {room.name} must not import headrace.{inner}")
        elif target != room and target.name not in room.may.split():
            broken.append(f"{module}:{line}: {room.name} must not import headrace.{inner}")
        elif under(inner, "protocol.config") and room.name not in CONFIG_ROOMS:
            broken.append(f"{module}:{line}: {room.name} is handed its numbers, not the config")
    return broken


def circle(sources: dict[str, str]) -> list[str]:
    """Names of modules that import each other in a loop, imports for type checkers and in functions included."""
    graph = {}
    for module, source in sources.items():
        names = {name.removeprefix("headrace").lstrip(".") for _, name in imports(source, module)}
        names |= {name.rpartition(".")[0] for name in names if name not in sources}
        graph[module] = (names & sources.keys()) - {module, ""}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def core_violations(module: str, source: str) -> list[str]:
    """I/O, clocks and noise in the core, which is handed what it needs."""
    if not under(module, "core"):
        return []
    broken = [
        f"{module}:{line}: core must not import {name}"
        for line, name in imports(source, module)
        if name.split(".")[0] in CORE_FORBIDDEN_MODULES
    ]
    for node in ast.walk(tree_of(source)):
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
    for node in ast.walk(tree_of(source)):
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
    tree = tree_of(source)
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


def word_violations(module: str, source: str) -> list[str]:
    """Names of variables, parameters and attributes of `self` that are bare participles, and riddles in docstrings and
    comments. Fields of structs may have such names: they are those of JSON and of the wire."""
    tree = tree_of(source)
    fields = {
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        for target in [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
    }
    names: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            names.append((node.lineno, node.attr))
    broken = [
        f"{module}:{line}: {name} does not say what it holds" for line, name in names if name.strip("_") in VAGUE_WORDS
    ]
    for line, text in prose(source):
        for match in RIDDLES.finditer(" ".join(text.split())):
            broken.append(f"{module}:{line}: {match.group()!r} makes a person of a thing")
    return broken


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of every docstring, and of every run of comments in successive lines."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#")
            if comments and token.start[0] == comments[-1][0] + comments[-1][1].count("\n") + 1:
                comments[-1] = comments[-1][0], comments[-1][1] + "\n" + text
            else:
                comments.append((token.start[0], text))
    yield from comments


def environment_reads(source: str) -> list[int]:
    """Lines that read the process environment."""
    return [
        node.lineno
        for node in ast.walk(tree_of(source))
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
