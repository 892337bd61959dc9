"""`options` of Ollama's requests, and the fields that generate and chat share."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.serve.call.parsing import Body


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What shapes an answer. Others are known and told to be of no effect."""

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None


class Asked(Body, forbid_unknown_fields=True, kw_only=True):
    """What both ways to ask have."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
