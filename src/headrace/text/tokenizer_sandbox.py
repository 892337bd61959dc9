"""The program that loads a tokenizer and encodes text with it: `python -m headrace.text.tokenizer_sandbox 2.0`.

A tokenizer's files are a program from the model's author: their regexes and replacements may take any time and memory.
They are loaded and used here, in a process with a bound on both. The first frame names the files. Started by
`bounded_tokenizer` only.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from pathlib import Path

import msgspec
import tokenizers

from headrace import gguf
from headrace.protocol.errors import HeadraceError, NativeCallError, RequestError
from headrace.text import bounded_tokenizer, tokenizer_library
from headrace.text.bounded import MAX_FRAME_BYTES, address_space, confine, read_frame, serve, write_frame
from headrace.text.bounded_tokenizer import Encode, Encoded, Greeting, Job, Load, Loaded
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_plain import oddity, spec_of

MOVED = "the files hold another tokenizer now: restart the server for it"


def main(max_cpu_seconds: float) -> None:
    """Load the tokenizer, and answer jobs until stdin ends."""
    frame = read_frame(sys.stdin.buffer)
    if frame is None:
        return
    greeting = msgspec.msgpack.decode(frame, type=Greeting)
    write_frame(sys.stdout.buffer, b"")
    path = Path(greeting.path)
    # A GGUF file is mapped with its weights.
    mapped = sum(file.stat().st_size for file in gguf.files_of(path) if file.is_file()) if path.is_file() else 0
    max_memory = address_space() + mapped + bounded_tokenizer.MAX_LOAD_MEMORY
    confine(max_memory)
    signal.setitimer(signal.ITIMER_PROF, bounded_tokenizer.MAX_LOAD_SECONDS)
    loaded, tokenizer = load(path)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    fault = loaded.refusal
    if greeting.digest is not None and loaded.digest != greeting.digest:
        fault = fault or f"{path}: {MOVED}"

    def answer(body: bytes) -> bytes:
        job = msgspec.msgpack.decode(body, type=Job)
        if isinstance(job, Load):
            return msgspec.msgpack.encode(loaded)
        if fault is not None or tokenizer is None:
            return msgspec.msgpack.encode(Encoded(fault=fault))
        reply = encode(tokenizer, job) if isinstance(job, Encode) else Encoded(json=tokenizer.to_json())
        return msgspec.msgpack.encode(reply)

    serve(answer, max_cpu_seconds, min(max_memory, address_space() + bounded_tokenizer.MAX_MEMORY))


def load(path: Path) -> tuple[Loaded, Tokenizer | None]:
    """Load the tokenizer in `path`; None with a refusal."""
    try:
        lexicon, coder = tokenizer_library.load(path)
        # A batch would need threads, which the process can not start.
        coder.long_text = sys.maxsize
        tokenizer = Tokenizer(lexicon, coder)
        part = oddity(spec_of(coder.library), lexicon.max_token_bytes)
        if part is None:
            return Loaded(), tokenizer
        loaded = Loaded(None, part, hashlib.sha256(coder.to_json().encode()).digest(), lexicon)
        _add_tokens(loaded, coder.library)
        if (size := len(msgspec.msgpack.encode(loaded))) > MAX_FRAME_BYTES:
            refusal = (
                f"{path}: the tokenizer has {size} bytes of tokens and templates; at most {MAX_FRAME_BYTES} are read"
            )
            return Loaded(refusal), None
        return loaded, tokenizer
    except HeadraceError as error:
        return Loaded(str(error)), None
    except (MemoryError, RecursionError, ValueError, TypeError) as error:
        return Loaded(f"{path}: the tokenizer can not be loaded: {str(error) or 'its memory does not suffice'}"), None


def _add_tokens(loaded: Loaded, library: tokenizers.Tokenizer) -> None:
    loaded.ids = library.get_vocab(with_added_tokens=True)
    tokens = {token_id: token for token, token_id in loaded.ids.items()}
    loaded.spellings = {i: token for i in tokens if (token := library.id_to_token(i)) != tokens[i]}


def encode(tokenizer: Tokenizer, job: Encode) -> Encoded:
    """Encode a text; the reply has the reason for which `Tokenizer.encode` refuses it."""
    try:
        return Encoded(tokenizer.encode(job.text, job.add_special_tokens))
    except RequestError as error:
        return Encoded(bound=error.bound)
    except (MemoryError, NativeCallError) as error:
        why = "memory" if isinstance(error, MemoryError) else "the regexes of its files"
        return Encoded(bound=f"text that the model's tokenizer can encode; {why} did not suffice for this one")


if __name__ == "__main__":
    main(float(sys.argv[1]))
