"""`ModelFolder`: the models that lie in one folder, by name; and how they are made, copied and deleted there.

A model is a directory with a config.json, a directory with one GGUF model, or a .gguf file, with the others of a split
model; it may lie in the folder itself or one level down, as OWNER/NAME. Its name is its path without ".gguf" and
"-00001-of-00002", and may end in a tag: NAME:TAG. Names of requests are held to one pattern, which no path out of the
folder fits. Unfinished files lie in hidden folders and come to their place by one rename. Knows files;
`serve.call.models` knows which models are loaded. All functions but `pull` block, and routes call them on worker
threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from headrace import gguf, hub
from headrace.engine.library import facts_reader, model_settings
from headrace.engine.library.model_facts import ModelFacts
from headrace.engine.library.model_settings import ModelSettings
from headrace.protocol.errors import CheckpointError, ModelNotFoundError, RequestError

logger = logging.getLogger(__name__)

PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}"
NAME = re.compile(rf"{PART}(/{PART})?(:{PART})?")
FILE_NAME = re.compile(rf"{PART}\.(gguf|safetensors|json|jinja|model|txt)")
DIGEST = re.compile("sha256:[0-9a-f]{64}")
NAME_RULE = "NAME, NAME:TAG or OWNER/NAME of letters, digits and . _ + -"
BLOBS, UNFINISHED, PULLS = ".blobs", ".unfinished", ".pulls"
NO_SETTINGS = ModelSettings()
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

HUBS = ("https://", "hf.co/", "huggingface.co/")
"""Prefixes by which Ollama's users name a model on the hub."""


