"""Answers as llama-server gives them, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from headrace.protocol.parameters import LLAMA_SERVER, names_in
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import TokenLogprob
from headrace.serve.apis.llama_server.request import LlamaCompletionRequest
from headrace.serve.call import replies
from headrace.serve.call.answers import Answer
from headrace.serve.call.llama_options import NO_SEED
from headrace.serve.call.replies import event
from headrace.text.outputs import RequestState


class Results:
    """A call's results. Read them once, by `whole` or by `events`.

    Args:
        many: the request has several prompts, so that the reply is a list.
    """

    def __init__(self, answer: Answer, request: LlamaCompletionRequest, model: str, many: bool) -> None:
        self._answer = answer
        self._request = request
        self._model = model
        self._many = many
        self._told = [0] * len(answer.generation.states)
        self.id = answer.id
        self.stream = bool(request.stream)

    def close(self) -> None:
        self._answer.close()

    async def whole(self) -> Any:
        """One result, or a list of them. Raises what the engine failed with."""
        generation = self._answer.generation
        async with generation:
            async for _ in generation:
                pass
        results = []
        for place, state in enumerate(generation.states):
            result = self._result(place, state) | {"content": state.text}
            result["tokens"] = list(state.token_ids) if self._request.return_tokens else []
            results.append(self._chosen(result | self._probabilities(place, state)))
        return results if self._many else results[0]

    async def events(self) -> AsyncIterator[bytes]:
        """Parts of the results, the last one of each with "stop": true. Raises what the engine failed with."""
        generation = self._answer.generation
        warned = self._answer.call.warnings.reply()
        async with generation:
            async for pieces in generation:
                for place, piece in pieces:
                    state = generation.states[place]
                    part = {"index": place, "content": piece.text, "tokens": list(piece.token_ids)}
                    part |= {"stop": False, "id_slot": -1} | self._counts(state) | self._probabilities(place, state)
                    if self._request.timings_per_token:
                        part["timings"] = replies.timings([[state]])
                    if piece.token_ids or piece.text:
                        yield event(part | warned)
                        warned = {}
                    if state.finish is not None:
                        end = {"content": "", "tokens": []}
                        yield event(self._chosen(self._result(place, state) | end))

    @staticmethod
    def _counts(state: RequestState) -> dict[str, Any]:
        return {
            "tokens_predicted": len(state.token_ids),
            "tokens_evaluated": len(state.request.prompt_token_ids),
        }

    def _result(self, place: int, state: RequestState) -> dict[str, Any]:
        finish = state.finish
        word = finish.stop_reason if finish is not None and isinstance(finish.stop_reason, str) else ""
        reason = finish.reason if finish is not None else ""
        kind = "word" if word else {"length": "limit", "stop": "eos"}.get(reason, "none")
        text = self._answer.texts[place]
        if text is None and self._answer.tokenizer is not None:
            text = self._answer.tokenizer.decode(state.request.prompt_token_ids, False, True)
        return {
            "index": place,
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            **self._counts(state),
            "generation_settings": settings(state.request.params),
            "prompt": text or "",
            "has_new_line": "\n" in state.text,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": len(state.request.prompt_token_ids) + max(len(state.token_ids) - 1, 0),
            "timings": replies.timings([[state]]),
        } | (self._answer.call.warnings.reply() if not self.stream else {})

    def _probabilities(self, place: int, state: RequestState) -> dict[str, Any]:
        """Those of the tokens that came since this was last asked."""
        if not self._request.n_probs:
            return {}
        entries = state.logprobs[self._told[place] :]
        self._told[place] = len(state.logprobs)
        return {"completion_probabilities": [self._entry(entry) for entry in entries]}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self._answer.tokenizer
        raw = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
        text = replies.token_text(tokenizer, token_id)
        return {"id": token_id, "token": text, "bytes": list(raw), "logprob": replies.clamp(logprob)}

    def _chosen(self, result: dict[str, Any]) -> dict[str, Any]:
        """The fields that `response_fields` names, "a/b" for b within a; all, if it is not given."""
        if self._request.response_fields is None:
            return result
        made: dict[str, Any] = {}
        for path in self._request.response_fields:
            value: Any = result
            names = path.split("/")
            for name in names:
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                made[names[-1]] = value
        return made | ({"warnings": result["warnings"]} if "warnings" in result else {})


def settings(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters under llama-server's names."""
    stop: Sequence[str] = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return {name: getattr(params, field) for field, name in names_in(LLAMA_SERVER).items()} | {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": NO_SEED if params.seed is None else params.seed,
        "stop": list(stop),
        "samplers": list(params.order),
        "logit_bias": [[token_id, bias] for token_id, bias in (params.logit_bias or {}).items()],
        "n_probs": params.logprobs or 0,
    }
