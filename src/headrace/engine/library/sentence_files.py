"""The files that sentence-transformers keeps beside a model: how the rows of a text become its vector, and the prompts
that are put before texts.

Called by `load`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from headrace import foreign, gguf
from headrace.checkpoint.gguf_encoders import layers_behind
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.models.encoders.head import Dense, dense
from headrace.protocol.errors import CheckpointError
from headrace.protocol.step import ALL_ROWS, POOLINGS, SPARSE_POOLINGS, Pooling, VectorForm

KINDS: dict[object, Pooling] = {"lasttoken" if kind == "last" else kind: kind for kind in POOLINGS}
"""Kinds of pooling by sentence-transformers' names."""
FLAGS = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
"""Older files have a flag for each kind. Where several are set, their vectors lie side by side in this order."""
LAYER_ACTIVATIONS = {
    "identity": "",
    "tanh": "tanh",
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "sigmoid": "sigmoid",
}
"""Activations of a Dense layer by the last part of torch's name."""
MAX_WIDTH = 2**16
MAX_PROMPTS = 1000
NO_FORM = VectorForm()

logger = logging.getLogger(__name__)


class WordForm(NamedTuple):
    """SPLADE's weights of words, as `models.encoders.head.WordWeights` has them."""

    sums: bool
    num_logs: int


class SentenceFiles(NamedTuple):
    """pooling: "" where the files name none. max_length: the most tokens of a text; None for the model's own. layers:
    behind the pooling. words: of a model whose vectors are weights of words."""

    pooling: Pooling = ""
    max_length: int | None = None
    layers: tuple[Dense, ...] = ()
    form: VectorForm = NO_FORM
    words: WordForm | None = None

    def width(self, hidden_size: int, vocab_size: int) -> int:
        """Return the count of numbers in a vector of a model with rows of `hidden_size`."""
        if self.words is not None:
            return vocab_size
        return len(self.layers[-1].weight) if self.layers else self.pooled_width(hidden_size)

    def pooled_width(self, hidden_size: int) -> int:
        """Return the count of numbers before the layers."""
        return hidden_size * (self.pooling.count("+") + 1)


def read_sentence_files(directory: Path) -> SentenceFiles:
    """Read modules.json, the modules' config.json, sentence_bert_config.json and config_sentence_transformers.json, as
    far as they are there, or the kind of pooling of a GGUF file. Raises `CheckpointError` for settings that would give
    other vectors here."""
    if directory.is_file():
        file = gguf.read(directory)
        layers_of_file = layers_behind(file)
        gguf_form = VectorForm(one_kind=bool(layers_of_file))
        return SentenceFiles(_gguf_pooling(file), layers=layers_of_file, form=gguf_form)
    if not (directory / "modules.json").is_file():
        layer = read_projection(directory)
        if layer is None:
            return SentenceFiles(form=_form(directory))
        return SentenceFiles(ALL_ROWS, layers=(layer,), form=_form(directory, True, True, "maxsim"))
    pooling: Pooling = ""
    words: WordForm | None = None
    with_prompt, normalize = True, False
    layers: list[Dense] = []
    modules = [(str(each.get("type", "")).rpartition(".")[2], each) for each in _modules(directory)]
    for kind, module in modules:
        folder = _folder(directory, module)
        if kind == "Pooling" and not pooling and not normalize:
            pooling, with_prompt = _pooling(folder / "config.json")
        elif kind == "Dense" and words is None and not normalize:
            pooling = pooling or ALL_ROWS
            source = "token_embeddings" if pooling == ALL_ROWS else "sentence_embedding"
            layers.append(_dense(folder, len(layers[-1].weight) if layers else None, source))
        elif kind == "MultiVectorMask" and pooling == ALL_ROWS:
            _warn_of_mask(folder / "config.json", {})
        elif kind == "Normalize":
            normalize = True
        elif kind == "SpladePooling" and modules[0][0] in _word_models(directory) and not pooling and not normalize:
            words = _words(folder / "config.json")
            pooling = SPARSE_POOLINGS[words.sums]
        elif kind == "MLMTransformer" and any(each == "SpladePooling" for each, _ in modules):
            pass
        elif kind not in ("Transformer", "Dropout"):
            raise CheckpointError(
                f"{directory / 'modules.json'}: a module {kind:.80}, expected Transformer, Pooling, Dense and "
                "Normalize in this order, or MLMTransformer and SpladePooling: the vectors would be others"
            )
    one_kind = bool(layers) or "+" in pooling or words is not None
    settings = directory / "config_sentence_transformers.json"
    if pooling == ALL_ROWS:
        values = foreign.read_object(settings, foreign.TABLE) if settings.is_file() else {}
        # PyLate's own files name no Normalize: its vectors have length one in any case.
        normalize |= values.get("model_type") != "MultiVectorEncoder"
        _warn_of_mask(settings, {"query_prefix": None})
        _warn_of_mask(directory / "sentence_bert_config.json", {})
    likeness = "maxsim" if pooling == ALL_ROWS else "cosine" if words is None else "dot"
    form = _form(directory, normalize, one_kind, likeness)
    if not with_prompt and pooling not in ("", "last", "cls") and any(form.prompts.values()):
        raise CheckpointError(
            f"{directory / 'modules.json'}: the pooling has include_prompt false, expected true where the files have "
            "prompts: the rows of a prompt are pooled here"
        )
    return SentenceFiles(pooling, _max_length(directory), tuple(layers), form, words)


