"""`App`: the schema of app.yaml, which describes a deployment for `headrace deploy`.

An error names the field by its place in the file (`models.0.max_replicas`), its value and the allowed ones. Knows no
Ray. Called by `cli.deploy`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Count = Annotated[int, Meta(ge=1, le=64)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Share = Annotated[float, Meta(ge=0, le=65_536)]
Port = Annotated[int, Meta(ge=1, le=65_535)]

ELSEWHERE = {
    "model": "a field beside `engine`",
    "record_schedule": "left out: each engine would write its own",
    "host": "a field beside `server`",
    "port": "a field beside `server`",
    "models_dir": "left out: the models are those of this file",
    "slot_save_path": "left out: session files belong to one engine",
    "data_parallel_size": "left out: max_replicas says how many engines there are",
    "api_key": "left out: a file of keys on the front's host, as api_key_file, or HEADRACE_API_KEY where Ray starts",
    "generate_api_key": "left out: the log of an actor is no place for a key",
    "admin_api_key": "left out: a file of keys on the front's host, as api_key_file",
}
"""Settings that `engine` and `server` must not have, and the alternatives."""

T = TypeVar("T", EngineConfig, ServerConfig)


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resources of a host that an actor takes; Ray places it where there are so many."""

    num_cpus: Annotated[Share, Meta(description="Processors; an engine has as many threads unless it sets others.")] = 1
    num_gpus: Annotated[Share, Meta(description="GPUs.")] = 0
    resources: Annotated[
        dict[str, Share],
        Meta(description="Resources of your own, as given to `ray start --resources`; they pin an actor to hosts."),
    ] = {}