class Progress(msgspec.Struct, kw_only=True):
    """The progress of a download: a line of text, and of one file its digest, size and the bytes that came."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class ModelFolder:
    """The models folder at `root`, which is made if it is not there. Raises `RequestError` if it cannot be."""

    def __init__(self, root: str) -> None:
        self.root = Path(root).expanduser().resolve()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError("models_dir", root, f"a folder ({error.strerror})") from error
        lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, _release, lock)
        self._clear(lock)

    def close(self) -> None:
        """Release the folder: the next server may clear it. May be called twice."""
        self._close()

    def _clear(self, lock: int) -> None:
        """Delete uploads that no model was made of, and remains of a crash, unless they may be another server's: each
        holds a shared lock of the folder."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in (BLOBS, UNFINISHED):
                shutil.rmtree(self.root / name, ignore_errors=True)
        except BlockingIOError:
            logger.info("%s is used by another server too: what is unfinished there stays", self.root)
        except OSError as error:
            logger.warning("%s can not be locked, so what is unfinished there stays: %s", self.root, error)
            return
        fcntl.flock(lock, fcntl.LOCK_SH)

    # -- the models in the folder

    def names(self) -> list[str]:
        """Return the names of all models, in order."""
        return sorted(set(self._scan(self.root, "")))

    def find(self, name: str) -> str | None:
        """Return the true name of a model that a request calls `name`; None if there is none. The tag "latest" may be
        there or not, and the hub's address may stand before the name."""
        name = plain_name(name)
        for each in (name, name.removesuffix(":latest"), f"{name}:latest"):
            if NAME.fullmatch(each) and self._path(each) is not None:
                return each
        return None

    def path(self, name: str) -> Path:
        """Return where a model lies. Raises `ModelNotFoundError`."""
        path = self._path(name) if NAME.fullmatch(name) else None
        if path is None:
            raise ModelNotFoundError(f"model: {name[:80]!r} not found")
        return path

    def facts(self, name: str) -> ModelFacts:
        """Return the facts about a model; its files are read again if they have changed. Raises `CheckpointError`,
        `ModelNotFoundError`, `ChildFailedError`."""
        try:
            return facts_reader.shared().facts(self.path(name))
        except CheckpointError as error:
            raise CheckpointError(self.without_root(str(error))) from error

    def without_root(self, text: str) -> str:
        """Return a text without the path of the folder, which may have blanks in it."""
        return text.replace(f"{self.root}/", "")

    def _scan(self, folder: Path, prefix: str) -> Iterator[str]:
        with contextlib.suppress(OSError):  # a folder that is deleted just now
            for path in folder.iterdir():
                name = prefix + (_gguf_name(path) if path.suffix == ".gguf" and path.is_file() else path.name)
                if not NAME.fullmatch(name):
                    continue
                if self._path(name) is not None:
                    yield name
                elif not prefix and path.is_dir():
                    yield from self._scan(path, f"{path.name}/")

    def _path(self, name: str) -> Path | None:
        path = self.root / name
        if path.is_dir():
            return path if (path / "config.json").is_file() or len(gguf.models_in(path)) == 1 else None
        file = path.with_name(f"{path.name}.gguf")
        if file.is_file():
            return None if gguf.is_projector(file.name) else file
        split = sorted(path.parent.glob(f"{glob.escape(path.name)}-00001-of-*.gguf"))
        return split[0] if len(split) == 1 and _gguf_name(split[0]) == path.name else None

    # -- changes

    def copy(
        self,
        source: str,
        target: str,
        settings: ModelSettings = NO_SETTINGS,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Give a model a second name, and add settings under it, and an adapter, as in `create`.
        The two models share the bytes of the other files on the disk, and each may be deleted.

        Raises `RequestError` for a name that none can have, and for files that are no adapter's."""
        path = self.path(source)
        files = gguf.files_of(path) if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        base = path.parent if path.is_file() else path
        adapter = self._adapter(adapters)

        def fill(folder: Path) -> None:
            for file in files:
                place = folder / file.relative_to(base)
                place.parent.mkdir(parents=True, exist_ok=True)
                _link(file, place)
            model_settings.update(folder, settings)
            _add_adapter(folder, adapter)

        self._make(target, fill)

    def create(
        self,
        target: str,
        files: Mapping[str, str],
        settings: ModelSettings = NO_SETTINGS,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Make a model of uploaded files, the digest of each by the name that it gets, of settings and of the files of
        an adapter. Raises `RequestError`, also if they are no model."""
        blobs, adapter = self._blobs("files", files), self._adapter(adapters)

        def fill(folder: Path) -> None:
            for name, path in blobs.items():
                _link(path, folder / name)
            model_settings.update(folder, settings)
            _add_adapter(folder, adapter)

        self._make(target, fill)

    def _blobs(self, field: str, files: Mapping[str, str]) -> dict[str, Path]:
        blobs = {name: self.blob(digest) for name, digest in files.items()}
        for name, path in blobs.items():
            if not FILE_NAME.fullmatch(name):
                bound = "the name of a file of a model, such as model.gguf or config.json, without a folder"
                raise RequestError(field, name, bound)
            if not path.is_file():
                raise RequestError(f"{field}.{name}", files[name], "the digest of a file that was sent to /api/blobs")
        return blobs

    def _adapter(self, files: Mapping[str, str]) -> dict[str, Path]:
        names = sorted(files)
        is_gguf = len(names) == 1 and names[0].endswith(".gguf")
        if names and not is_gguf and not set(ADAPTER_FILES) <= files.keys():
            bound = f"{' and '.join(ADAPTER_FILES)}, or one GGUF file"
            raise RequestError("adapters", ", ".join(names)[:80], bound)
        return self._blobs("adapters", files)

    def delete(self, name: str) -> None:
        """Delete a model, with its folder if that is empty then. Raises `ModelNotFoundError`."""
        path = self.path(name)
        self._discard(path)
        facts_reader.shared().forget(path)
        if path.parent != self.root:
            with contextlib.suppress(OSError):  # it holds other models
                path.parent.rmdir()

    def blob(self, digest: str) -> Path:
        """Return the place of an uploaded file. Raises `RequestError` for text that is no digest."""
        if not DIGEST.fullmatch(digest):
            raise RequestError("digest", digest, "sha256: and 64 hexadecimal digits")
        return self.root / BLOBS / digest.replace(":", "-")

    def blob_statuses(self) -> list[os.stat_result]:
        """Return the statuses of the uploaded files."""
        return [path.stat() for path in (self.root / BLOBS).glob("sha256-*")]

    def new_file(self) -> Path:
        """Return a new, empty file for an upload."""
        folder = self.root / BLOBS
        folder.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        return Path(name)

    def unfinished(self, name: str) -> Path:
        """Return the folder in which a model is fetched; it stays if that fails, so that a next try goes on. Raises
        `RequestError` for a name that none can have."""
        return self.root / PULLS / self._checked(name).replace("/", "--")

    def accept(self, name: str, folder: Path) -> None:
        """Move a folder with files of a model to its place. Raises `CheckpointError` if they are none."""
        target = self.root / self._checked(name)
        facts_reader.shared().check(folder)
        target.parent.mkdir(exist_ok=True)
        old = self._path(name)
        if old is not None:
            self._discard(old)
        os.replace(folder, target)
        facts_reader.shared().forget(target)

    async def pull(self, name: str) -> AsyncGenerator[Progress]:
        """Fetch a model from the hub into the folder; yield the progress. After an early stop, the next try goes on
        from there.

        Raises `RequestError` for an impossible name, `ModelNotFoundError` with the hub's message, OSError for a disk
        that is full."""
        folder = self.unfinished(name)
        if "/" not in name:
            raise RequestError("model", name, "OWNER/NAME or OWNER/NAME:TAG, a repository of the Hugging Face hub")
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", hub.__name__, name, str(folder)]
        nothing = subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing)
        try:
            async for line in cast(asyncio.StreamReader, process.stdout):
                fields = msgspec.json.decode(line, type=dict[str, Any])
                if fields.get("errno"):
                    raise OSError(fields["errno"], os.strerror(fields["errno"]))
                if "error" in fields:
                    raise ModelNotFoundError(str(fields["error"]))
                yield msgspec.convert(fields, Progress)
            if await process.wait():
                raise ModelNotFoundError(f"{name}: the program that fetches it ended with {process.returncode}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        yield Progress(status="writing manifest")
        await asyncio.to_thread(self.accept, name, folder)

    def _make(self, name: str, fill: Callable[[Path], None]) -> None:
        self._checked(name)
        place = self.root / UNFINISHED
        place.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=place))
        folder.chmod(0o755)
        try:
            fill(folder)
            self.accept(name, folder)
        except CheckpointError as error:
            why = str(error).replace(f"{folder}/", "").replace(str(folder), name)
            raise RequestError("model", name, f"made of files that headrace reads: {why}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _checked(self, name: str) -> str:
        """Return a name that a new model may have. Raises `RequestError`."""
        if not NAME.fullmatch(name):
            raise RequestError("model", name, NAME_RULE)
        target, parent = self.root / name, (self.root / name).parent
        if parent != self.root and self._path(parent.name) is not None:
            raise RequestError("model", name, f"a name of another owner: {parent.name} is a model")
        if target.exists() and self._path(name) is None:
            raise RequestError("model", name, "another name: there is something else under it in the models folder")
        return name

    def _discard(self, path: Path) -> None:
        """Take a model away by renames, and then delete it. A link is deleted, not its target."""
        place = self.root / UNFINISHED
        place.mkdir(exist_ok=True)
        trash = Path(tempfile.mkdtemp(dir=place))
        # The file by which the folder finds the model goes first.
        for each in gguf.files_of(path) if path.is_file() else [path]:
            os.replace(each, trash / each.name)
        shutil.rmtree(trash, ignore_errors=True)


def _release(lock: int) -> None:
    # A child that was forked and has not begun its program yet holds a copy of the descriptor.
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def plain_name(name: str) -> str:
    """Return a name without the hub's address before it."""
    for prefix in HUBS:
        name = name.removeprefix(prefix)
    return name


def _gguf_name(path: Path) -> str:
    match = gguf.SPLIT_NAME.fullmatch(path.name)
    return match[1] if match and len(gguf.files_of(path)) > 1 else path.stem


def _add_adapter(folder: Path, files: Mapping[str, Path]) -> None:
    """Put an adapter into a model's folder, in place of one that is there."""
    if not files:
        return
    place = folder / model_settings.ADAPTER
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, path in files.items():
        _link(path, place / name)


def _link(source: Path, target: Path) -> None:
    """Give a file's bytes a second name, or copy them where the file system has no such links."""
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)
