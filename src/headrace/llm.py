"""`LLM`: the engine without a server. Holds an `EngineCore` and runs its steps on the caller's thread.

Names and shapes are vLLM's (`generate`, `chat`, `RequestOutput`). Text, stop strings and the fan-out of `n` are the
server's own (`text.outputs`, `text.inputs`), so that a call here and a call over HTTP mean the same request and
give the same answer. A composition root: it may import every layer.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from headrace import hub
from headrace.engine import build
from headrace.engine.library import model_settings
from headrace.insight import audit
from headrace.migration.vllm import VLLM_SETTINGS
from headrace.other_engines import translate_keywords
from headrace.protocol.adapters import (
    LoadAdapter,
    LoRARequest,
    RecentPaths,
    UnloadAdapter,
    check_request,
    read_reply,
    usual_adapter,
)
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.config import EngineConfig
from headrace.protocol.defaults import sampling_defaults
from headrace.protocol.errors import HeadraceError, RequestError, UnsupportedError
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import Picture
from headrace.protocol.step import Pooling, Stats
from headrace.text import inputs
from headrace.text.beams import BeamSearchOutput, beam_output, make_search
from headrace.text.grammars import GrammarChecker
from headrace.text.inputs import Prompt, as_list, one_each
from headrace.text.likeness import comparison, likeness
from headrace.text.messages import pictures_of, read_messages
from headrace.text.named_templates import template_of, with_ends
from headrace.text.outputs import RequestOutput, RequestState, deltas_of, request_output
from headrace.text.pairs import pair_ids
from headrace.text.pictures.marks import Pictures
from headrace.text.pictures.offline import OfflinePictures
from headrace.text.tokenizer import Tokenizer
from headrace.text.vectors import (
    EMBEDDING_PARAMS,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    activated,
    check_classes,
    check_form,
    check_reranker,
    finished,
    prompted,
    token_form,
    token_outputs,
)

Message = dict[str, Any]


def _engine_args() -> type[Any]:
    """Return the class `EngineArgs`: a dataclass of the fields of `EngineConfig`, and of vLLM's in the table."""
    fields = msgspec.structs.fields(EngineConfig)
    ours: list[Any] = [(field.name, field.type, dataclasses.field(default=field.default)) for field in fields]
    flags = {name[2:].replace("-", "_") for row in VLLM_SETTINGS for name in row.names if name.startswith("--")}
    theirs = sorted(flags - {field.name for field in fields} | {"override_generation_config"})
    return dataclasses.make_dataclass("EngineArgs", [*ours, *((name, Any, None) for name in theirs)])


