"""The native core, built from csrc/. Semantics of the operators: csrc/include/kernels.h. Addresses are ints, 0 is NULL.

All calls raise ValueError for unknown names and for sizes and numbers out of range; addresses are not checked.
"""

from typing import TypedDict

class Limit(TypedDict):
    what: str  # read, int8, f32
    isa: str
    rate: float  # bytes or operations a second, the median of nine pieces
    least: float
    most: float
    bytes: int  # size of the buffer that was read, else 0

def schema() -> dict[str, list[tuple[str, str]]]:
    """Return the operators, each with its fields in order and their kinds: p address, i int64, f double."""

def isas() -> list[str]:
    """Return the ISAs of this build that this machine can run, in rising order; the first is scalar."""

def features() -> dict[str, bool]: ...
def decide(
    leaf1_ecx: int, leaf7_ebx: int, leaf7_ecx: int, leaf7_edx: int, leaf7_1_eax: int, xcr0: int
) -> dict[str, bool]:
    """Return what `features` returns on a machine with these words of CPUID and XCR0."""

def served(isa: str = "") -> dict[str, str]:
    """Return for each operator the ISA that serves it up to this ceiling; "" where none does."""

def set_isa(isa: str) -> None:
    """Set the ceiling for tapes that name none; "" is the best of the machine."""

def num_threads() -> int:
    """Return the threads of a run that names no number: the cores that the process may use, unless it was set."""

def set_num_threads(num: int) -> None:
    """Set the threads of a run that names no number, 1 ... 256; 0 is the default again."""

class Tape:
    """Operators in order. One thread at a time may use a tape; runs of several tapes take turns."""

    def __init__(self, isa: str = "") -> None: ...
    def add(self, op: str, args: bytes) -> int:
        """Append a record (fields of `schema`, 8 bytes each) and return its index."""

    def run(self, dims: list[int], num_threads: int = 0) -> None:
        """Run all records for dims [rows, sequences, logits], without the GIL."""

    def run_range(self, first: int, last: int, dims: list[int], num_threads: int = 0) -> None:
        """Run records first ... last - 1."""

    def profile(self, dims: list[int], num_threads: int = 0) -> list[int]:
        """Run all records; return the nanoseconds of each, its barrier included, about 0 for those without rows."""

    def dims(self) -> list[int]:
        """Return the sizes after the last run: the three of the call, then those that operators wrote."""

    def ops(self) -> list[str]:
        """Return the operator of each record."""

    def __len__(self) -> int: ...

class Ranks:
    """One rank's view of the memory that the ranks of a model share, and of their barrier (csrc/include/ranks.h)."""

    def __init__(self, fd: int, rank: int, world: int, slot_bytes: int, timeout: float, spins: bool) -> None:
        """Map `fd`, of `bytes(slot_bytes)` zeros at first. timeout: seconds. Raises RuntimeError if it can not."""

    def address(self) -> int:
        """Return what records of `gather` have for `ranks`. The object must outlive the tape."""

    def begin(self, call_id: int) -> None:
        """Stamp the gathers from now on."""

    def fault(self) -> str:
        """Return why gathers are of no use: timeout, out of step, lost; else ""."""

    def break_group(self) -> None:
        """Have all gathers of all ranks return at once from now on."""

    def num_gathers(self) -> int: ...
    @staticmethod
    def bytes(slot_bytes: int) -> int: ...

def layout(format: str) -> str:
    """Return the name of a format's packed layout; it changes when the bytes do. Formats: i4, i6, i8, k, f."""

def panel(format: str) -> int:
    """Return the number of outputs that are packed together."""

def packed_bytes(format: str, num_out: int, num_in: int, group: int, flag: int) -> int: ...
def pack(
    format: str,
    codes: int,
    d: int,
    m: int,
    num_in: int,
    group: int,
    flag: int,
    first: int,
    last: int,
    num_out: int,
    packed: int,
) -> None:
    """Pack rows first ... last - 1 (first a multiple of the panel) on the team. `codes`, `d`, `m` point at row first,
    `packed` at the whole matrix."""

def unpack_row(
    format: str, packed: int, num_out: int, num_in: int, group: int, flag: int, row: int, out: int
) -> None: ...
def limits(num_threads: int = 0, seconds: float = 0.5, most_bytes: int = 2**31) -> list[Limit]:
    """Measure the machine, about `seconds` for each entry, on as many threads of the team."""
