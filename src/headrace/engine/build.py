"""The composition root of the engine: the one place where scheduler, runner and config meet.

`build_engine` is called by `LLM` and by the engine's own process under a server. Each part gets its numbers from here
and never sees the config. Torch is imported inside, with the runner.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from headrace import env, hub
from headrace.core.options import SchedulerOptions
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.fingerprint import fingerprint_of
from headrace.protocol.adapters import AdapterStore, LoadedAdapter, named_paths
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig, is_restart: bool = False, on_lost: Callable[[str], None] | None = None
) -> EngineCore:
    """Load the model, allocate its KV cache, and return an engine around them. `is_restart`: the engine replaces one
    that has died, and starts without a recording if that cannot be written. `on_lost`: called with the reason, on
    another thread, when other processes that compute the model with this one are lost.

    Raises `ModelNotFoundError`, `CheckpointError` or `RequestError` (a config value that the model cannot meet).
    """
    from headrace.engine.library.load import build_runner

    runner, info = build_runner(config, vocabulary=vocabulary_source(config), on_lost=on_lost)
    if not config.enable_chunked_prefill and info.max_num_batched_tokens < info.max_model_len:
        bound = f"at least max_model_len ({info.max_model_len}) while enable_chunked_prefill is off"
        raise RequestError("max_num_batched_tokens", config.max_num_batched_tokens, bound)
    scheduler = make_scheduler(config, info, runner.speculator is not None, choose_overlap(config, runner.runs_ahead))
    # The scheduler lowers the context length to the tokens that the pool holds; everything else reads it from `info`.
    info = msgspec.structs.replace(info, max_model_len=scheduler.max_model_len)
    make_core: Callable[..., EngineCore] = EngineCore
    if config.record_schedule is not None:
        make_core = recorded(config, config.record_schedule, info, runner.speculator, runner.matchers, is_restart)
    core = make_core(
        scheduler, runner, info, time.monotonic, check_every=1 if env.debug_level() >= 2 else 0, on_idle=runner.idle
    )
    core.adapters = runner.adapters
    if runner.adapters is not None:
        core.info = msgspec.structs.replace(info, adapters=load_adapters(runner.adapters, config, is_restart))
    core.fingerprint = functools.partial(fingerprint_of, config, info)
    return core


def load_adapters(store: AdapterStore, config: EngineConfig, is_restart: bool) -> dict[str, LoadedAdapter]:
    """Load the adapters of the config, and return them by name. One that can not be loaded again at a restart is left
    out, for others use the engine too. Raises `RequestError`."""
    loaded: dict[str, LoadedAdapter] = {}
    for name, path in named_paths(config.lora_modules or ()).items():
        try:
            loaded[name], prepared = store.read(path)
            store.put(loaded[name], prepared)
        except RequestError as error:
            if not is_restart:
                raise
            loaded.pop(name, None)
            logger.error("the adapter %s is lost: %s", name, error)
    return loaded


def make_scheduler(
    config: EngineConfig,
    info: EngineInfo,
    speculates: bool,
    runs_ahead: Callable[[SamplingParams], bool] | None = None,
) -> Scheduler:
    """Return the scheduler of an engine with these numbers. For the last two arguments see `Scheduler`."""
    return Scheduler(
        SchedulerOptions(
            num_blocks=info.num_blocks,
            kinds=info.kinds,
            more_blocks=info.more_blocks,
            block_size=info.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            # A row of an encoder sees its whole text.
            enable_prefix_caching=config.enable_prefix_caching and not info.whole_texts,
            enable_chunked_prefill=config.enable_chunked_prefill and not info.whole_texts,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.policy,
            eos_token_ids=info.eos_token_ids,
            vocab_size=info.vocab_size,
            speculates=speculates,
            runs_ahead=runs_ahead,
            # A key of this process alone, so that the keys of its cache cannot be computed outside (S-23). A fleet
            # sets one that its engines share.
            cache_key=os.urandom(32),
            cache_fingerprint="/".join(
                (info.model, str(config.revision), info.dtype, info.quantization, info.kv_cache_dtype, info.backend)
            ).encode(),
        )
    )


def choose_overlap(
    config: EngineConfig, runs_ahead: Callable[[SamplingParams], bool] | None
) -> Callable[[SamplingParams], bool] | None:
    """Return the look-ahead that lets the scheduler start a step before the last one is committed. None, to compute one
    step after the other, where that is configured, and while the schedule is recorded. Raises `RequestError` where it
    is configured and the executor cannot."""
    if config.async_scheduling and runs_ahead is None:
        bound = "left out: steps overlap on a GPU, without speculation"
        raise RequestError("async_scheduling", True, bound)
    return None if config.async_scheduling is False or config.record_schedule is not None else runs_ahead


def recorded(
    config: EngineConfig, path: str, info: EngineInfo, speculator: Any, matchers: Any, is_restart: bool = False
) -> Callable[..., EngineCore]:
    """Return the constructor of an engine whose schedule is recorded. Raises `RequestError` if the file cannot be
    written, except at a restart."""
    from headrace.engine.records.recording import RecordedEngine, Recorder

    config_bytes = msgspec.msgpack.encode(config)
    try:
        recorder = Recorder(path, config.max_record_bytes, config_bytes, info, time.time(), is_restart)
    except OSError as error:
        bound = f"a file that can be written ({error.strerror or error})"
        raise RequestError("record_schedule", path, bound) from error
    return functools.partial(RecordedEngine, recorder, speculator, matchers)


def vocabulary_source(config: EngineConfig) -> Callable[[int, list[int]], Any] | None:
    """Return a function that loads the tokenizer of `config` as a `grammar.Vocabulary`; None without a tokenizer."""
    if config.skip_tokenizer_init:
        return None

    def load(width: int, eos_token_ids: list[int]) -> Any:
        from headrace.grammar.vocabulary import Vocabulary
        from headrace.text import bounded_tokenizer

        path = hub.resolve_tokenizer(config.model, config.tokenizer, config.revision)
        tokenizer = bounded_tokenizer.load(path)
        vocabulary = Vocabulary.of(
            tokenizer.token_bytes, tokenizer.is_special, tokenizer.vocab_size, width, eos_token_ids
        )
        return vocabulary, functools.partial(tokenizer.encode, add_special_tokens=False)

    return load