def read_projection(directory: Path) -> Dense | None:
    """Return the layer of ColBERT's own files (Khattab and Zaharia 2020), which makes a token's vector of its row; None
    for other files. Raises `CheckpointError`."""
    path = directory / "config.json"
    stated = foreign.read_object(path, foreign.TABLE).get("architectures") if path.is_file() else None
    if not isinstance(stated, list) or not any("ColBERT" in str(name) for name in stated):
        return None
    checkpoint = MappedCheckpoint(directory)
    if "linear.weight" not in checkpoint.names:
        if (directory / "modules.json").is_file():
            return None
        raise CheckpointError(f"{path}: architectures has {stated[0]!r:.80}, expected linear.weight among the tensors")
    shape = checkpoint.entry("linear.weight").shape
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_WIDTH:
        raise CheckpointError(f"linear.weight has the shape {list(shape)}, expected at most {MAX_WIDTH} rows")
    return dense(checkpoint, "linear", (shape[0], shape[1]), bias=False)


def _warn_of_mask(path: Path, marks: dict[str, None]) -> None:
    """Log what the files say of tokens that count in a score and is not done here: [MASK] tokens behind a query, and
    words that do not count. marks: without any of these fields the files say nothing."""
    values = foreign.read_object(path, foreign.TABLE) if path.is_file() else {}
    expands = values.get("do_query_expansion") is not False and bool(values.keys() & marks.keys())
    named = [name for name in ("query_expansion", "skiplist_words", "keep_only_token_ids") if values.get(name)]
    if expands or named:
        parts = ", ".join(["do_query_expansion"] * expands + named)
        logger.warning("%s has %s: scores here are of all tokens of both texts, and of no others", path, parts)


def _gguf_pooling(file: gguf.GGUF) -> Pooling:
    """Return the pooling by llama.cpp's number: none, mean, cls, last, or 4 for a reranker's score."""
    key = f"{file.text('general.architecture')}.pooling_type"
    number = file.integer(key, 0, 4) or 0
    if number == 4 and "bert" in key:
        raise file.fault(key, number, "from 0 to 3: a reranker's score is not computed from a GGUF file")
    kinds: tuple[Pooling, ...] = ("", "mean", "cls", "last", "")
    return kinds[number]


def _modules(directory: Path) -> list[dict[str, Any]]:
    path = directory / "modules.json"
    data = foreign.read_bytes(path, foreign.TABLE.num_bytes)
    modules = foreign.parse_object(b'{"modules":' + data + b"}", path, foreign.TABLE)["modules"]
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{path}: expected a list of objects")
    return modules


def _folder(directory: Path, module: dict[str, Any]) -> Path:
    folder = str(module.get("path", ""))
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise CheckpointError(f"{directory / 'modules.json'}: path {folder:.80}, expected a folder beside the file")
    return directory / folder


def _pooling(path: Path) -> tuple[Pooling, bool]:
    """Return the kinds of pooling, and whether the rows of a prompt take part."""
    values = foreign.read_object(path, foreign.TABLE)
    flags = [name for flag, name in FLAGS.items() if values.get(f"pooling_mode_{flag}") is True]
    stated = values.get("pooling_mode", flags)
    named = [stated] if isinstance(stated, str) else stated
    known = isinstance(named, list) and all(isinstance(each, str) and each in KINDS for each in named)
    if not known or not named or len(set(named)) < len(named):
        bound = f"one or several of {', '.join(map(str, KINDS))}"
        raise CheckpointError(f"{path}: pooling_mode is {stated!r:.80}, expected {bound}")
    return "+".join(KINDS[each] for each in named), values.get("include_prompt") is not False


def _word_models(directory: Path) -> tuple[str, ...]:
    """Return the kinds of modules that give the logits of words: newer files name the model's task beside it."""
    path = directory / "sentence_bert_config.json"
    values = foreign.read_object(path, foreign.TABLE) if path.is_file() else {}
    fills = values.get("transformer_task") == "fill-mask"
    return ("MLMTransformer", "Transformer") if fills else ("MLMTransformer",)


