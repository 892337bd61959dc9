"""The composition root of the engine: the one place where scheduler, runner and config meet.

`build_engine` is called by `LLM` in-process and by the engine's own process under a server. Each part gets its
numbers from here and never sees the config. Torch is imported inside, with the runner.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from headrace import env, hub
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.step import EngineInfo


def build_engine(config: EngineConfig, is_restart: bool = False) -> EngineCore:
    """Load the model, make room for its KV cache, and put an engine around them. `is_restart`: in the place of one that
    has died, so that what is not needed to serve may be missing.

    Raises `ModelNotFoundError`, `CheckpointError` or `RequestError` (a config value that the model can not meet).
    """
    from headrace.engine.load import build_runner

    runner, info = build_runner(config, vocabulary=vocabulary_source(config))
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < info.max_model_len:
        bound = f"at least max_model_len ({info.max_model_len}) while enable_chunked_prefill is off"
        raise RequestError("max_num_batched_tokens", config.max_num_batched_tokens, bound)
    scheduler = Scheduler(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        policy=config.scheduling_policy,
        eos_token_ids=info.eos_token_ids,
        speculates=runner.speculator is not None,
        # A cache of this process alone: nobody outside can compute its keys (S-23).
        cache_key=os.urandom(32),
        cache_fingerprint="/".join(
            (info.model, str(config.revision), info.dtype, info.quantization, info.kv_cache_dtype, info.backend)
        ).encode(),
    )
    # Where nobody asked for a length, the pool may be smaller than the model's context: the narrower bound is told.
    info = msgspec.structs.replace(info, max_model_len=scheduler.max_model_len)
    make: Callable[..., EngineCore] = EngineCore
    if config.record_schedule is not None:
        make = recorded(config, config.record_schedule, info, runner.speculator, runner.matchers, is_restart)
    return make(
        scheduler, runner, info, time.monotonic, check_every=1 if env.debug_level() >= 2 else 0, on_idle=runner.idle
    )


def recorded(
    config: EngineConfig, path: str, info: EngineInfo, speculator: Any, matchers: Any, is_restart: bool = False
) -> Callable[..., EngineCore]:
    """What makes an engine that is written down. Raises `RequestError` if there can be no file, but for a restart."""
    from headrace.engine.recording import RecordedEngine, Recorder

    written = msgspec.msgpack.encode(config)
    try:
        recorder = Recorder(path, config.max_record_bytes, written, info, time.time(), is_restart)
    except OSError as error:
        bound = f"a file that can be written ({error.strerror or error})"
        raise RequestError("record_schedule", path, bound) from error
    return functools.partial(RecordedEngine, recorder, speculator, matchers)


def vocabulary_source(config: EngineConfig) -> Callable[[int, list[int]], Any] | None:
    """What reads the tokenizer of `config` as a `grammar.Vocabulary`; None if the engine is to have no tokenizer."""
    if config.skip_tokenizer_init:
        return None

    def load(width: int, eos_token_ids: list[int]) -> Any:
        from headrace.grammar.vocabulary import Vocabulary
        from headrace.text.tokenizer import Tokenizer

        path = hub.resolve_tokenizer(config.model, config.tokenizer, config.revision)
        tokenizer = Tokenizer.load(path)
        made = Vocabulary.of(tokenizer.token_bytes, tokenizer.is_special, tokenizer.vocab_size, width, eos_token_ids)
        return made, functools.partial(tokenizer.encode, add_special_tokens=False)

    return load
