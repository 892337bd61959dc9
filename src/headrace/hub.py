"""Finds a model's files: a local directory, a GGUF file, a hub id, or the built-in model. No torch, no weights.

`resolve` is called by the loader (for weights), by the text layer (for the tokenizer) and by the command line.
Nothing from the model directory is ever executed: only the file kinds in `PATTERNS` are fetched or looked at.

`python -m headrace.hub NAME FOLDER` fetches a model into a folder, for the server, and prints its progress as lines of
JSON. It is a separate program: the memory and threads of the hub's client end with it.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace import builtin, foreign, gguf
from headrace.protocol import bounds
from headrace.protocol.errors import CheckpointError, ModelNotFoundError, RequestError

logger = logging.getLogger(__name__)

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.model.v*", "*.txt"]
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")
"""The GGUF file of a repository that is fetched if no tag chooses another."""
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
"""The files in which ModelOpt, GPTQ's, AWQ's and auto-round's writers put the settings that config.json lacks."""
PICTURE_FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that say how pictures become numbers."""
DIGESTED = ("config.json", *QUANTIZATION_FILES, *PICTURE_FILES, "*.safetensors", "*.gguf", "*.u8")
"""The files that decide the results of a model; *.u8 is the built-in one's."""
TEXT_FILES = (
    "tokenizer*.json",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.model.v*",
)
"""The files that decide how texts and tokens correspond; for a GGUF file, the file itself."""
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
"""The keys of a config.json for the settings of quantisation: the usual one, compressed-tensors' older one, MLX's."""
METHOD_KEYS = {
    "modelopt": frozenset({"quant_algo", "exclude_modules"}),
    "auto-round": frozenset({"packing_format", "autoround_version", "extra_config"}),
    "awq": frozenset({"zero_point", "w_bit", "q_group_size"}),
    "gptq": frozenset({"desc_act", "sym", "damp_percent", "is_marlin_format"}),
    "compressed-tensors": frozenset({"config_groups"}),
    "hqq": frozenset({"weight_quant_params", "nbits"}),
    "mlx": frozenset({"bits", "group_size"}),
}
"""For each method that writers leave unnamed, keys of its settings; the first method that has one of them counts."""
MAX_ID_DIGITS = 20
_TURN_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> <|end_of_text|>".split()
)


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the directory of `model` ('builtin', a path, or a hub id, fetched by `huggingface_hub`), or its GGUF file,
    the first one of a split model.

    A directory that holds one GGUF model and no config.json means that model, as does any of its files. Raises
    `ModelNotFoundError` naming the attempts.
    """
    if model == "builtin":
        return builtin.directory() if weights else builtin.PATH
    if not model.strip():
        # The empty path would be the folder that the command runs in.
        raise ModelNotFoundError("MODEL is empty; name a directory, a .gguf file, a hub id, or 'builtin'")
    path = Path(model).expanduser()
    if path.is_dir():
        files = [] if (path / "config.json").exists() else gguf.models_in(path)
        if len(files) > 1:
            raise ModelNotFoundError(f"{model} holds {len(files)} GGUF models; name one, such as {files[0]}")
        return _first_file(files[0]) if files else path
    if path.is_file() and path.suffix == ".gguf":
        return _first_file(path)
    if path.exists():
        raise ModelNotFoundError(
            f"{model} is a file; headrace reads a directory with config.json and *.safetensors, or a .gguf file"
        )
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelNotFoundError(f"{model}: no such directory, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    patterns = PATTERNS if weights else [p for p in PATTERNS if p != "*.safetensors"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a dozen kinds; the message reports each
        raise ModelNotFoundError(f"{model}: not a local directory, and the hub said: {error}") from error


def _first_file(path: Path) -> Path:
    files = gguf.files_of(path)
    if not files[0].is_file():
        raise ModelNotFoundError(f"{files[0]} is missing: the model is split into {len(files)} files")
    return files[0]


def resolve_tokenizer(model: str, tokenizer: str | None, revision: str | None = None) -> Path:
    """Return the directory or file of the tokenizer: `tokenizer` if it is given (a file is fine), else the model's.

    The revision pins the model only; another repository has other revisions.
    """
    if tokenizer is None:
        return resolve(model, revision, weights=False)
    path = Path(tokenizer).expanduser()
    return path if path.is_file() else resolve(tokenizer, weights=False)


def projector_of(path: Path, mmproj: str) -> Path | None:
    """Return the GGUF file with the tower for pictures of the model at `path`: the file `mmproj`; with "auto" the only
    one beside a GGUF file whose name has "mmproj" in it; with "none", None. Several are none, with a warning. Raises
    `ModelNotFoundError` for a file that is not there."""
    if mmproj not in ("auto", "none"):
        file = Path(mmproj).expanduser()
        if not file.is_file():
            raise ModelNotFoundError(f"{mmproj}: no such file; mmproj names the GGUF file of a tower for pictures")
        return file
    beside = gguf.projectors_in(path.parent) if mmproj == "auto" and path.is_file() else []
    if len(beside) > 1:
        names = ", ".join(each.name for each in beside[:4])
        logger.warning("pictures are refused: %s has several towers beside it, %s; --mmproj names one", path, names)
    return beside[0] if len(beside) == 1 else None


def digest(path: Path, names: Iterable[str] = DIGESTED) -> str:
    """Return the digest, in hex, of the files of these names in a directory (a model's config and weights), or of a
    file, with the others of a split model. Reads all of them, a second for each gigabyte. Raises OSError."""
    directory = [] if path.is_file() else [each for name in names for each in sorted(path.glob(name))]
    files = gguf.files_of(path) if path.is_file() else [each for each in directory if each.is_file()]
    hasher = hashlib.blake2b(digest_size=16)
    for each in files:
        with open(each, "rb") as file:
            hasher.update(hashlib.file_digest(file, "blake2b").digest())
    return hasher.hexdigest()


def weights_digest(model: str, revision: str | None) -> str:
    """Return the `digest` of a model's files, "" if its weights are not here."""
    path = resolve(model, revision, weights=False)
    has_weights = path.is_file() or any(any(path.glob(name)) for name in DIGESTED if name.startswith("*"))
    return digest(path) if has_weights else ""


def read_json(path: Path, limits: foreign.Limits = foreign.TABLE) -> dict[str, Any]:
    """Read a JSON object from a model directory. Raises `CheckpointError` if it is missing, too large or no object."""
    return foreign.read_object(path, limits)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a directory, with the settings of its quantisation where `with_quantization` puts them.
    Raises `CheckpointError`."""
    return with_quantization(read_json(directory / "config.json", foreign.CONFIG), directory)


def with_quantization(values: dict[str, Any], directory: Path | None = None) -> dict[str, Any]:
    """Return the values of a config.json with the settings of its quantisation under `quantization_config`, and in them
    the name of the method and the place of the settings (`stated_in`), for errors.

    Writers put the settings there, under other keys (`QUANTIZATION_KEYS`), or in a file of their own
    (`QUANTIZATION_FILES`), and some leave out the method. Raises `CheckpointError` for settings of no method.
    """
    others = {key: value for key, value in values.items() if key not in QUANTIZATION_KEYS}
    text = values.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    for key in QUANTIZATION_KEYS:
        if values.get(key) or (key == "quantization_config" and inner):
            source, stated = f"config.json: {key}", values.get(key) or inner
            break
    else:
        files = [] if directory is None else [directory / name for name in QUANTIZATION_FILES]
        file = next((path for path in files if path.is_file()), None)
        if file is None:
            return others
        source, stated = file.name, read_json(file, foreign.CONFIG)
    if not isinstance(stated, dict):
        raise CheckpointError(f"{source} is {stated!r:.80}, expected an object")
    nested = stated.get("quantization")  # of ModelOpt
    settings = {**stated, **(nested if isinstance(nested, dict) else {})}
    method = settings.get("quant_method") or _unnamed_method(settings)
    if method is None:
        raise CheckpointError(f"{source} names no quant_method, and its keys are those of no method that is known")
    settings |= {"quant_method": method, "stated_in": source}
    return {**others, "quantization_config": settings}


def _unnamed_method(settings: dict[str, Any]) -> str | None:
    """Return the method of settings that do not name it, by the keys that only its writers use."""
    return next((method for method, keys in METHOD_KEYS.items() if not keys.isdisjoint(settings)), None)


def check_field(path: Path, name: str, value: object, field: str | None = None) -> None:
    """Check a value of the file `path` against the row `name` of the bounds of requests. Raises `CheckpointError`."""
    try:
        bounds.check(name, value, field)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error


def eos_token_ids(directory: Path, tokenizer: Path | None = None) -> list[int]:
    """Return the ids that end a text: those of generation_config.json and config.json (either may give one id or a
    list), and the `eos_token` of the tokenizer, whose folder is `tokenizer` or the model's.

    Of a GGUF file: its end of text and of turn, and control tokens that are known to end a turn. Raises
    `CheckpointError` for a value that is no token id, and for more ids than a request may give.
    """
    if directory.is_file():
        return gguf_ends(gguf.read(directory))
    ids: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        value = read_json(path, foreign.CONFIG).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        check_field(path, "stop_token_ids", listed, "eos_token_id")
        for token_id in listed:
            if token_id is None or token_id == -1:  # some files write -1 for "there is none"
                continue
            check_field(path, "token_id", token_id, "eos_token_id")
            ids[token_id] = None
    if (end := tokenizer_end(tokenizer or directory)) is not None:
        ids[end] = None
    return list(ids)


def tokenizer_end(directory: Path) -> int | None:
    """Return the id of the `eos_token` that a tokenizer's side files name, if it is an added token; None for no such
    token. Fine-tunes name their end of turn there, and often nowhere else. Raises `CheckpointError`."""
    files = {name: directory / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map", "added_tokens")}
    config, roles, added = (read_json(path) if path.is_file() else {} for path in files.values())
    text = config.get("eos_token") or roles.get("eos_token")
    if isinstance(text, dict):
        text = text.get("content")
    if not isinstance(text, str) or not text:
        return None
    listed = config.get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, dict) else ()
    candidates = [token_id for token_id, entry in entries if isinstance(entry, dict) and entry.get("content") == text]
    candidates += [added[text]] if text in added else []
    candidates += [
        entry.get("id") for entry in _added_tokens(directory / "tokenizer.json") if entry.get("content") == text
    ]
    for token_id in candidates:
        if str(token_id).isdecimal() and len(str(token_id)) <= MAX_ID_DIGITS:
            check_field(directory / "tokenizer_config.json", "token_id", int(token_id), "eos_token")
            return int(token_id)
    return None


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """The `added_tokens` of a tokenizer.json, without parsing the vocabulary behind them."""
    if not path.is_file() or path.stat().st_size > foreign.TABLE.num_bytes:
        return []
    text = foreign.read_bytes(path, foreign.TABLE.num_bytes).decode("utf-8", errors="replace")
    place = re.search(r'"added_tokens"\s*:\s*', text)
    if place is None:
        return []
    try:
        entries, _ = json.JSONDecoder().raw_decode(text, place.end())
    except (ValueError, RecursionError):
        return []  # the reader of tokenizers refuses the file in its own words
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def gguf_ends(file: gguf.GGUF) -> list[int]:
    """Return the ids that end a text or a turn, from the metadata. Raises `CheckpointError`."""
    key = "tokenizer.ggml."
    tokens = file.texts(key + "tokens", gguf.MAX_TOKENS, gguf.MAX_TOKEN_BYTES) or []
    kinds = file.integers(key + "token_type", gguf.MAX_TOKENS) or ()
    named = [file.integer(f"{key}{role}_token_id", 0, max(len(tokens) - 1, 0)) for role in ("eos", "eot", "eom")]
    # Older files name one id only, and chat models end their turns with another.
    turn_ends = [
        i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == 3 and text in _TURN_ENDS
    ]
    return list(dict.fromkeys([*(token_id for token_id in named if token_id is not None), *turn_ends]))


def choose_files(names: list[str], tag: str) -> list[str]:
    """Return the files of a repository that make one model: a GGUF file if there are some, the one whose name has the
    `tag` in it, with the others of a split model and one tower for pictures; and else the files of a plain checkpoint.
    Raises `ModelNotFoundError`."""
    ggufs = sorted(each for each in names if each.endswith(".gguf") and not gguf.is_projector(each))
    plain = [name for name in names if "/" not in name and any(fnmatch.fnmatch(name, each) for each in PATTERNS)]
    if tag in ("", "latest") and "config.json" in plain and any(name.endswith(".safetensors") for name in plain):
        return plain
    parts = PREFERRED if tag in ("", "latest") else (tag,)
    chosen = [name for part in parts for name in ggufs if part.lower() in name.lower()]
    if tag in ("", "latest"):
        chosen += ggufs
    if not chosen:
        there = f"its GGUF files are {', '.join(ggufs[:20])}" if ggufs else "it has no weights that headrace reads"
        raise ModelNotFoundError(f"the repository has no model{f' for the tag {tag}' if tag else ''}: {there}")
    folder, slash, name = chosen[0].rpartition("/")
    files = [f"{folder}{slash}{each}" for each in gguf.names_of_files(name)]
    if missing := [each for each in files if each not in names]:
        raise ModelNotFoundError(f"the repository has {chosen[0]} but not {', '.join(missing[:5])}")
    towers = sorted(each for each in names if each.endswith(".gguf") and gguf.is_projector(each.rpartition("/")[2]))
    return files + min(([each] for each in towers), key=lambda each: "-f16" not in each[0].lower(), default=[])


def pull(name: str, folder: Path) -> None:
    """Fetch the model `OWNER/NAME` or `OWNER/NAME:TAG` from the hub into `folder`, and print lines of progress.

    Files that are there already, whole or in part, are not fetched again. Raises `ModelNotFoundError`."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm

    about: dict[str, Any] = {}

    def show(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    class Bar(tqdm):
        """Prints lines in place of a bar."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs = {name: value for name, value in kwargs.items() if name != "name"} | {"disable": False}
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def display(self, *args: Any, **kwargs: Any) -> bool:
            show(**about, completed=int(self.n))
            return True

    repository, _, tag = name.partition(":")
    show(status="pulling manifest")
    try:
        info = HfApi().model_info(repository, files_metadata=True)
        files = {each.rfilename: each for each in info.siblings or []}
        chosen = choose_files(list(files), tag)
        size = sum(files[path].size or 0 for path in chosen if not (folder / path).exists())
        if size > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for path in chosen:
            digest = getattr(files[path].lfs, "sha256", None) or files[path].blob_id or ""
            about = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}", "total": files[path].size or 0}
            hf_hub_download(repository, path, revision=info.sha, local_dir=folder, tqdm_class=Bar)
            show(**about, completed=about["total"])
        # At the end, since the hub's client looks for finished files where it has put them.
        for path in chosen:
            (folder / path).rename(folder / Path(path).name)
        for top in {path.partition("/")[0] for path in chosen if "/" in path}:
            shutil.rmtree(folder / top)
    except ModelNotFoundError:
        raise
    except Exception as error:  # the hub's client raises a dozen kinds; the message reports each
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ModelNotFoundError(f"{name}: the hub said: {error}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Run `pull` and return the exit status."""
    try:
        pull(arguments[0], Path(arguments[1]))
    except (ModelNotFoundError, OSError) as error:
        number = error.errno if isinstance(error, OSError) else None
        print(json.dumps({"error": str(error), "errno": number}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
