"""The way to the native core (`headrace._native`, built from csrc/): whether it is there, and records for its tapes.

Knows names and fields of operators from the core's schema; must not know models or tensors. Called by the cpu backend
and by `headrace doctor`. The extension itself loads in a millisecond.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING

from headrace import env
from headrace.protocol.errors import HeadraceError, RequestError

if TYPE_CHECKING:
    from types import ModuleType

    from headrace._native import Tape

REMEDY = "install a C++17 compiler (Debian and Ubuntu: apt install g++), then headrace again (in a clone: make native)"


class NativeMissingError(HeadraceError):
    """The native core is not part of this installation."""


@cache
def native() -> tuple[ModuleType | None, str]:
    """Return (the extension, "") or (None, why it cannot be used). Sets the ceiling of HEADRACE_ISA.

    Raises RequestError if HEADRACE_ISA names no ISA of this build and machine.
    """
    try:
        from headrace import _native
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error)
        return None, f"it was not built; {REMEDY}" if absent else f"it can not be loaded ({error}); {REMEDY}"
    isa = env.isa()
    if isa is not None and isa not in _native.isas():
        raise RequestError("HEADRACE_ISA", isa, f"one of {', '.join(_native.isas())} on this machine")
    _native.set_isa(isa or "")
    return _native, ""


def require_native() -> ModuleType:
    """Return the extension. Raises `NativeMissingError` where it was not built."""
    module, reason = native()
    if module is None:
        raise NativeMissingError(f"there is no native core: {reason}")
    return module


@cache
def fields() -> dict[str, tuple[struct.Struct, dict[str, str]]]:
    """Return for each operator how its arguments are packed, and their kinds: p address, i integer, f float."""
    codes = {"p": "Q", "i": "q", "f": "d"}
    return {
        op: (struct.Struct("=" + "".join(codes[k] for _, k in pairs)), dict(pairs))
        for op, pairs in require_native().schema().items()
    }


def pack(op: str, /, **values: float) -> bytes:
    """Return an operator's arguments as the core reads them. All fields are required; addresses are ints, 0 is NULL.

    Raises TypeError for an operator or field that does not exist, one that is missing, or a value of the wrong kind.
    """
    if op not in fields():
        raise TypeError(f"no operator is called {op!r}")
    layout, kinds = fields()[op]
    if values.keys() != kinds.keys():
        missing, unknown = [n for n in kinds if n not in values], [n for n in values if n not in kinds]
        raise TypeError(f"{op}: missing {missing}, unknown {unknown}")
    try:
        return layout.pack(*(values[name] for name in kinds))
    except struct.error as error:
        raise TypeError(f"{op}: {error}; it takes {kinds}, not {values}") from None


@cache
def op_code(op: str) -> int:
    """Return the core's number of an operator, for operators that call another one."""
    return list(require_native().schema()).index(op)


def record(tape: Tape, op: str, /, **values: float) -> int:
    """Append an operator to a tape and return its index. Raises as `pack`, and ValueError where no ISA serves it."""
    return tape.add(op, pack(op, **values))
