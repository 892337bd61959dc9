"""The tokenizers' program with lower bounds, for tests; of the parent's constants only the name of the program changes.

The environment may set the seconds of loading (LOAD_SECONDS), and say that no tokenizer is plain (NOTHING_IS_PLAIN).
"""

from __future__ import annotations

import os

from headrace.text import bounded_tokenizer, tokenizer_sandbox

NAME = "tests.support.tokenizer_child"

if __name__ == "__main__":
    bounded_tokenizer.MAX_LOAD_SECONDS = float(os.environ.get("LOAD_SECONDS", "3.0"))
    bounded_tokenizer.MAX_LOAD_MEMORY = 400 * 2**20
    bounded_tokenizer.MAX_MEMORY = 64 * 2**20
    if "NOTHING_IS_PLAIN" in os.environ:
        tokenizer_sandbox.oddity = lambda spec, max_token_bytes: "a test"
    tokenizer_sandbox.main(0.5)
