"""Ends a chat's answer at a stop string in its content.

A model may quote a stop string in its reasoning, and calls are ended by their own marks. Knows no tokens and no
formats; called by `serve.call.call`.
"""

from __future__ import annotations

from headrace.text.outputs import Content, MessageParser, MessagePart
from headrace.text.stops import StopFinder


class StoppedParser:
    """A `MessageParser` that ends an answer at a stop string in its content; `stop_reason` is then that string.

    `exempt` is set while the answer may not end. Reasoning and calls divide the content: no stop string spans them.
    """

    def __init__(self, inner: MessageParser, finder: StopFinder) -> None:
        self.exempt = False
        self._inner = inner
        self._finder = finder
        self._gap = ""

    @property
    def stop_reason(self) -> str | None:
        return self._finder.reason

    @property
    def ended(self) -> bool:
        return self._finder.reason is not None or self._inner.ended

    def feed(self, text: str, final: bool, cut: bool = False) -> list[MessagePart]:
        out: list[MessagePart] = []
        for part in self._inner.feed(text, final, cut) if self._finder.reason is None else ():
            if not isinstance(part, Content) or part.gap:
                out += self._content(self._finder.flush())
            if isinstance(part, Content):
                self._gap = part.gap or self._gap
                out += self._content(self._finder.push(part.text, self.exempt))
                if self._finder.reason is not None:
                    return out
            else:
                out.append(part)
        return out + (self._content(self._finder.flush()) if final or self._inner.ended else [])

    def _content(self, text: str) -> list[MessagePart]:
        if not text:
            return []
        gap, self._gap = self._gap, ""
        return [Content(text, gap)]
