"""`Explainer`: reads what the observer of a server's engine has kept, and explains its requests to their callers.
`Explainers` has the explainers of all models, and keeps the ended calls of a model that is unloaded.

The holder of a key reads the ids and texts of its own requests, and sees other requests as "another request"; an
administrator, and everybody where no keys are set, reads all. Made by `serve.loading`. Knows no HTTP.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace.core.journal import Note, Step, decode_note
from headrace.engine import tenants
from headrace.engine.generation import FinishObserver
from headrace.insight.explain import Explanation, Text, explain
from headrace.insight.limits import Machine
from headrace.insight.live import Feed, Words
from headrace.insight.lives import MAX_LIVES, Life, Lives
from headrace.insight.observer import Counts, EngineEnd, Entry, Observer, StepNote
from headrace.protocol import step_model
from headrace.protocol.errors import CheckpointError
from headrace.protocol.pictures import FIRST_ROW_ID
from headrace.protocol.step import EngineInfo
from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.server")

ANOTHER = "another request"
ROW_SIGN = "\u25a3"
"""Stands for a row of a picture where texts are shown."""

OnProgress = Callable[[int, int, int, float], None]


class Calls:
    """The ended requests of one model, explained. `text_of` decodes the token ids around a miss; None: no texts.
    `machine` has the measured limits of the machine."""

    def __init__(self, lives: Lives, text_of: Text | None) -> None:
        self.lives = lives
        self.machine = Machine()
        self.text_of = text_of

    def of_requests(self, request_ids: Iterable[str]) -> list[Explanation]:
        """Return the explanations of requests that have ended. Requests that are not known any more are left out."""
        lives = [self.lives.ended.get(request_id) for request_id in dict.fromkeys(request_ids)]
        return [self._explain(life) for life in lives if life is not None]

    def of_call(self, name: str) -> list[Explanation]:
        """Return the explanations of a call that the caller may see. `name` is the id of its reply, of the call, or of
        one request."""
        names = {name, name.partition("-")[2]}
        lives = [
            life for life in self.lives.ended.values() if life.request_id in names or (life.call_id or None) in names
        ]
        return [self._explain(life) for life in lives if sees(life)]

    def decoded(self) -> Calls:
        """Return the same calls with their texts decoded, so that the tokenizer's memory can be freed. Blocks."""
        text_of = self.text_of
        if text_of is None:
            return self
        misses = [miss for life in self.lives.ended.values() for miss in life.misses if miss.token_ids is not None]
        texts = {tuple(ids): text_of(ids) for miss in misses for ids in miss.token_ids or ()}
        calls = Calls(self.lives, lambda ids: texts[tuple(ids)])
        calls.machine = self.machine
        return calls

    def _explain(self, life: Life) -> Explanation:
        return explain(life, self.lives.of(life), name_of, self.text_of, self.machine)


