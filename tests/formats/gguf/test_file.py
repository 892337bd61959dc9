"""S-27: the GGUF reader reads what is right, and refuses everything else by name, whatever the bytes are."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.formats.gguf.files import BOOL, F32, I32, STRING, U32, U64, gguf_file, listed, scalar, string, tensor

from headrace import gguf
from headrace.gguf import GGUF
from headrace.protocol.errors import CheckpointError

FIELDS = [
    scalar("general.architecture", STRING, "llama"),
    scalar("general.alignment", U32, 64),
    scalar("llama.block_count", U32, 2),
    scalar("llama.eps", F32, 0.5),
    scalar("some.flag", BOOL, 1),
    scalar("some.long", U64, 2**40),
    scalar("some.double", 12, -1.5),
    listed("some.texts", STRING, ["a", "", "漢字"]),
    listed("some.integers", I32, [1, -2, 3]),
    listed("some.reals", F32, [0.25, -1.0]),
]
# 6 floats (24 bytes) at 0, two rows of two Q4_0 blocks (72 bytes) at 64; 136 bytes in all.
TENSORS = [tensor("a.weight", [3, 2], 0, 0), tensor("b.weight", [64, 2], 2, 64)]
WHOLE = gguf_file(FIELDS, TENSORS, bytes(range(136)), alignment=64)


def test_reads_every_kind_of_value() -> None:
    file = GGUF(WHOLE)
    assert (file.version, file.alignment) == (3, 64)
    assert file.text("general.architecture") == "llama"
    assert file.integer("llama.block_count") == 2
    assert file.integer("some.long") == 2**40
    assert (file.real("llama.eps"), file.real("some.double"), file.flag("some.flag")) == (0.5, -1.5, True)
    assert file.texts("some.texts", 3, 6) == ["a", "", "漢字"]
    assert list(file.integers("some.integers", 3) or ()) == [1, -2, 3]
    assert list(file.reals("some.reals", 2) or ()) == [0.25, -1.0]
    assert (
        file.text("absent") is file.integer("absent") is file.texts("absent", 1, 1) is file.reals("absent", 1) is None
    )
    assert list(file.tensors) == ["a.weight", "b.weight"]
    b = file.tensors["b.weight"]
    assert (b.type, b.shape, b.size, b.start) == ("Q4_0", (64, 2), 72, file.data_start + 64)
    assert file.data[b.start : b.start + b.size] == bytes(range(64, 136))


def test_the_form_of_bitnet_cpp_is_refused_by_its_name() -> None:
    with pytest.raises(CheckpointError, match="type of t is 'I2_S'; it must be TQ1_0 or TQ2_0: bitnet.cpp alone reads"):
        GGUF(gguf_file([], [tensor("t", [128, 2], 36, 0)], bytes(64)))


def test_a_tensor_without_elements_takes_no_bytes() -> None:
    file = GGUF(gguf_file([], [tensor("t", [4, 0], 0, 0), tensor("u", [2], 0, 0)], bytes(8)))
    assert (file.tensors["t"].size, file.tensors["u"].size) == (0, 8)


def test_version_2_and_the_usual_alignment() -> None:
    file = GGUF(gguf_file([], [tensor("t", [2], 1, 32)], bytes(36), version=2))
    assert (file.version, file.alignment, file.data_start % 32) == (2, 32, 0)
    assert file.tensors["t"].start == file.data_start + 32


def test_reads_from_a_path(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(WHOLE)
    assert gguf.read(tmp_path / "m.gguf").tensors == GGUF(WHOLE).tensors
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"empty.gguf: magic is '4 bytes at 0'; .* 0 bytes left"):
        gguf.read(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match="absent.gguf is missing"):
        gguf.read(tmp_path / "absent.gguf")


def alignment(value: int) -> bytes:
    return gguf_file([scalar("general.alignment", U32, value)])


def head(key: bytes, *numbers: tuple[str, int]) -> bytes:
    """A file with one field that ends in the middle: after `numbers`, which come behind its key."""
    return gguf_file([key + b"".join(struct.pack("<" + letter, number) for letter, number in numbers)], alignment=1)


def one(shape: list[int], kind: int, offset: int, size: int = 64) -> bytes:
    return gguf_file([], [tensor("t", shape, kind, offset)], bytes(size))


REFUSED: dict[str, tuple[bytes, str]] = {
    "magic": (gguf_file(magic=b"GGML"), r"magic is b'GGML'; it must be b'GGUF'"),
    "version 1": (gguf_file(version=1), "version is 1; it must be 2 or 3"),
    "big endian": (gguf_file(version=3 << 24), "version is 50331648; it must be 2 or 3, little endian"),
    "many tensors": (gguf_file(num_tensors=65_537), "n_tensors is 65537; it must be at most 65536"),
    "endless tensors": (gguf_file(num_tensors=2**64 - 1), "n_tensors is 18446744073709551615"),
    "many fields": (gguf_file(num_fields=65_537), "n_kv is 65537; it must be at most 65536"),
    "fewer fields than said": (gguf_file(num_fields=3), "length of key 1 is '8 bytes|key 0 is"),
    "long key": (gguf_file([scalar(b"k" * 65_537, U32, 1)]), "length of key 0 is 65537; it must be at most 65536"),
    "key beyond the end": (head(struct.pack("<Q", 60_000)), "key 0 is '60000 bytes.*bytes left"),
    "empty key": (gguf_file([scalar("", U32, 1)]), "key 0 is b''; it must be ASCII"),
    "key in UTF-8": (gguf_file([scalar("é", U32, 1)]), "key 0 is .* it must be ASCII"),
    "a key twice": (gguf_file([scalar("k", U32, 1)] * 2), "key 1 is 'k'; it must be a key that was not there"),
    "unknown type": (head(string("k"), ("I", 13)), "type of k is 13; it must be from 0 to 12"),
    "unknown element": (head(string("k"), ("I", 9), ("I", 13), ("Q", 0)), "element type of k is 13"),
    "array of arrays": (head(string("k"), ("I", 9), ("I", 9), ("Q", 1)), "element type of k is 'array'"),
    "array too long": (head(string("k"), ("I", 9), ("I", U64), ("Q", 2**61)), "k is '18446744073709551616 bytes"),
    "strings too many": (
        head(string("k"), ("I", 9), ("I", STRING), ("Q", 2**61)),
        "length of k is 23.*must be at most 0",
    ),
    "string too long": (head(string("k"), ("I", STRING), ("Q", 2**64 - 1)), "k is '18446744073709551615 bytes"),
    "last string too long": (
        head(string("k"), ("I", 9), ("I", STRING), ("Q", 2), ("Q", 0), ("Q", 2**63)),
        r"k\[1\] is '9223372036854775808 bytes",
    ),
    "first string too long": (
        head(string("k"), ("I", 9), ("I", STRING), ("Q", 2), ("Q", 9), ("Q", 9)),
        r"k\[1\] is 'at ",
    ),
    "alignment 0": (alignment(0), "general.alignment is 0; it must be from 1 to 65536"),
    "alignment 2**31": (alignment(2**31), "general.alignment is 2147483648; it must be from 1 to 65536"),
    "alignment 48": (alignment(48), "general.alignment is 48; it must be a power of 2"),
    "alignment as text": (gguf_file([scalar("general.alignment", STRING, "32")]), "general.alignment is 'a string'"),
    "long name": (gguf_file([], [tensor("n" * 65, [1], 0, 0)]), "length of the name of tensor 0 is 65; .* at most 64"),
    "name not UTF-8": (gguf_file([], [tensor(b"\xff", [1], 0, 0)], bytes(4)), "name of tensor 0 is .* UTF-8"),
    "5 dimensions": (one([1] * 5, 0, 0), "n_dims is 5; it must be at most 4"),
    "endless dimensions": (
        gguf_file([], [string("t") + struct.pack("<I", 2**32 - 1)]),
        "n_dims is 4294967295; it must be at most 4",
    ),
    "part of a block": (one([33], 2, 0), r"shape of t is \(33,\); .* a multiple of 32 elements"),
    "product beyond 64 bits": (one([2**32] * 4, 0, 0), r"offset of t is 0; it must be within the file"),
    "unknown tensor type": (one([1], 4, 0), "type of t is 4; it must be one of 0, 1, 2, 3, 6"),
    "offset not aligned": (one([1], 0, 4), "offset of t is 4; it must be a multiple of 32"),
    "offset beyond the end": (one([1], 0, 2**63), "offset of t is 9223372036854775808; it must be within the file"),
    "end beyond the end": (one([9], 0, 32), r"offset of t is 32; it must be within the file: \d+ \+ 36 > \d+ bytes"),
    "a name twice": (
        gguf_file([], [tensor("t", [1], 0, 0), tensor("t", [1], 0, 32)], bytes(64)),
        "name of a tensor is 't'; it must be a name that was not there before",
    ),
    "overlap": (
        gguf_file([], [tensor("b", [1], 0, 32), tensor("a", [9], 0, 0)], bytes(64)),
        r"offset of b is \d+; it must be at least \d+, where a ends",
    ),
    "one place twice": (gguf_file([], [tensor("a", [1], 0, 0), tensor("b", [1], 0, 0)], bytes(64)), "where a ends"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_S_27_faults_are_named(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        GGUF(data)


WRONG_USES: dict[str, tuple[Callable[[GGUF], object], str]] = {
    "text": (lambda file: file.text("llama.eps"), "llama.eps is 'a float32'; it must be a string"),
    "integer": (lambda file: file.integer("some.integers"), "'an array of int32'; it must be an integer"),
    "a bool is no integer": (lambda file: file.integer("some.flag"), "'a bool'; it must be an integer"),
    "high": (lambda file: file.integer("some.long", 0, 9), "some.long is 1099511627776; it must be from 0 to 9"),
    "low": (lambda file: file.integer("llama.block_count", 3), "llama.block_count is 2; it must be from 3"),
    "real": (lambda file: file.real("some.long"), "'a uint64'; it must be a float"),
    "flag": (lambda file: file.flag("llama.eps"), "'a float32'; it must be a bool"),
    "texts": (lambda file: file.texts("some.reals", 9, 9), "'an array of float32'; it must be an array of strings"),
    "texts, most": (lambda file: file.texts("some.texts", 2, 9), "'3 elements'; it must be of at most 2"),
    "texts, longest": (lambda file: file.texts("some.texts", 3, 5), r"some.texts\[2\] is '6 bytes'"),
    "integers": (lambda file: file.integers("some.texts", 9), "'an array of string'; it must be an array of int"),
    "integers, most": (lambda file: file.integers("some.integers", 2), "of at most 2 elements"),
    "reals of integers": (
        lambda file: file.reals("some.integers", 9),
        "'an array of int32'; it must be an array of fl",
    ),
}


@pytest.mark.parametrize("case", WRONG_USES)
def test_S_27_values_of_another_type_or_size_are_refused(case: str) -> None:
    use, message = WRONG_USES[case]
    with pytest.raises(CheckpointError, match=message):
        use(GGUF(WHOLE))


def test_S_27_values_that_no_type_forbids_are_refused_when_read() -> None:
    file = GGUF(
        gguf_file(
            [
                scalar("flag", BOOL, 2),
                scalar("nan", F32, float("nan")),
                listed("inf", F32, [0.0, float("inf")]),
                scalar("text", STRING, b"\xc3"),
                listed("texts", STRING, [b"a", b"\xff"]),
            ]
        )
    )
    uses: list[tuple[Callable[[], object], str]] = [
        (lambda: file.flag("flag"), "flag is 2; it must be 0 or 1"),
        (lambda: file.real("nan"), "nan is nan; it must be finite"),
        (lambda: file.reals("inf", 2), "inf is inf; it must be finite"),
        (lambda: file.text("text"), r"text is b'\\xc3'; it must be UTF-8"),
        (lambda: file.texts("texts", 2, 9), r"texts\[1\] is b'\\xff'; it must be UTF-8"),
    ]
    for use, message in uses:
        with pytest.raises(CheckpointError, match=message):
            use()


def test_S_27_every_head_of_a_file_is_refused() -> None:
    for size in range(len(WHOLE)):
        with pytest.raises(CheckpointError):
            GGUF(WHOLE[:size])


def damaged(rng: random.Random) -> bytes:
    """`WHOLE` with one to four places changed: bits, numbers at their edges, pieces left out, doubled or cut off."""
    data = bytearray(WHOLE)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                edge = rng.choice([0, 1, 2**16 + 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**64 - len(data)])
                data[at : at + 8] = struct.pack("<Q", edge)
            case 3:
                del data[at : at + rng.randrange(1, 20)]
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 20)]
            case _:
                del data[max(at, 8) :]
    return bytes(data)


def use_all(reader: type[GGUF], data: bytes) -> str:
    """Read `data` and everything in it: "read", "refused", or what went wrong."""
    getters: list[Callable[[GGUF, str], Any]] = [GGUF.text, GGUF.integer, GGUF.real, GGUF.flag]
    getters += [
        lambda f, k: f.texts(k, 2**10, 2**10),
        lambda f, k: f.integers(k, 2**10),
        lambda f, k: f.reals(k, 2**10),
    ]
    try:
        file = reader(data)
    except CheckpointError:
        return "refused"
    except Exception as error:
        return type(error).__name__
    spans = sorted((info.start, info.start + info.size) for info in file.tensors.values())
    edges = [edge for span in spans for edge in span]
    if edges != sorted(edges) or any(not 0 <= edge <= len(data) for edge in edges):
        return "tensors out of place"
    for key in file.fields:
        for getter in getters:
            try:
                getter(file, key)
            except CheckpointError:
                continue
            except Exception as error:
                return type(error).__name__
    return "read"


def outcomes(reader: type[GGUF], num: int) -> set[str]:
    rng = random.Random(27)
    return {use_all(reader, damaged(rng)) for _ in range(num)}


def test_S_27_C_6_random_damage_is_refused_or_harmless() -> None:
    assert outcomes(GGUF, 3000) == {"read", "refused"}


class Unbounded(GGUF):
    """Steps past the end of the file."""

    def _skip(self, size: int, what: str) -> int:
        self._at += size
        return self._at - size


class Overlapping(GGUF):
    def _check_overlap(self) -> None:
        pass


class Misplaced(GGUF):
    """Takes tensors wherever they are said to be."""

    def _add_tensor(self, name: str, info: gguf.TensorInfo) -> None:
        self.tensors[name] = info._replace(start=self.data_start + info.start)


@pytest.mark.parametrize("reader", [Unbounded, Overlapping, Misplaced])
def test_control_the_damage_finds_a_reader_without_a_check(reader: type[GGUF]) -> None:
    assert outcomes(reader, 3000) - {"read", "refused"}


def peak(data: bytes) -> int:
    tracemalloc.start()
    try:
        GGUF(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_S_27_memory_is_bounded_by_the_file() -> None:
    num = gguf.MAX_ENTRIES // 8
    many = gguf_file(
        [scalar("general.alignment", U32, 1)],
        [tensor(f"{i:x}", [1, 1, 1, 1], 24, i) for i in range(num)],
        bytes(num),
        alignment=1,
    )
    assert peak(many) <= 2 * len(many) + 8 * 2**20, "64 MiB for as many as there may be"
    short = gguf_file([listed("texts", STRING, ["é"] * 200_000)])
    assert peak(short) < 2**20, "an array of strings costs nothing until it is asked for"
    tracemalloc.start()
    texts = GGUF(short).texts("texts", 2**20, 9)
    traced_memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(texts or ()) == 200_000
    assert traced_memory > 2**20, "the measure sees what is held"
