"""`Observer`: what takes measurements of an engine's work. Called by `engine.client`; `insight.metrics` has one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from headrace.protocol.step import StepOutput


class Observer(Protocol):
    """Takes measurements. Called on the event loop, so it must be quick."""

    def on_step(self, output: StepOutput, replica: int = 0) -> None:
        """Note a step of one of the engines."""
        ...

    def on_end(self, request_ids: Collection[str], replica: int = 0) -> None:
        """Note that the engine has ended. These requests go on in the next one, whose steps count from the first."""
        ...

    def on_first_token(self, num_prompt_tokens: int, num_cached_tokens: int, seconds: float) -> None: ...

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """Note tokens of one request, `seconds` after the tokens before them (None for its first)."""
        ...