def _words(path: Path) -> WordForm:
    values = foreign.read_object(path, foreign.TABLE)
    chosen = []
    for key, known in (("pooling_strategy", ("max", "sum")), ("activation_function", ("relu", "log1p_relu"))):
        stated = values.get(key, known[0])
        if stated not in known:
            raise CheckpointError(f"{path}: {key} is {stated!r:.80}, expected {' or '.join(known)}")
        chosen.append(known.index(stated))
    return WordForm(bool(chosen[0]), 1 + chosen[1])


def _dense(folder: Path, width: int | None, source: str) -> Dense:
    """Read a layer. width: of the layer before it. source: the name of what it reads and gives."""
    path = folder / "config.json"
    values = foreign.read_object(path, foreign.TABLE)
    ins, outs = (_size(path, values, key) for key in ("in_features", "out_features"))
    if width not in (None, ins):
        raise CheckpointError(f"{path}: in_features is {ins}, expected {width}, the width of the layer before it")
    for key in ("module_input_name", "module_output_name"):
        if values.get(key) not in (None, source):
            raise CheckpointError(f"{path}: {key} is {values[key]!r:.80}, expected {source}")
    if values.get("use_residual"):
        raise CheckpointError(f"{path}: use_residual is set, expected false: that sum is not computed here")
    module, _, name = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")
    if not module.startswith("torch.nn") or name.lower() not in LAYER_ACTIVATIONS:
        raise CheckpointError(
            f"{path}: activation_function is {values['activation_function']!r:.80}, expected torch's "
            f"{', '.join(LAYER_ACTIVATIONS)}"
        )
    activation, bias = LAYER_ACTIVATIONS[name.lower()], bool(values.get("bias", True))
    return dense(MappedCheckpoint(folder), "linear", (outs, ins), activation, bias=bias)


def _size(path: Path, values: dict[str, Any], key: str) -> int:
    size = values.get(key)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_WIDTH:
        raise CheckpointError(f"{path}: {key} is {size!r:.80}, expected an integer from 1 to {MAX_WIDTH}")
    return size


def _max_length(directory: Path) -> int | None:
    path = directory / "sentence_bert_config.json"
    length = foreign.read_object(path, foreign.TABLE).get("max_seq_length") if path.is_file() else None
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 2):
        raise CheckpointError(f"{path}: max_seq_length is {length!r:.80}, expected an integer of at least 2")
    return length


def _form(
    directory: Path, normalize: bool = True, one_kind: bool = False, usual_likeness: str = "cosine"
) -> VectorForm:
    path = directory / "config_sentence_transformers.json"
    values = foreign.read_object(path, foreign.TABLE) if path.is_file() else {}
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or len(prompts) > MAX_PROMPTS:
        raise CheckpointError(f"{path}: prompts is no object with at most {MAX_PROMPTS} texts by name")
    prompts = {name: "" if text is None else text for name, text in prompts.items()}
    for name, text in prompts.items():
        if not isinstance(text, str) or len(text) > MAX_WIDTH:
            raise CheckpointError(f"{path}: the prompt {name:.80} is no text of at most {MAX_WIDTH} characters")
    for name in ("query", "document") if usual_likeness == "maxsim" else ():
        prefix = values.get(f"{name}_prefix") or ""
        if not isinstance(prefix, str) or len(prefix) > MAX_WIDTH:
            raise CheckpointError(f"{path}: {name}_prefix is no text of at most {MAX_WIDTH} characters")
        if prefix:
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    default = values.get("default_prompt_name")
    if default is not None and default not in prompts:
        known = ", ".join(prompts) or "none: there are no prompts"
        raise CheckpointError(f"{path}: default_prompt_name is {default!r:.80}, expected one of {known:.1000}")
    likeness = values.get("similarity_fn_name") or usual_likeness
    likenesses = ["maxsim"] if usual_likeness == "maxsim" else ["cosine", "dot", "dot_score"]
    likeness = likeness.lower() if isinstance(likeness, str) else likeness
    if likeness not in likenesses:
        names = " or ".join(likenesses[:2])
        raise CheckpointError(
            f"{path}: similarity_fn_name is {likeness!r:.80}, expected {names}: other likenesses are not computed"
        )
    if values.get("max_active_dims") is not None:
        raise CheckpointError(
            f"{path}: max_active_dims is {values['max_active_dims']!r:.80}, expected none: all weights are given here"
        )
    cut = None if values.get("truncate_dim") is None else _size(path, values, "truncate_dim")
    return VectorForm(prompts, default or "", normalize, likeness == "cosine", cut, one_kind)
