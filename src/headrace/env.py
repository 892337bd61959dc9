"""Every environment variable that headrace reads, typed, in one place (at most eight; see `docs/flags.md`).

Hugging Face's own variables (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE) are read by `huggingface_hub` itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def changed(variables: Mapping[str, str | None]) -> dict[str, str]:
    """(all): handed on to the agent of `headrace launch` and to its server, with those that the run sets.

    Returns the environment with `variables`; None takes one away."""
    values = {name: value for name, value in variables.items() if value is not None}
    return {name: value for name, value in os.environ.items() if name not in variables} | values


def debug_level() -> int:
    """HEADRACE_DEBUG: 0 quiet (default), 1 prints each step, 2 also runs the scheduler's `check()` after each step, 3
    also computes each step a second time by torch_ref and names the operators that differ (very slow)."""
    text = os.environ.get("HEADRACE_DEBUG", "0")
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"HEADRACE_DEBUG: {text!r} is not allowed; it must be 0, 1, 2 or 3")
    return int(text)


def api_key() -> str | None:
    """HEADRACE_API_KEY: the server's keys, to keep them off the command line; separated by blanks."""
    return os.environ.get("HEADRACE_API_KEY") or None


def isa() -> str | None:
    """HEADRACE_ISA: the highest instruction set for the native kernels, such as `scalar` or `avx2` (default: the best
    that the machine has; `headrace doctor` lists them). The results are the same with each."""
    return os.environ.get("HEADRACE_ISA") or None


def is_terminal(descriptor: int) -> bool:
    """TERM: whether a file descriptor is a terminal that obeys control sequences, for bars and tables."""
    return os.isatty(descriptor) and os.environ.get("TERM") != "dumb"


def set_nccl_interface(name: str) -> None:
    """NCCL_SOCKET_IFNAME: read by NCCL when ranks on GPUs connect; set to the interface that they gather through, if it
    is not set."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def tame_openmp() -> str:
    """OMP_WAIT_POLICY: read by GNU OpenMP when torch is loaded; `import headrace` makes it passive if it is not set.

    OpenMP's threads spin at barriers by default: with fewer free cores than threads, a step of a small model can
    take 100 times as long. Returns the policy.
    """
    return os.environ.setdefault("OMP_WAIT_POLICY", "passive")
