"""`AsyncLLM`: the engine behind an `async for`, with vLLM's names. A composition root.

The same client, text and fan-out as the HTTP server has, without HTTP. The engine runs on a thread of this process,
or with `in_process=False` in a child that is restarted when it dies. Use it from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from headrace import hub
from headrace.engine.build import build_engine
from headrace.engine.client import EngineClient, InprocClient, ProcessClient
from headrace.engine.generation import TextClient
from headrace.engine.library.model_settings import with_adapter
from headrace.other_engines import translate_keywords
from headrace.protocol.adapters import LoRARequest, RecentPaths, check_request, usual_adapter
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import Picture
from headrace.protocol.step import EngineInfo, Stats
from headrace.text import bounded_tokenizer
from headrace.text.beams import BeamSearchOutput, beam_output
from headrace.text.inputs import IMAGES, Prompt, RequestOptions, new_request_id, seed_source
from headrace.text.outputs import RequestOutput, request_output
from headrace.text.pictures.offline import OfflinePictures
from headrace.text.tokenizer import Tokenizer


class AsyncLLM:
    """An engine for many concurrent callers on one event loop.

    Args:
        config: the model to load; or give the fields of `EngineConfig` as keywords.
        in_process: a thread here (True), or its own process.
        client, tokenizer: ready-made parts, instead of those that `config` names.

    Raises `ModelNotFoundError`, `CheckpointError`, or `RequestError` for a config value that cannot be.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        in_process: bool = True,
        client: EngineClient | None = None,
        tokenizer: Tokenizer | None = None,
        **fields: Any,
    ) -> None:
        if config is not None and fields:
            name = min(fields)
            raise RequestError(name, fields[name], "a field of the config that is given beside it")
        config = config or EngineConfig(**translate_keywords(fields, EngineConfig.__struct_fields__))
        config = self.config = with_adapter(config)
        if client is None:
            client = InprocClient(lambda: build_engine(config)) if in_process else ProcessClient(config, ServerConfig())
        if tokenizer is None and not config.skip_tokenizer_init:
            tokenizer = bounded_tokenizer.load_if_present(
                hub.resolve_tokenizer(config.model, config.tokenizer, config.revision)
            )
        self._front = TextClient(client, tokenizer)
        self._draw = seed_source(config.seed)
        self._starting: asyncio.Task[None] | None = None
        self._streams: dict[str, list[Any]] = {}
        self._pictures: OfflinePictures | None = None
        # Adapters: their digests by path, their names at the client by digest, and the calls that hold each.
        self._loaded, self._names, self._num_loads = RecentPaths(), dict[str, str](), 0
        self._holders: Counter[str] = Counter()
        self._loading = asyncio.Lock()

    @property
    def info(self) -> EngineInfo:
        """Raises `EngineDeadError` before `start`."""
        return self._front.info

    @property
    def is_running(self) -> bool:
        return self._front.client.is_alive

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `HeadraceError` if there is none."""
        if self._front.tokenizer is None:
            raise HeadraceError("this engine has no tokenizer: pass prompts as token ids")
        return self._front.tokenizer

    def _reader(self) -> OfflinePictures:
        if self._pictures is None:
            directory = hub.resolve(self.config.model, self.config.revision, weights=False)
            limits = self.config.limit_mm_per_prompt
            self._pictures = OfflinePictures(directory, self._front.tokenizer, self.info.pictures, limits)
        return self._pictures

    async def start(self) -> None:
        """Load the model, once however many callers wait. `generate` does it by itself."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._front.client.start())
        # One caller's cancellation must not stop the others' engine.
        await asyncio.shield(self._starting)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt: outputs as they grow, each the whole answer so far, the last with `finished`. Pictures
        go with it as in `LLM.generate`.

        `request_id` only names the outputs, and is the argument of `abort`. Leaving the iteration early aborts the
        request. An adapter that is not loaded takes the place of the least recently used one where there is no room.
        Raises `RequestError`, `QueueFullError` or `EngineDeadError`.
        """
        await self.start()
        name = request_id or new_request_id()
        pictures: Sequence[Picture] = ()
        if isinstance(prompt, dict) and prompt.get(IMAGES):
            prompt, pictures = await asyncio.to_thread(self._reader().expanded, prompt)
        text, token_ids = await self._front.prompt_ids(prompt)
        params = sampling_params or SamplingParams()
        await self._front.check(params, cache_salt)
        async with self._adapter(lora_request) as digest:
            options = RequestOptions(priority, cache_salt, self._draw, adapter=digest, pictures=pictures)
            async with await self._front.open([token_ids], params, options) as generation:
                self._streams.setdefault(name, []).append(generation)
                try:
                    async for _ in generation:
                        yield request_output(generation.states, name, text, params)
                finally:
                    self._streams[name].remove(generation)
                    if not self._streams[name]:
                        del self._streams[name]

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> BeamSearchOutput:
        """Search for the likeliest answers to a prompt; see `BeamSearchParams`.

        Raises `RequestError`, `QueueFullError` or `EngineDeadError`.
        """
        await self.start()
        text, token_ids = await self._front.prompt_ids(prompt)
        sampling = params.sampling_params()
        async with self._adapter(lora_request) as digest:
            options = RequestOptions(priority, cache_salt, adapter=digest)
            async with await self._front.open([token_ids], sampling, options, beam=params) as generation:
                async for _ in generation:
                    pass
                return beam_output(generation.states, text, self._front.tokenizer)

    @contextlib.asynccontextmanager
    async def _adapter(self, chosen: LoRARequest | None) -> AsyncIterator[str]:
        """Hold the adapter of a call in the block, loaded; "" stands for none. Raises `RequestError`,
        `EngineDeadError`."""
        path = check_request(chosen)
        if not path:
            yield usual_adapter(self.config.lora_modules, self.info.adapters)
            return
        async with self._loading:
            digest = self._loaded.use(path) or await self._load(path)
            self._holders[digest] += 1
        try:
            yield digest
        finally:
            self._holders -= Counter([digest])

    async def _load(self, path: str) -> str:
        client, idle = self._front.client, self._loaded.idle(self._holders)
        while True:
            self._num_loads += 1
            name = f"lora-{self._num_loads}"
            try:
                adapter = await client.load_adapter(name, path)
            except RequestError as error:
                if error.field != "max_loras" or not idle:
                    raise
                old = idle.pop(0)
                await client.unload_adapter(self._names[old], old)
                self._loaded.forget(old)
                del self._names[old]
            else:
                self._loaded.add(path, adapter.digest)
                self._names[adapter.digest] = name
                return adapter.digest

    def abort(self, request_id: str) -> None:
        """End the requests of this name; their iterations end with the tokens so far. Unknown names are fine."""
        for generation in self._streams.get(request_id, []):
            generation.close()

    def get_metrics(self) -> Stats:
        """Return the gauges and counters of the engine, as of its last step."""
        return self._front.client.total

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        self._front.client.reset_prefix_cache()

    async def close(self) -> None:
        """Stop the engine. Open iterations end with `EngineDeadError`."""
        self._front.close()
        if self._pictures is not None:
            self._pictures.close()
        await self._front.client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
