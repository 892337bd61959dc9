"""`Shares`: the ranks by which waiting requests are ordered, smaller first, as the policy has it.

"fcfs": all alike, so arrival decides. "priority": what the request says. "fair": each tenant in turn, by tokens of
work, however many requests one of them sends (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996, section
2.1, with the least rank that waits for the virtual time). With one tenant that is the order of arrival. Called by the
scheduler.
"""

from __future__ import annotations

from headrace.protocol.step import Request

MAX_TENANTS = 4096
ANSWER = 256
"""Tokens of an answer, where the front end does not say what to expect and max_tokens is more."""


class Shares:
    """Ranks under one policy: "fcfs", "priority" or "fair"."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        # Where each tenant's next request begins at the earliest.
        self._ends: dict[str, float] = {}
        self._now = 0.0

    def rank(self, request: Request, least_waiting: float) -> float:
        """The rank of a new request. `least_waiting`: the least that waits; infinity if nobody does."""
        if self.policy != "fair":
            return request.priority if self.policy == "priority" else 0
        if least_waiting == float("inf"):
            # Nobody waits: those who were served have no debts to those who were not there.
            self._now = max([self._now, *self._ends.values()])
            self._ends.clear()
        else:
            # Minus infinity is the rank of one that was overtaken too often.
            self._now = max(self._now, least_waiting)
        start = max(self._now, self._ends.get(request.tenant, 0.0))
        if len(self._ends) >= MAX_TENANTS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        self._ends[request.tenant] = start + (request.work or self._work(request))
        return start

    @staticmethod
    def _work(request: Request) -> int:
        return len(request.prompt_token_ids) + min(request.params.max_tokens or ANSWER, ANSWER)
