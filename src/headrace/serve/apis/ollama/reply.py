"""Answers as Ollama gives them: lines of JSON, or one object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.serve.apis.ollama.request import GenerationRequest
from headrace.serve.call import replies
from headrace.serve.call.answers import Answer, arguments_object
from headrace.text.parts import Content, Reasoning, ToolCall


class Lines:
    """An answer as Ollama tells it. Read it once, by `whole` or by `events`.

    Args:
        chat: /api/chat tells a message, /api/generate a response.
        ids: whether to give the token ids of prompt and answer back, as the `context` of a next call.
    """

    def __init__(self, answer: Answer, request: GenerationRequest, chat: bool, ids: bool) -> None:
        self._answer = answer
        self._request = request
        self._chat = chat
        self._ids = ids
        self._state = answer.generation.states[0]
        self._num_told = 0
        self.id = answer.id
        # Unlike in other APIs, a stream is the default.
        self.stream = request.stream is not False

    def close(self) -> None:
        self._answer.close()

    async def whole(self) -> dict[str, Any]:
        """One object. Raises what the engine failed with."""
        content = thinking = ""
        calls = Calls()
        async for _, parts in self._answer.parts():
            content += "".join(part.text for part in parts if isinstance(part, Content))
            thinking += "".join(part.text for part in parts if isinstance(part, Reasoning))
            calls.take([part for part in parts if isinstance(part, ToolCall)])
        told = self._said(content, thinking, calls.finished(all_of_them=True)) | self._logprobs()
        return self._head() | self._warnings() | told | self._ending()

    async def events(self) -> AsyncIterator[bytes]:
        """Lines of JSON, the last one with "done": true. Raises what the engine failed with."""
        calls = Calls()
        warned = self._warnings()
        async for _, parts in self._answer.parts():
            content = "".join(part.text for part in parts if isinstance(part, Content))
            thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
            calls.take([part for part in parts if isinstance(part, ToolCall)])
            whole_calls = calls.finished(all_of_them=self._state.finish is not None)
            logprobs = self._logprobs()
            if content or thinking or whole_calls or logprobs:
                yield line(
                    self._head() | warned | self._said(content, thinking, whole_calls) | {"done": False} | logprobs
                )
                warned = {}
        yield line(self._head() | warned | self._said("", "", []) | self._ending())

    def _head(self) -> dict[str, Any]:
        return {"model": self._request.model, "created_at": now()}

    def _warnings(self) -> dict[str, list[str]]:
        return self._answer.call.warnings.reply()

    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {"response": content} | more
        message = {"role": "assistant", "content": content} | more | ({"tool_calls": calls} if calls else {})
        return {"message": message}

    def _logprobs(self) -> dict[str, Any]:
        """Those of the tokens that came since this was last asked."""
        if not self._request.logprobs:
            return {}
        entries = self._state.logprobs[self._num_told :]
        self._num_told = len(self._state.logprobs)
        return {"logprobs": replies.chat_logprobs(self._answer.tokenizer, entries)["content"]} if entries else {}

    def _ending(self) -> dict[str, Any]:
        state, times = self._state, self._state.metrics
        total = None if times.finished_time is None else times.finished_time - times.arrival_time
        reason = state.finish.reason if state.finish is not None else None
        made: dict[str, Any] = {
            "done": True,
            "done_reason": reason,
            "total_duration": _ns(total),
            "load_duration": 0,
            "prompt_eval_count": len(state.request.prompt_token_ids),
            "prompt_eval_duration": _ns(times.prefill_time),
            "eval_count": len(state.token_ids),
            "eval_duration": _ns(times.decode_time),
        }
        if self._ids:
            made["context"] = [*state.request.prompt_token_ids, *state.token_ids]
        return made


class Calls:
    """Tool calls on their way; Ollama tells each at once and whole, with its arguments as an object."""

    def __init__(self) -> None:
        self._open: list[ToolCall] = []
        self._num_told = 0

    def take(self, parts: list[ToolCall]) -> None:
        """Take in further parts."""
        for part in parts:
            if part.name is not None:
                self._open.append(part)
            else:
                last = self._open[-1]
                self._open[-1] = msgspec.structs.replace(last, arguments=last.arguments + part.arguments)

    def finished(self, all_of_them: bool) -> list[dict[str, Any]]:
        """The calls that are whole and were not told before: all but the last one, until the answer ends."""
        ready = self._open if all_of_them else self._open[:-1]
        self._open = [] if all_of_them else self._open[-1:]
        made = []
        for call in ready:
            function = {
                "name": call.name,
                "arguments": arguments_object(call.arguments),
                "index": call.index,
            }
            made.append({"id": call.id, "function": function})
        return made


def _ns(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1e9)


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(body: dict[str, Any]) -> bytes:
    """One line of a stream."""
    return msgspec.json.encode(body) + b"\n"