Adapted = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of a call, or of each of its prompts; None stands for the model itself."""
EngineArgs = _engine_args()
"""Keywords for `LLM(**dataclasses.asdict(args))`, as scripts for vLLM collect them."""

logger = logging.getLogger(__name__)


class LLM:
    """An engine for offline use.

    Args:
        model: "builtin", a directory, or a hub id; further keywords are the fields of `EngineConfig`, and
            override_generation_config: sampling defaults, which take precedence over the model's
            generation_config.json.

    Raises `ModelNotFoundError`, `CheckpointError`, or `RequestError` for a config value that cannot be.
    """

    def __init__(self, model: str = "builtin", **fields: Any) -> None:
        override = fields.pop("override_generation_config", None)
        config = EngineConfig(model=model, **translate_keywords(fields, EngineConfig.__struct_fields__))
        self.config = model_settings.with_adapter(config)
        self._settings = model_settings.read(self.config.model)
        defaults = model_settings.default_params(self.config.model, self.config.revision)
        defaults |= sampling_defaults(override)
        self._defaults = SamplingParams(
            **{name: value for name, value in defaults.items() if name in SamplingParams.__struct_fields__}
        )
        self.core = build.build_engine(self.config)
        self._log_loss()
        self._closed = False
        self._open: dict[str, RequestState] = {}
        self._num_turns = 0
        self._loaded = RecentPaths()
        self._usual_adapter = usual_adapter(self.config.lora_modules, self.core.info.adapters)
        self._draw = inputs.seed_source(self.config.seed)
        self._tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init:
            path = hub.resolve_tokenizer(self.config.model, self.config.tokenizer, self.config.revision)
            self._tokenizer = Tokenizer.load_if_present(path)
        directory = hub.resolve(self.config.model, self.config.revision, weights=False)
        self._pictures = OfflinePictures(
            directory, self._tokenizer, self.core.info.pictures, self.config.limit_mm_per_prompt,
            hub.projector_of(directory, self.config.mmproj),
        )  # fmt: skip
        self._grammars = GrammarChecker(self._tokenizer, self.core.info.vocab_size, self.core.info.eos_token_ids)

    def _log_loss(self) -> None:
        """Log the measured loss of weights that were quantised while they were loaded."""
        info = self.core.info
        if info.quantization:
            audits = audit.found(hub.resolve(self.config.model, self.config.revision))
            logger.info("loss of %s: %s", info.quantization, audit.loss_in_words(audit.of_form(audits, info), info))

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `HeadraceError` if the model has none, or `skip_tokenizer_init` is set."""
        if self._tokenizer is None:
            raise HeadraceError("this engine has no tokenizer: pass prompts as token ids, or name one (tokenizer=...)")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls without any: the ones set for the model with Ollama's `create` take precedence
        over the advice of its generation_config.json."""
        return self._defaults.clone()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapted = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, a list of token ids, or `{"prompt": ...}` / `{"prompt_token_ids": ...}`. A text
        with pictures is `{"prompt": ..., "multi_modal_data": {"image": [...]}}`: pictures of Pillow's, or files' bytes.

        One `SamplingParams` is for all, a list has one for each prompt, and None stands for
        `get_default_sampling_params`. Outputs come in the order of the prompts. `use_tqdm` shows a progress bar where
        stderr is a terminal. Raises `RequestError` before any work is done if one of the prompts cannot be served; a
        request that fails on its way ends with finish_reason "error".
        """
        listed = as_list(prompts)
        digests = self._adapters(lora_request, len(listed))
        chosen = one_each("sampling_params", sampling_params or self._defaults, len(listed))
        ranks = one_each("priority", 0 if priority is None else priority, len(listed))
        groups: list[list[RequestState]] = []
        texts: list[str | None] = []
        for prompt, params, rank, digest in zip(listed, chosen, ranks, digests, strict=True):
            prompt, pictures = self._pictures.expanded(prompt)
            text, token_ids = inputs.prompt_ids(prompt, self._tokenizer, self.core.info)
            texts.append(text)
            groups.append(self._states(token_ids, params, rank, digest, pictures))
        self._run(groups, use_tqdm)
        return [
            request_output(states, str(place), text, params)
            for place, (states, text, params) in enumerate(zip(groups, texts, chosen, strict=True))
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        lora_request: Adapted = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt: the hidden state after the final norm of its "last" token, of its first
        ("cls"), or another of `POOLINGS`. By default the kind that the model's files name, or the last.

        float32 numbers, cut to `dimensions`, and after that made one long if `normalize` is true; by default as the
        model's files have it, or made one long. `prompt_name`: of the files' prompt that is put before each text, ""
        for none; by default the one that the files name. Raises `RequestError` before any work is done if a prompt
        cannot be served, `HeadraceError` if one fails on its way.
        """
        form, outputs = check_form(pooling, dimensions, normalize, self.core.info), []
        listed = prompted(as_list(prompts), prompt_name, self.core.info)
        for place, (text, state) in enumerate(self._pooled(listed, form.pooling, lora_request, use_tqdm)):
            token_ids = state.request.prompt_token_ids
            vector = EmbeddingOutput(finished(state.pooled, form))
            outputs.append(EmbeddingRequestOutput(str(place), text, token_ids, vector, True, state.num_cached_tokens))
        return outputs

    def _pooled(
        self, prompts: Prompt | Sequence[Prompt], kind: Pooling, lora_request: Adapted, use_tqdm: bool
    ) -> list[tuple[str | None, RequestState]]:
        """Return the text of each prompt, and its state with the pooled numbers."""
        info, listed = self.core.info, as_list(prompts)
        groups: list[list[RequestState]] = []
        texts: list[str | None] = []
        for prompt, digest in zip(listed, self._adapters(lora_request, len(listed)), strict=True):
            text, token_ids = inputs.prompt_ids(prompt, self._tokenizer, info)
            texts.append(text)
            options = inputs.RequestOptions(pooling=kind, adapter=digest)
            [request] = inputs.make_requests(token_ids, EMBEDDING_PARAMS, info, options)
            groups.append([RequestState(request, self._tokenizer, 0)])
        self._run(groups, use_tqdm)
        for place, [state] in enumerate(groups):
            if not state.pooled:
                raise HeadraceError(f"prompt {place} failed: {state.finish.message if state.finish else 'no end'}")
        return [(text, state) for text, [state] in zip(texts, groups, strict=True)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        use_activation: bool = True,
        lora_request: Adapted = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each prompt's classes, of a classifier; without `use_activation` the numbers
        that they are computed from. Raises as `embed`."""
        info = self.core.info
        classes = check_classes(info, "classify")
        activation = classes.activation if use_activation else "identity"
        outputs = []
        for place, (text, state) in enumerate(self._pooled(prompts, info.pooling, lora_request, use_tqdm)):
            token_ids, num_cached = state.request.prompt_token_ids, state.num_cached_tokens
            output = ClassificationOutput(activated(state.pooled, activation))
            outputs.append(ClassificationRequestOutput(str(place), text, token_ids, output, True, num_cached))
        return outputs

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_task: str = "embed",
        use_tqdm: bool = True,
        lora_request: Adapted = None,
    ) -> list[EmbeddingRequestOutput] | list[PoolingRequestOutput]:
        """The same as `embed`, under vLLM's other name; with `pooling_task` "token_embed" a vector for each token."""
        if pooling_task == "token_embed":
            form, listed = token_form(None, None, info := self.core.info), prompted(as_list(prompts), None, info)
            return token_outputs(self._pooled(listed, form.pooling, lora_request, use_tqdm), form, info)
        if pooling_task != "embed":
            raise UnsupportedError(
                "pooling_task", pooling_task, "set it to embed or token_embed; `classify` has classes"
            )
        return self.embed(prompts, use_tqdm, lora_request=lora_request)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well the texts of each pair fit: of a cross-encoder its own score of the two, of any other model
        the cosine of the angle between their vectors, from -1 to 1, or their dot product if its files name that;
        MaxSim of one with a vector for each token (ColBERT).

        `data_1` has one text, which is compared with all of `data_2`, or as many as `data_2`. Raises `RequestError`.
        """
        ones, others = ([texts] if isinstance(texts, str) else list(texts) for texts in (data_1, data_2))
        if len(ones) not in (1, len(others)):
            raise RequestError("data_1", len(ones), f"one text, or as many as data_2 has ({len(others)})")
        if check_reranker(self.core.info) is not None:
            joined = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)
            prompts: list[Prompt] = [
                {"prompt_token_ids": pair_ids(one, other, self._tokenizer, self.core.info)} for one, other in joined
            ]
            return [
                ScoringRequestOutput(each.request_id, each.prompt_token_ids, ScoringOutput(each.outputs.probs[0]))
                for each in self.classify(prompts, use_tqdm, lora_request=lora_request)
            ]
        compare = comparison(None, self.core.info)
        sides = zip((ones, others), compare.prompt_names, strict=True)
        listed = [text for texts, name in sides for text in prompted(texts, name, self.core.info)]
        states = [state for _, state in self._pooled(listed, compare.form.pooling, lora_request, use_tqdm)]
        texts = [(state.request.prompt_token_ids, compare.of(state.pooled)) for state in states]
        first, second = texts[: len(ones)], texts[len(ones) :]
        pairs = zip(first * len(others) if len(ones) == 1 else first, second, strict=True)
        return [
            ScoringRequestOutput(str(place), one_ids + other_ids, ScoringOutput(likeness(one, other)))
            for place, ((one_ids, one), (other_ids, other)) in enumerate(pairs)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapted = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several. Messages are OpenAI's: `{"role": ..., "content": ...}`, with pictures as
        data URLs in parts of the type image_url.

        A conversation without a system message begins with the one in the model's `headrace.json`, if there is one.
        `tools` are shown to the model by its template. The answer's text has the calls as the model writes them.
        """
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations = messages if several else [messages]
        template = template_of(self.get_tokenizer(), chat_template or self._settings.template or None)
        prompts: list[Prompt] = []
        for conversation in conversations:
            history: list[Any] = list(conversation)
            first = history[0].get("role") if history and isinstance(history[0], dict) else None
            if self._settings.system and first not in ("system", "developer"):
                history.insert(0, {"role": "system", "content": self._settings.system})
            pictures = Pictures()
            typed = read_messages(history, pictures=pictures)
            text = template.render(
                typed,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            prompts.append(self._pictures.rendered(text, pictures_of(typed, pictures)))
        if template.ends:
            chosen = one_each("sampling_params", sampling_params or self._defaults, len(prompts))
            sampling_params = [with_ends(params, template, self.get_tokenizer()) for params in chosen]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Adapted = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest answers to each prompt; see `BeamSearchParams`. Outputs come in the prompts' order.

        Raises `RequestError` before any work is done if one of the prompts cannot be served: also where the beams
        would not fit the step or the KV cache.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError("params", params, "a BeamSearchParams")
        states, texts, listed = [], [], as_list(prompts)
        for prompt, digest in zip(listed, self._adapters(lora_request, len(listed)), strict=True):
            text, token_ids = inputs.prompt_ids(prompt, self._tokenizer, self.core.info)
            options = inputs.RequestOptions(adapter=digest)
            request = make_search(token_ids, params, params.sampling_params(), self.core.info, options)
            states.append(RequestState(request, self._tokenizer, 0))
            texts.append(text)
        self._run([[state] for state in states], use_tqdm)
        return [beam_output([state], text, self._tokenizer) for state, text in zip(states, texts, strict=True)]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, giving the output so far after each step that added to it."""
        text, token_ids = inputs.prompt_ids(prompt, self._tokenizer, self.core.info)
        params = sampling_params or self._defaults
        states = self._states(token_ids, params, adapter=self._adapters(lora_request, 1)[0])
        for _ in self._steps([states]):
            yield request_output(states, "0", text, params)

    def get_metrics(self) -> Stats:
        """Return the gauges and counters of the engine, as they are now."""
        return self.core.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.core.reset_prefix_cache()

    def close(self) -> None:
        """Release the model's memory. May be called twice."""
        self._closed = True
        self._grammars.close()
        self._pictures.close()
        self.core.close()

    def _adapters(self, chosen: Adapted, num: int) -> list[str]:
        """Return the digest of the adapter of each prompt, "" for none. Those that are not loaded are loaded, in place
        of the least recently used ones where there is no room. Raises `RequestError`."""
        paths = [check_request(each) for each in one_each("lora_request", chosen, num)]
        used: dict[str, str] = {"": self._usual_adapter}
        for path in dict.fromkeys(filter(None, paths)):
            if digest := self._loaded.use(path):
                used[path] = digest
        for path in paths:
            if path not in used:
                used[path] = self._load(path, used.values())
        return [used[path] for path in paths]

    def _load(self, path: str, used: Collection[str]) -> str:
        idle = self._loaded.idle(used)
        while (reply := self.core.change_adapters(LoadAdapter(path))).refused and idle:
            if reply.refused[0] != "max_loras":
                break
            # One of an open stream is refused here, and the next is tried.
            if not self.core.change_adapters(UnloadAdapter(idle[0])).refused:
                self._loaded.forget(idle[0])
            del idle[0]
        adapter = read_reply(reply)
        if adapter is None:
            raise HeadraceError("the engine has loaded no adapter")
        self._loaded.add(path, adapter.digest)
        return adapter.digest

    def _states(
        self,
        token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        adapter: str = "",
        pictures: Sequence[Picture] = (),
    ) -> list[RequestState]:
        """Return the states of the requests that answer one prompt."""
        options = inputs.RequestOptions(
            priority=priority, draw=self._draw, tokenizer=self._tokenizer, adapter=adapter, pictures=pictures
        )
        requests = inputs.make_requests(token_ids, params, self.core.info, options)
        self._grammars.check(params)
        return [RequestState(request, self._tokenizer, index) for index, request in enumerate(requests)]

    def _run(self, groups: list[list[RequestState]], show: bool) -> None:
        if not (show and sys.stderr.isatty()):
            for _ in self._steps(groups):
                pass
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("Processed prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(groups), rate="")
            for _ in self._steps(groups):
                num_finished = sum(all(s.finish for s in group) for group in groups)
                tokens = sum(len(s.token_ids) for group in groups for s in group)
                elapsed = progress.tasks[task].elapsed or 1e-9
                progress.update(task, completed=num_finished, rate=f"{tokens / elapsed:.1f} tok/s")

    def _steps(self, groups: list[list[RequestState]]) -> Iterator[None]:
        """Add all requests and run steps until all have ended. Those still open when the caller stops are aborted."""
        if self._closed:
            raise HeadraceError("this LLM is closed")
        request_ids = {state.request.request_id for group in groups for state in group}
        turn = self._num_turns
        try:
            for state in (state for group in groups for state in group):
                self.core.add(state.request)
                self._open[state.request.request_id] = state
            while not request_ids.isdisjoint(self._open):
                self._turn()
                turn = self._num_turns
                yield
            if turn != self._num_turns:
                yield
        finally:
            for request_id in request_ids & self._open.keys():
                del self._open[request_id]
                self.core.abort(request_id)
            # Step once more to drop the scheduler's output for aborted requests, so that the next call starts clean. A
            # closed engine has none, and the steps of another open stream drop it too.
            while self.core.has_work() and not self._open and not self._closed:
                self._turn()

    def _turn(self) -> None:
        """Run one step and add its tokens to the open requests: calls and streams may share a step."""
        self._num_turns += 1
        for request_id, delta in deltas_of(self.core.step()):
            state = self._open.get(request_id)
            if state is None:
                continue
            state.feed(delta)
            if state.finish is not None:
                del self._open[request_id]
                if delta.finish is None:
                    self.core.abort(request_id)