class Model(Placement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, and how many engines have it."""

    model: Annotated[
        str, Meta(min_length=1, description="As for `headrace serve`; each host of an engine or the front has it.")
    ]
    name: Annotated[Name | None, Meta(description="Its name in the APIs; by default the last part of `model`.")] = None
    min_replicas: Annotated[Count, Meta(description="Engines at least, and at first.")] = 1
    max_replicas: Annotated[Count | None, Meta(description="Engines at most; by default min_replicas.")] = None
    target_queue_seconds: Annotated[
        Seconds, Meta(description="Engines are added until what waits is begun within so many seconds.")
    ] = 2.0
    upscale_delay_seconds: Annotated[Seconds, Meta(description="How long it must have been too much.")] = 10.0
    downscale_delay_seconds: Annotated[Seconds, Meta(description="How long it must have been too little.")] = 300.0
    drain_seconds: Annotated[
        Seconds, Meta(description="How long an engine that goes may finish what no other can go on with.")
    ] = 60.0
    engine: Annotated[
        dict[str, Any], Meta(description="Flags of the engine (docs/flags.md), such as `max-model-len: 32k`.")
    ] = {}

    @property
    def label(self) -> str:
        """Its name in the APIs."""
        return self.name or Path(self.model).name.removesuffix(".gguf")

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.min_replicas

    def engine_config(self, place: str) -> EngineConfig:
        """Return the config of its engines. Raises `RequestError`, which names the field after `place`."""
        config = _settings(EngineConfig, self.engine, f"{place}.engine", {"model": self.model})
        if config.num_threads or not self.num_cpus:
            return config
        return msgspec.structs.replace(config, num_threads=max(1, int(self.num_cpus)))


class Front(Placement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server that clients talk to."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on, on the host where Ray places it.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="TCP port.")] = 8000
    server: Annotated[
        dict[str, Any], Meta(description="Flags of the server (docs/flags.md), such as `api-key-file: /etc/keys.toml`.")
    ] = {}

    def server_config(self, names: list[str]) -> ServerConfig:
        """Return the config of the server. Raises `RequestError`."""
        base = {"host": self.host, "port": self.port, "served_model_name": names}
        return _settings(ServerConfig, self.server, "front.server", base)


class App(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    name: Annotated[Name, Meta(description="Name of the deployment in Ray Serve.")] = "headrace"
    models: Annotated[
        list[Model], Meta(min_length=1, max_length=1, description="The model; deploy another file for another one.")
    ]
    front: Annotated[Front, Meta(description="The server that clients talk to.")] = Front()
    ports: Annotated[
        list[Port],
        Meta(max_length=2, description="First and last port that engines listen on; by default any free one."),
    ] = []
    credentials: Annotated[
        str | None,
        Meta(description="Folder of certificates and secret; by default NAME.credentials beside the file. Made if "
             "there is none."),
    ] = None  # fmt: skip
    send_credentials: Annotated[
        bool, Meta(description="false: each host has the folder at that path, and none of it passes through Ray.")
    ] = True

    def check(self) -> None:
        """Raise `RequestError` for faults that single fields do not show."""
        labels: set[str] = set()
        for place, model in enumerate(self.models):
            if model.most_replicas < model.min_replicas:
                bound = f"at least min_replicas, which is {model.min_replicas}"
                raise RequestError(f"models.{place}.max_replicas", model.max_replicas, bound)
            if model.label in labels:
                raise RequestError(f"models.{place}.name", model.label, "a name that no other model has")
            labels.add(model.label)
            model.engine_config(f"models.{place}")
        self.front.server_config([])
        if self.ports and (len(self.ports) != 2 or self.ports[0] > self.ports[1]):
            raise RequestError("ports", self.ports, "the first and the last port of a range")


def read(path: Path) -> App:
    """Read a file. Raises `RequestError`."""
    try:
        text = path.read_bytes()
        tree = msgspec.yaml.decode(text)
    except OSError as error:
        raise RequestError("app", str(path), f"a file that can be read ({error.strerror})") from error
    except ImportError as error:
        raise RequestError("app", str(path), "read with PyYAML: pip install 'headrace[ray]'") from error
    except msgspec.DecodeError as error:
        raise RequestError("app", str(path), f"a YAML file ({error})") from error
    app = app_of(tree)
    credentials = Path(app.credentials or f"{app.name}.credentials").expanduser()
    return msgspec.structs.replace(app, credentials=str((path.parent / credentials).absolute()))


def app_of(tree: Any) -> App:
    """Return the app of a file's contents. Raises `RequestError`."""
    if not isinstance(tree, Mapping):
        raise RequestError("app", type(tree).__name__, "a mapping with `models`")
    try:
        app = msgspec.convert(tree, App)
    except msgspec.ValidationError as error:
        raise _mistake(str(error), tree) from error
    app.check()
    return app


def _mistake(text: str, tree: Any) -> RequestError:
    """Return the error of a message of msgspec's, which ends with the place of a value."""
    match = re.fullmatch(r"(.*?)(?: - at `\$(.*)`)?", text, re.S)
    bound, path = (match[1], match[2] or "") if match else (text, "")
    parts = re.findall(r"[^.\[\]]+", path)
    value = tree
    for part in parts:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            value = None
    unknown = re.search(r"unknown field `(.*)`", bound)
    missing = re.search(r"missing required field `(.*)`", bound)
    if unknown or missing:
        name = (unknown or missing)[1]  # type: ignore[index]
        value = value.get(name) if isinstance(value, Mapping) else None
        bound = "given" if missing else "left out: there is no such field"
        parts.append(name)
    return RequestError(".".join(parts) or "app", value, bound[:1].lower() + bound[1:])


def _settings(kind: type[T], flags: Mapping[str, Any], place: str, base: Mapping[str, Any]) -> T:
    """Return the config of `base` and `flags`, whose names may have hyphens. Raises `RequestError`."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    values = dict(base)
    for flag, value in flags.items():
        name = str(flag).replace("-", "_")
        if name in ELSEWHERE:
            raise RequestError(f"{place}.{flag}", value, ELSEWHERE[name])
        if name not in known:
            raise RequestError(f"{place}.{flag}", value, "left out: there is no such flag")
        values[name] = value
    try:
        return msgspec.convert({name: _number(value, known[name].type) for name, value in values.items()}, kind)
    except msgspec.ValidationError as error:
        raise _renamed(_mistake(str(error), values), place) from error
    except RequestError as error:
        raise _renamed(error, place) from error


def _renamed(error: RequestError, place: str) -> RequestError:
    return error.renamed(f"{place}.{error.field}")


def _number(value: Any, kind: Any) -> Any:
    """Return a size such as 32k as a number, where a number is expected."""
    from headrace.protocol.human import human_int

    if isinstance(value, str) and kind in (int, int | None):
        try:
            return human_int(value)
        except ValueError:
            return value
    return value


STRUCTS: dict[str, type[msgspec.Struct]] = {"models": Model, "front": Front}


def documented(kind: type[msgspec.Struct] = App, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield name, default and meaning of every field of the file."""
    for field in msgspec.structs.fields(kind):
        meta = next((part for part in getattr(field.type, "__metadata__", ()) if part.description), None)
        plain = field.default not in (msgspec.NODEFAULT, None)
        default = msgspec.json.encode(field.default).decode().strip('"') if plain else ""
        inner = STRUCTS.get(field.name)
        yield f"{path}{field.name}", "" if inner else default, meta.description if meta else ""
        if inner is not None:
            yield from documented(inner, f"{path}{field.name}.")