def _text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return the text of tokens, with a sign for each row of a picture."""
    if all(token_id < FIRST_ROW_ID for token_id in token_ids):
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    runs = itertools.groupby(token_ids, lambda token_id: token_id < FIRST_ROW_ID)
    return "".join(
        tokenizer.decode(list(run), skip_special_tokens=False) if is_text else ROW_SIGN * len(list(run))
        for is_text, run in runs
    )


class Explainers:
    """The explainers of loaded models, and the calls of unloaded ones: the last `max_lives` requests."""

    def __init__(self, max_lives: int = MAX_LIVES) -> None:
        self._max_lives = max_lives
        self._loaded: list[Explainer] = []
        self._past: deque[Calls] = deque()

    def add(self, explainer: Explainer) -> None:
        self._loaded.append(explainer)

    def retire(self, explainer: Explainer, calls: Calls) -> None:
        """Keep the `calls` of a model that is unloaded, in place of its explainer."""
        self._loaded = [each for each in self._loaded if each is not explainer]
        if calls.lives.ended:
            self._past.append(calls)
        for _ in range(sum(len(each.lives.ended) for each in self._past) - self._max_lives):
            oldest = self._past[0].lives.ended
            oldest.popitem(last=False)
            if not oldest:
                self._past.popleft()

    def of_call(self, name: str) -> list[Explanation]:
        """As `Calls.of_call`, over all models."""
        loaded = [explainer.calls for explainer in self._loaded]
        return [each for calls in (*loaded, *self._past) for each in calls.of_call(name)]


class Explainer:
    """The lives of one model's requests, made of the notes of its `observer` when they are read. `tokenizer`,
    if there is one, gives the texts around a miss; see `Observer` for the others."""

    def __init__(
        self,
        counts: Counts,
        after: FinishObserver,
        tokenizer: Tokenizer | None,
        info: Callable[[], EngineInfo],
    ) -> None:
        self.observer = Observer(counts, after, self._read, info)
        text_of = None if tokenizer is None else functools.partial(_text_of, tokenizer)
        self._lives = Lives()
        self._calls = Calls(self._lives, text_of)
        self._feed: Feed | None = None
        self._readers: dict[str, OnProgress] = {}

    @property
    def lives(self) -> Lives:
        self.observer.hand_over()
        return self._lives

    @property
    def calls(self) -> Calls:
        self.observer.hand_over()
        return self._calls

    def of_requests(self, request_ids: Iterable[str]) -> list[Explanation]:
        """As `Calls.of_requests`, with all that has ended so far."""
        return self.calls.of_requests(request_ids)

    def show(self, feed: Feed) -> None:
        """Pass every step on to `feed` from now on."""
        self._feed = feed
        self._follow()

    def _follow(self) -> None:
        """Let the log be read at once while steps are shown or progress is reported."""
        self.observer.hand_over()
        self.observer.is_followed = self._feed is not None or bool(self._readers)

    def _words(self, note: Note) -> list[Words]:
        """Return the texts of the guesses of a step, none without a tokenizer."""
        text_of = self._calls.text_of
        if text_of is None:
            return []
        return [
            (column, [text_of([each]) for each in drafted], [text_of([each]) for each in tokens])
            for column, (drafted, tokens) in note.guesses.items()
        ]

    def _read(self, entry: Entry) -> None:
        if isinstance(entry, StepNote):  # first, since most are
            replica, encoded, info = entry
            note, lives = decode_note(encoded), self._lives.beside(replica)
            if info is not None:
                self._begin(lives, info)
            lives.follow(note)
            # A viewer sees one engine, the one that sends the events of its blocks.
            if self._feed is not None and note.step.blocks is not None:
                self._feed.follow(note.step, functools.partial(self._words, note))
            if self._readers:
                self._report_prompts(lives, note.step)
        elif isinstance(entry, EngineEnd):
            self._lives.beside(entry.replica).restart(entry.request_ids)
        else:
            life = self._lives.deliver(entry.request_id, entry.time, entry.reason)
            if life is not None:
                life.holder, life.call_id = entry.holder, entry.call_id

    def _begin(self, lives: Lives, info: EngineInfo) -> None:
        """Note the numbers of an engine that sends its first step."""
        lives.reads.set_sizes(info)
        try:
            lives.step_model = step_model.load(step_model.path_of_engine(info))
        except CheckpointError as error:
            logger.warning("explanations split steps by rows: %s", error)

    def replica_of(self, request_id: str) -> int | None:
        """Return which engine has a request, or had it last; None if that is not known."""
        life = self.lives.find(request_id)
        return None if life is None else life.replica

    def follow_prompt(self, request_id: str, on_progress: OnProgress) -> Callable[[], object]:
        """Call `on_progress` with four numbers: the tokens of a request's prompt, the ones from the prefix cache, the
        ones computed or cached so far, and the milliseconds since it began. The first call comes when the first tokens
        are computed and has the numbers before that; a further call follows each step that computed some. Returns a
        function that ends this."""
        self._readers[request_id] = on_progress
        self._follow()
        life = self._lives.find(request_id)
        if life is not None and life.position:
            self._report_begin(life)
            self._report(life, life.position, time.monotonic())

        def end() -> None:
            self._readers.pop(request_id, None)
            self._follow()

        return end

    def _report_prompts(self, lives: Lives, step: Step) -> None:
        for seq_id, start, length in zip(step.seq_ids, step.starts, step.lens, strict=True):
            life = lives.life_of(seq_id)
            if life is not None and life.request_id in self._readers and start < life.arrival.num_prompt:
                if start == _first_of(life, 0.0)[0]:
                    self._report_begin(life)
                self._report(life, start + length, step.times[3])

    def _report_begin(self, life: Life) -> None:
        num_cached, start_time = _first_of(life, 0.0)
        self._report(life, num_cached, start_time)

    def _report(self, life: Life, position: int, now: float) -> None:
        num_prompt, (num_cached, start_time) = life.arrival.num_prompt, _first_of(life, now)
        self._readers[life.request_id](num_prompt, num_cached, min(position, num_prompt), 1e3 * (now - start_time))


def _first_of(life: Life, now: float) -> tuple[int, float]:
    """Return how many tokens the prefix cache had for a request, and when that was found out; `now` if it is not
    known."""
    first = life.misses[0] if life.misses else None
    return (0, now) if first is None else (first.admission.num_cached, first.time)


def sees(life: Life) -> bool:
    """Whether the caller may see a request: its own, or all as an administrator, or where no keys are set."""
    caller = tenants.current()
    return caller.is_admin or not caller.name or caller.name == life.holder


def name_of(life: Life | None) -> str:
    """Return how a request is called before the caller."""
    return life.request_id if life is not None and sees(life) else ANOTHER
