"""Builds a Runner from a config: find the directory, load the model, size the KV cache.

The one place in `runner` that sees `EngineConfig`. Called by `headrace.engine.build`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from headrace import __version__, gguf, hub, models
from headrace.backends import make_backend
from headrace.backends.adapters import Adapters
from headrace.backends.base import Backend, Program, SampleText, SetUp
from headrace.backends.shares import DeviceSeat, Seat
from headrace.checkpoint import gguf_config
from headrace.checkpoint.gguf_origin import GGUFOrigin
from headrace.checkpoint.mapped import MappedCheckpoint, choose_dtype, read_config
from headrace.checkpoint.overrides import overridden
from headrace.checkpoint.packed import PackedWriter
from headrace.checkpoint.reader import Progress, Reader
from headrace.checkpoint.source import Packing, naming, unpacked_weights, with_weights
from headrace.checkpoint.strays import prediction_layers
from headrace.drafters.base import Drafter, Target
from headrace.drafters.build import make_drafter, make_speculator
from headrace.drafters.guide import SamplerGuide
from headrace.engine.library import by_transformers
from headrace.engine.library.adapter_set import AdaptableWeights, AdapterSet
from headrace.engine.library.class_heads import class_form, with_class_head
from headrace.engine.library.encoders import add_layers, for_encoder, pooled_form, with_ends
from headrace.engine.library.pools import choose_kv_dtype, choose_pool_sizes, longest_table, token_bytes
from headrace.engine.library.sentence_files import read_sentence_files
from headrace.engine.library.stages import stage_maker
from headrace.engine.library.towers import load_tower
from headrace.engine.progress import progress_bar
from headrace.engine.ranks import first_seat, go, open_group, program_of, take_seat
from headrace.grammar.matchers import Load, Matchers
from headrace.models.config import ModelConfig
from headrace.models.unread import log_unread
from headrace.parallel.group import Group, Loaded, Ready
from headrace.parallel.sharding import RankWeights
from headrace.parallel.stages import StageSeat
from headrace.protocol.config import (
    DEQUANTIZE,
    QUANTIZATIONS,
    STORED_METHODS,
    WHILE_LOADING,
    WITHOUT_FP8,
    EngineConfig,
)
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.step import EngineInfo
from headrace.quant.base import stated_activations
from headrace.quant.schemes import Scheme, find_method, parse
from headrace.runner.drawing import NativeSelect
from headrace.runner.runner import Runner
from headrace.sampling.filters import Select, select_all
from headrace.sampling.sampler import Sampler
from headrace.text import sample

MANY_PIECES = 128

logger = logging.getLogger(__name__)


def build_runner(
    config: EngineConfig,
    progress: Progress | None = None,
    vocabulary: Load | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> tuple[Runner, EngineInfo]:
    """Load `config.model` and make room for its KV cache.

    `progress` is called with (tensors loaded, tensors in all); without it a bar is drawn if stderr is a terminal, else
    lines are logged.
    `vocabulary` reads the tokenizer when the first constraint needs it; without it there are none.
    `on_lost`: as `parallel.group.Group` has it, for a model that several ranks compute.
    Raises `ModelNotFoundError`, `CheckpointError`, or `RequestError` for a config value that the model cannot meet.
    """
    directory = hub.resolve(config.model, config.revision)
    group = _open_group(config, str(directory), on_lost)
    try:
        return _build_runner(config, directory, progress, vocabulary, group)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _open_group(config: EngineConfig, directory: str, on_lost: Callable[[str], None] | None) -> Group | None:
    if config.rendezvous is None:
        return open_group(config, directory, on_lost)
    # Sockets with TLS, which no other engine needs.
    from headrace.engine.hosts import await_hosts

    return await_hosts(config, config.rendezvous, directory, on_lost)


def _go(group: Group, token_ids: list[int]) -> None:
    """Have all ranks, which have their weights, choose the activations. Raises as `hosts.connect`."""
    if group.hosts is None:
        go(group, token_ids)
        return
    from headrace.engine.hosts import connect

    connect(group, token_ids)


def _build_runner(
    config: EngineConfig, directory: Path, progress: Progress | None, vocabulary: Load | None, group: Group | None
) -> tuple[Runner, EngineInfo]:
    seat = None if group is None else first_seat(config, group)
    if progress is not None:
        backend, model, model_config = load_model(config, directory, progress, seat)
    else:
        with progress_bar(f"loading {config.model}", logger=logger) as show:
            backend, model, model_config = load_model(config, directory, show, seat)
    weight_bytes = backend.ops.weight_bytes
    sentences = add_layers(model, read_sentence_files(directory))
    config, most = by_transformers.in_short_steps(config, model), model.max_positions(model_config)
    if model.both_ways:
        config = for_encoder(config, choose_max_model_len(None, most, directory), sentences)
    max_model_len = choose_max_model_len(config.max_model_len, most, directory)
    text = SampleText(lambda: sample.mark(directory), lambda: sample.token_ids(directory)[:max_model_len])
    if group is not None:
        weight_bytes += sum(loaded.weight_bytes for loaded in group.expect(Loaded))
        _go(group, text.read() if config.activations == "auto" and backend.name == "cpu" else [])
    # An encoder has no logits to be judged at.
    activations = choose_activations(config, backend, model, model_config, None if model.both_ways else text)
    if config.max_model_len is not None and config.max_model_len > max_model_len:
        line = "max_model_len: %d is more than the model's context, so it is %d; --rope-scaling stretches a context"
        logger.warning(line, config.max_model_len, max_model_len)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, backend, model_config.values.get("quantization_config"))
    tokenizer = hub.resolve_tokenizer(config.model, config.tokenizer) if config.tokenizer else directory
    eos_token_ids = [i for i in hub.eos_token_ids(directory, tokenizer) if i < model.vocab_size]
    selecting = choose_select(backend, model.vocab_size, config.num_threads)
    sampler = Sampler(model.vocab_size, eos_token_ids, selecting)
    spec = config.speculative_config
    target: Target | None = None
    drafter: Drafter | None = None
    if spec is not None:
        # Before the cache is sized: it takes the memory that the drafter leaves.
        guide = SamplerGuide(sampler, rejects=spec.mode == "rejection")
        target = make_target(config, directory, backend, model, model_config, max_model_len, kv_dtype, guide)
        drafter = make_drafter(spec, target)
    pictures = load_tower(config, directory, model, model_config.values)
    max_pieces = config.max_num_seqs if spec is None else num_pieces(config.max_num_seqs, spec.num_nodes)
    pool_sizes = choose_pool_sizes(config, model, max_model_len, backend, kv_dtype, max_pieces)
    set_up = SetUp(
        pool_sizes=tuple(pool_sizes),
        block_size=config.block_size,
        kv_dtype=kv_dtype,
        max_num_seqs=max_pieces,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_blocks_per_seq=longest_table(model.kinds, pool_sizes[0], max_model_len, config.block_size),
        num_threads=config.num_threads,
    )
    if group is not None:
        group.send(set_up)
    feature_layers = (drafter.feature_layers or ()) if drafter is not None else ()
    program: Program = backend.program(model, set_up, feature_layers)
    if group is not None:
        group.check()
        group.expect(Ready)
        program = program_of(config, program, group)
    matchers = None
    if vocabulary is not None:
        matchers = Matchers(vocabulary, model.vocab_size, eos_token_ids, capacity=config.max_num_seqs)
    speculator = None
    if spec is not None and drafter is not None and target is not None:
        speculator = make_speculator(spec, drafter, target, eos_token_ids)
    places: Adapters | None = backend.ops.adapters
    adapters = None if places is None else AdapterSet(places, config.max_loras, model_config)
    runner = Runner(program, sampler, matchers, speculator, adapters, pictures)
    pooling, classes = pooled_form(model, model_config, sentences)
    info = EngineInfo(
        model=config.model,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_token_ids,
        block_size=config.block_size,
        num_blocks=pool_sizes[0],
        kinds=model.kinds,
        more_blocks=tuple(pool_sizes[1:]),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logprobs=config.max_logprobs,
        hidden_size=sentences.width(model.hidden_size, model.vocab_size),
        scheduling_policy=config.policy,
        dtype=backend.dtype,
        kv_cache_dtype=kv_dtype,
        quantization=form_name(config, model_config, backend.schemes),
        activations=activations,
        backend=backend.name,
        device=backend.device,
        version=__version__,
        weight_bytes=weight_bytes,
        kv_token_bytes=token_bytes(backend, model, config.block_size, kv_dtype),
        generates=not model.both_ways and model.has_head and classes is None,
        whole_texts=model.both_ways,
        pooling=pooling,
        classes=classes,
        vectors=sentences.form,
        pictures="" if pictures is None else str(pictures.tower.outer.values["model_type"]),
    )
    return runner, info


def choose_activations(
    config: EngineConfig,
    backend: Backend,
    model: models.Model,
    model_config: ModelConfig,
    text: SampleText | None = None,
) -> str:
    """See `Backend.choose_activations`."""
    stated = stated_activations(model_config.values.get("quantization_config"))
    return backend.choose_activations(model, config.activations, config.num_threads, stated, text)


def make_target(
    config: EngineConfig,
    directory: Path,
    backend: Backend,
    model: models.Model,
    model_config: ModelConfig,
    max_model_len: int,
    kv_dtype: str,
    guide: SamplerGuide,
) -> Target:
    """The parts of the engine that a drafter may use."""

    def load(path: Path, quantization: str | None, length: int) -> tuple[Backend, models.Model, dict[str, Any]]:
        draft_config = msgspec.structs.replace(
            config,
            model=str(path),
            quantization=quantization,
            max_model_len=length,
            save_packed=False,
            speculative_config=None,
            hf_overrides=None,
        )
        with progress_bar(f"loading {path}", logger=logger) as show:
            loaded = load_model(draft_config, path, show)
        stated = stated_activations(loaded[2].values.get("quantization_config"))
        loaded[0].choose_activations(loaded[1], "auto", config.num_threads, stated)
        return loaded[0], loaded[1], loaded[2].values

    def compare(path: Path) -> bool:
        if config.skip_tokenizer_init:
            return False
        from headrace.text import same_tokens

        path_of_target = hub.resolve_tokenizer(config.model, config.tokenizer, config.revision)
        return same_tokens.check(path_of_target, path)

    return Target(
        model=model,
        backend=backend,
        directory=directory,
        config=model_config.values,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=len(model.layers),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_threads=config.num_threads,
        kv_dtype=kv_dtype,
        quantization=config.quantization,
        guide=guide,
        load=load,
        compare_tokenizers=compare,
    )


def load_model(
    config: EngineConfig, directory: Path, progress: Progress, seat: Seat | DeviceSeat | StageSeat | None = None
) -> tuple[Backend, models.Model, ModelConfig]:
    """The model of `directory` (or of a GGUF file) with its weights. `seat`: of a rank, which takes its part of the
    weights. Raises `CheckpointError`, which names the directory or the file, or `RequestError`."""
    load = _load_gguf if directory.is_file() else _load_safetensors
    with naming(directory):
        if by_transformers.reason(config, directory):
            return by_transformers.load(config, directory, progress, seat is not None)
        return load(config, directory, progress, seat)


def _load_safetensors(
    config: EngineConfig, directory: Path, progress: Progress, seat: Seat | DeviceSeat | StageSeat | None
) -> tuple[Backend, models.Model, ModelConfig]:
    values = overridden(read_config(directory, [*models.names(), *models.encoder_names()]), config.hf_overrides)
    checkpoint = MappedCheckpoint(directory)
    values, has_head = with_ends(values, checkpoint.names, directory)
    backend = make_backend(config.backend, config.device, choose_dtype(config.dtype, checkpoint, values))
    config = as_stored(config, find_method(values.get("quantization_config")), backend.schemes)
    if config.quantization == DEQUANTIZE and values.get("quantization_config") is not None:
        raise RequestError("quantization", DEQUANTIZE, "left out: only the blocks of GGUF files are dequantised as yet")
    module, form = models.find(values["model_type"]), class_form(values)
    model_config = ModelConfig(values)
    max_model_len = choose_max_model_len(config.max_model_len, module.Model.max_positions(model_config), directory)
    quantization = None if config.quantization == DEQUANTIZE else config.quantization
    schemes = None if quantization is None else parse(quantization)

    def read(writer: PackedWriter | None) -> Reader:
        from headrace.checkpoint.loader import SafetensorsWeights
        from headrace.checkpoint.quantising import Loading
        from headrace.checkpoint.tensors import Checkpoint

        stored, loading = values.get("quantization_config"), Loading(progress, schemes, writer)
        spare = re.compile(f"{prediction_layers(values, checkpoint.names).pattern}|{module.Model.spare}")
        return SafetensorsWeights(Checkpoint(directory), backend, stored, loading, spare)

    build = with_class_head(maker(config, module, model_config, backend, max_model_len, seat), form, config)
    in_parts, save, verify = seat is not None, config.save_packed, config.verify_packed
    packing = Packing(checkpoint, backend, quantization, progress, max_model_len, save, in_parts, verify)
    model = _weighted(config, build, read, packing)
    model.has_head = has_head
    if seat is None:  # a rank may have layers that do not read all
        log_unread(model_config.values, model.unread)
    return backend, model, model_config


def _weighted(
    config: EngineConfig,
    build: Callable[[Reader], models.Model],
    read: Callable[[PackedWriter | None], Reader],
    packing: Packing,
) -> models.Model:
    """Return the model with its weights. With values in place of config.json's, packed files are left alone: what they,
    and the measurements next to them, belong to the model as it stands."""
    if config.hf_overrides is None:
        return with_weights(build, read, packing)
    if config.save_packed:
        logger.warning("save_packed has no effect with hf_overrides: a packed file is of the model as it stands")
    return unpacked_weights(build, read)


def as_stored(config: EngineConfig, method: str, schemes: Collection[Scheme]) -> EngineConfig:
    """Return the config without a quantization that names the checkpoint's own `method`, and of plain weights with the
    form that they are quantised to on a backend with kernels for `schemes`.

    Raises `RequestError` if it names another one."""
    name = config.quantization or ""
    if method == "none" and name in WHILE_LOADING:
        form = while_loading(name, schemes)
        logger.log(
            logging.INFO if form in WITHOUT_FP8 else logging.WARNING,
            "quantization: the weights are quantised while loading, and %s becomes %s, the nearest form here",
            name,
            form,
        )
        return msgspec.structs.replace(config, quantization=form)
    named = STORED_METHODS.get(name, name if name in WHILE_LOADING else None)
    if named is None or (named != method and name in QUANTIZATIONS):
        return config
    if named != method:
        raise RequestError("quantization", name, f"left out: the checkpoint's own method is {method}")
    return msgspec.structs.replace(config, quantization=None)


def while_loading(name: str, schemes: Collection[Scheme]) -> str:
    """Return the form for a name of `WHILE_LOADING`; of 8-bit floats only if a backend with `schemes` has kernels."""
    form = WHILE_LOADING[name]
    return form if parse(form).layer in schemes else WITHOUT_FP8.get(form, form)


def form_name(config: EngineConfig, model_config: ModelConfig, schemes: Collection[Scheme]) -> str:
    """Return the name of the form that the weights are quantised to, or that is stored; empty if neither is named."""
    is_plain = find_method(model_config.values.get("quantization_config")) == "none"
    named = config.quantization or ""
    return while_loading(named, schemes) if is_plain and named in WHILE_LOADING else named


def _load_gguf(
    config: EngineConfig, path: Path, progress: Progress, seat: Seat | DeviceSeat | StageSeat | None
) -> tuple[Backend, models.Model, ModelConfig]:
    config = as_stored(config, "gguf", ())
    exact = config.quantization == DEQUANTIZE
    schemes = None if exact or config.quantization is None else parse(config.quantization)
    file = gguf.read(path)
    reading = gguf_config.read(file)
    reading = reading._replace(values=overridden(reading.values, config.hf_overrides))
    model_config = ModelConfig(reading.values)
    backend = make_backend(config.backend, config.device, gguf_config.choose_dtype(config.dtype, file))
    module = models.find(reading.values["model_type"])
    max_model_len = choose_max_model_len(config.max_model_len, module.Model.max_positions(model_config), path)

    def read(writer: PackedWriter | None) -> Reader:
        from headrace.checkpoint.gguf_source import GGUFWeights
        from headrace.checkpoint.quantising import Loading

        return GGUFWeights(file, reading, backend, Loading(progress, schemes, writer), exact)

    build, in_parts = maker(config, module, model_config, backend, max_model_len, seat), seat is not None
    origin = GGUFOrigin(path, file, reading, backend, exact)
    save, verify = config.save_packed, config.verify_packed
    packing = Packing(origin, backend, config.quantization, progress, max_model_len, save, in_parts, verify)
    return backend, _weighted(config, build, read, packing), model_config


def maker(
    config: EngineConfig,
    module: Any,
    model_config: ModelConfig,
    backend: Backend,
    max_model_len: int,
    seat: Seat | DeviceSeat | StageSeat | None,
) -> Callable[[Reader], models.Model]:
    """Return a function that makes a model, or one rank's part of it, of its weights. The function raises
    `RequestError` where a model without experts is to share them out."""
    if isinstance(seat, StageSeat):
        return stage_maker(module, model_config, config.quantization, backend, max_model_len, seat)
    if seat is None:
        places = _adapters(config, backend)
        return lambda weights: module.Model(
            model_config, weights if places is None else AdaptableWeights(weights, places), backend.ops, max_model_len
        )
    ops, whole_experts = take_seat(backend, seat), seat.plan.whole_experts

    def make(weights: Reader) -> models.Model:
        ranked = RankWeights(weights, ops)
        model: models.Model = module.Model(model_config, ranked, ops, max_model_len)
        if whole_experts and not ranked.has_experts:
            raise RequestError("enable_expert_parallel", True, "left out for this model, whose layers have no experts")
        return model

    return make


def _adapters(config: EngineConfig, backend: Backend) -> Adapters | None:
    """Have the operators of `backend` take adapters, if the config asks for that, and return their places. Raises
    `RequestError` for a backend that has none."""
    if not config.enable_lora:
        return None
    # Of the scaled ones a step has at most one for each of its sequences, and so has the step before it.
    num_slots = config.max_loras + 2 * config.max_num_seqs
    places = backend.take_adapters(num_slots, config.max_lora_rank)
    if places is None:
        raise RequestError("enable_lora", True, f"left out: the backend {backend.name} takes no adapters as yet")
    return places


def choose_select(backend: Backend, vocab_size: int, num_threads: int) -> Select:
    """The selection of candidates by the backend's operator if it has one, else numpy's: both give the same tokens."""
    chooser = backend.chooser(vocab_size, num_threads)
    return select_all if chooser is None else NativeSelect(chooser)


def num_pieces(max_num_seqs: int, num_nodes: int) -> int:
    """Pieces of one forward pass, and rows of its logits, where each sequence may have `num_nodes` guesses: room for
    the guesses of one sequence at least, and for the guesses of all while that takes little memory."""
    return max(max_num_seqs, 1 + num_nodes, min(max_num_seqs * (1 + num_nodes), MANY_PIECES))


def choose_max_model_len(requested: int | None, most: int, path: Path) -> int:
    """`requested`, or `most`, all that the model has. A larger `requested` is lowered for a GGUF file, as in
    llama-server, and raises `RequestError` for a directory, as in vLLM."""
    if most < 2:
        raise CheckpointError(f"config.json: a context of {most} tokens has no room for a prompt and an answer")
    if requested is not None and requested > most and not path.is_file():
        raise RequestError("max_model_len", requested, f"at most {most}, the context that config.json gives the model")
    return min(requested or most, most)
