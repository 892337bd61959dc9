"""Every environment variable that headrace reads, typed, in one place (at most eight; see `docs/flags.md`).

Hugging Face's own variables (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE) are read by `huggingface_hub` itself.
"""

from __future__ import annotations

import os


def debug_level() -> int:
    """HEADRACE_DEBUG: 0 quiet (default), 1 prints each step, 2 also runs the scheduler's `check()` after each step."""
    text = os.environ.get("HEADRACE_DEBUG", "0")
    if text not in ("0", "1", "2"):
        raise ValueError(f"HEADRACE_DEBUG: {text!r} is not allowed; it must be 0, 1 or 2")
    return int(text)


def api_key() -> str | None:
    """HEADRACE_API_KEY: the server's key, where it should not stand on the command line."""
    return os.environ.get("HEADRACE_API_KEY") or None
