"""`python -m headrace.engine.library.facts_worker SECONDS`: reads facts about models, in a separate process of bounded
time and memory (`text.bounded`).

A models folder holds files of strangers. What they cost to read is paid here, and the server gets the facts alone.
Started by `engine.library.facts_reader`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from headrace.engine.library.model_facts import ModelFacts, facts_of
from headrace.protocol.errors import CheckpointError, HeadraceError
from headrace.text.bounded import serve

MAX_CPU_SECONDS = 10.0
MAX_MEMORY = 2**30
"""Bytes of the process's own memory. Mapped files do not count."""
MAX_ADDRESS_SPACE = 2**41
MAX_REPLY_BYTES = 8 * 2**20


class Reply(msgspec.Struct, omit_defaults=True):
    """The facts, or in `error` the reason why there are none."""

    facts: ModelFacts | None = None
    error: str = ""


def answer(body: bytes) -> bytes:
    """Read the facts about the model at a path."""
    path = msgspec.msgpack.decode(body, type=str)
    try:
        reply = msgspec.msgpack.encode(Reply(facts=facts_of(Path(path))))
        # A value of another type than its field's would look like a torn reply to the server.
        msgspec.msgpack.decode(reply, type=Reply)
        if len(reply) <= MAX_REPLY_BYTES:
            return reply
        error = f"{path}: its template and metadata have {len(reply)} bytes; they must have at most {MAX_REPLY_BYTES}"
    except HeadraceError as failure:
        error = str(failure)
    except MemoryError:
        error = f"{path}: its headers take more than {MAX_MEMORY} bytes of memory"
    except (
        OSError,
        ValueError,
        OverflowError,
        RecursionError,
        msgspec.DecodeError,
    ) as failure:  # of files that change meanwhile, or of text
        error = f"{path} can not be read: {failure}"
    return msgspec.msgpack.encode(Reply(error=str(CheckpointError(error))))


if __name__ == "__main__":
    serve(answer, float(sys.argv[1]), MAX_ADDRESS_SPACE, MAX_MEMORY)
