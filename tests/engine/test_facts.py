"""Facts about models of strangers: a process of bounded cost reads them, once, and a bad one disturbs no other."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.formats.gguf.files import STRING, gguf_file, listed, scalar

from headrace import gguf as gguf_reader
from headrace.engine.library import facts_reader, facts_worker, model_facts
from headrace.engine.library.facts_reader import FactsReader
from headrace.protocol.errors import CheckpointError

CONFIG = {"model_type": "llama", "max_position_embeddings": 512, "hidden_size": 8}
SOUND = b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'


def write(folder: Path, header: bytes = SOUND, num_bytes: int = 24, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))
    return folder


def shaped(shape: str) -> Callable[[Path], object]:
    return lambda folder: write(folder, b'{"w":{"dtype":"F32","data_offsets":[0,24],"shape":[%s]}}' % shape.encode())


def config_of(text: str) -> Callable[[Path], object]:
    return lambda folder: (write(folder) / "config.json").write_text(text)


def other(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (write(folder) / name).write_text(text)


def in_place(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def place(folder: Path) -> None:
        write(folder)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return place


def gguf(data: bytes) -> Callable[[Path], object]:
    def place(folder: Path) -> None:
        folder.mkdir()
        (folder / "a.gguf").write_bytes(data)

    return place


NESTED = '{"a":' * 65 + "1" + "}" * 65
INDEX = "model.safetensors.index.json"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "sizes of thousands of digits": (shaped(",".join(["9" * 4299] * 1500)), "more than 20 digits"),
    "a product beyond all bytes": (shaped(",".join(["9" * 18] * 16)), "its shape makes them"),
    "too many dimensions": (shaped(",".join(["1"] * 17)), "w has shape"),
    "a size that is infinite": (shaped("Infinity"), "w has shape"),
    "a size below 0": (shaped("-1"), "w has shape"),
    "a million tensors": (lambda folder: write(folder, b'{"a":' + b'"",' * 2**22 + b"}"), "texts and keys"),
    "nested headers": (lambda folder: write(folder, NESTED.encode()), "65|deeply nested"),
    "a cut file": (lambda folder: write(folder, num_bytes=23), "its tensors end at byte"),
    "a header longer than the file": (
        in_place("model.safetensors", lambda path: path.write_bytes(b"\xff" * 8)),
        "says",
    ),
    "an empty file of weights": (in_place("model.safetensors", lambda path: path.write_bytes(b"")), "says 0 bytes"),
    "a pipe of weights": (in_place("model.safetensors", os.mkfifo), "no regular file"),
    "a directory of weights": (in_place("model.safetensors", Path.mkdir), "no regular file"),
    "a config with a number of 5,000 digits": (config_of('{"a": ' + "9" * 5000 + "}"), "more than 128 digits"),
    "a nested config": (config_of(NESTED), "deeply nested"),
    "a config of 9 MiB": (config_of('{"a": "' + "x" * 9 * 2**20 + '"}'), "at most 8388608 are read"),
    "a config of many lists": (config_of('{"a": [' + "[]," * 2**17 + "0]}"), "lists and objects"),
    "a text that is none": (config_of('{"model_type": "\\ud800"}'), "config.json has half a surrogate pair"),
    "a system message that is no text": (other("headrace.json", '{"system": "\\ud800"}'), "headrace.json has half"),
    "a number beyond all floats": (shaped("1e999"), "w has shape"),
    "a setting of 100,000 letters": (other("headrace.json", '{"%s": 1}' % ("a" * 100_000)), "headrace.json: .*aaa"),
    "a tensor of 100,000 letters": (
        lambda folder: write(folder, b'{"%s":1}' % (b"a" * 100_000)),
        "does not have dtype",
    ),
    "a dtype of 100,000 letters": (
        lambda folder: write(folder, SOUND.replace(b"F32", b"F" * 100_000)),
        "w has dtype .* expected one of F64",
    ),
    "a nested generation_config": (other("generation_config.json", NESTED), "generation_config.json has deeply nested"),
    "a nested headrace.json": (other("headrace.json", NESTED), "headrace.json has deeply nested"),
    "a nested quantize_config": (other("quantize_config.json", NESTED), "quantize_config.json has deeply nested"),
    "a nested tokenizer_config": (other("tokenizer_config.json", NESTED), "tokenizer_config.json has deeply nested"),
    "a nested index": (other(INDEX, NESTED), "index.json has deeply nested"),
    "an index out of the folder": (other(INDEX, '{"weight_map": {"w": "../w.safetensors"}}'), "beside the index"),
    "an index of missing files": (other(INDEX, '{"weight_map": {"w": "w.safetensors"}}'), "w.safetensors is missing"),
    "a GGUF file of 2^63 keys": (gguf(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63)), "n_kv is 9223372036854775808"),
    "a GGUF file of a long key": (gguf(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62)), "length of key 0"),
    "a GGUF file that is cut": (gguf(gguf_file([scalar("a", STRING, "b")])[:30]), "within the file"),
}


@pytest.fixture(scope="module")
def reader() -> Iterator[FactsReader]:
    reader = FactsReader()
    yield reader
    reader.process.close()


@pytest.mark.parametrize("name", BAD)
def test_S_28_a_model_that_can_not_be_read_has_a_reason_and_disturbs_no_other(
    name: str, reader: FactsReader, tmp_path: Path
) -> None:
    make, words = BAD[name]
    make(tmp_path / "bad")
    with pytest.raises(CheckpointError, match=words) as caught:
        reader.facts(tmp_path / "bad")
    assert len(str(caught.value)) <= 1000, "a reason is a sentence"
    process = reader.process.pid
    assert reader.facts(write(tmp_path / "good")).num_parameters == 6
    assert (reader.process.pid, reader.process.num_faults) == (process, 0), "the process went on"


def test_S_28_a_name_that_is_no_text_disturbs_nothing(reader: FactsReader, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_bytes(b"")
    facts = reader.facts(folder)
    assert (facts.num_parameters, len(facts.digest)) == (6, 64)
    place = Path(os.fsdecode(os.fsencode(folder) + b"/\xff.safetensors"))
    (folder / "model.safetensors").rename(place)
    assert reader.facts(folder).num_parameters == 6
    place.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"safetensors is not a readable safetensors file") as caught:
        reader.facts(folder)
    assert str(caught.value).encode(), "the reason can be sent"


def test_S_28_control_numbers_that_fit_are_read(reader: FactsReader, tmp_path: Path) -> None:
    save_file(
        {"w": np.zeros((2, 3), np.float32)}, write(tmp_path / "a", max_position_embeddings=10**40) / "b.safetensors"
    )
    (tmp_path / "a" / "model.safetensors").unlink()
    (tmp_path / "a" / "generation_config.json").write_text('{"temperature": Infinity, "top_p": 0.5}')
    facts = reader.facts(tmp_path / "a")
    assert (facts.num_parameters, facts.context_length, facts.parameters) == (6, 0, {"top_p": 0.5})


WRONG = (True, None, "x", "", [], {}, [8], {"a": 1}, 1.5, -1, 2**63, 1e300)
FIELDS = (
    "model_type", "max_position_embeddings", "n_positions", "hidden_size", "num_hidden_layers", "vocab_size",
    "text_config", "quantization_config", "quantization_config.bits", "quantization_config.quant_method",
    "quantization_config.config_groups",
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_S_28_a_value_of_another_type_is_no_fault_of_the_process(
    reader: FactsReader, tmp_path: Path, field: str
) -> None:
    for number, value in enumerate(WRONG):
        outer, _, inner = field.partition(".")
        folder = write(tmp_path / str(number), **{outer: {inner: value} if inner else value})
        advice = {"temperature": value, "top_k": value}
        (folder / "generation_config.json").write_text(json.dumps(advice))
        try:
            facts = reader.facts(folder)
        except CheckpointError:
            continue
        assert all(type(each) in (int, float) for each in facts.parameters.values())
        assert type(facts.context_length) is int
    assert reader.process.num_faults == 0


def test_S_28_facts_that_are_not_of_their_types_are_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a")
    facts = model_facts.facts_of(folder)
    monkeypatch.setattr(facts_worker, "facts_of", lambda path: msgspec.structs.replace(facts, context_length=True))
    reply = msgspec.msgpack.decode(facts_worker.answer(msgspec.msgpack.encode(str(folder))), type=facts_worker.Reply)
    assert str(folder) in reply.error
    assert "context_length" in reply.error
    # The control: sound facts pass.
    monkeypatch.setattr(facts_worker, "facts_of", lambda path: facts)
    reply = msgspec.msgpack.decode(facts_worker.answer(msgspec.msgpack.encode(str(folder))), type=facts_worker.Reply)
    assert reply.facts == facts
    assert not reply.error


def test_S_27_strings_of_all_arrays_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at, and one of no length is cheap to write into a sparse file."""
    data = gguf_file([listed("a", STRING, ["x"] * 3), listed("b", STRING, ["y"] * 3)])
    monkeypatch.setattr(gguf_reader, "MAX_STRINGS", 6)
    gguf_reader.GGUF(data)
    monkeypatch.setattr(gguf_reader, "MAX_STRINGS", 5)
    with pytest.raises(CheckpointError, match="length of b is 3; it must be at most 5"):
        gguf_reader.GGUF(data)


def test_facts_are_read_once_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, jobs = FactsReader(), list[str]()
    run = reader.process.run
    monkeypatch.setattr(reader.process, "run", lambda job, kind: (jobs.append(job), run(job, kind))[1])
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", num_bytes=1)
    for _ in range(3):
        assert reader.facts(good).context_length == 512
        with pytest.raises(CheckpointError):
            reader.facts(bad)
    assert jobs == [str(good), str(bad)], "reasons are kept as facts are"
    write(good, max_position_embeddings=1024)
    write(bad)
    assert reader.facts(good).context_length == 1024
    assert reader.facts(bad).num_parameters == 6
    assert len(jobs) == 4
    reader.process.close()


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, path, lengths = FactsReader(), write(tmp_path / "a"), [1024, 2048]
    run = reader.process.run

    def meanwhile(job: str, kind: Any) -> Any:
        write(path, max_position_embeddings=lengths[0])
        result = run(job, kind)
        write(path, max_position_embeddings=lengths.pop(), more=len(lengths))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(reader.process, "run", meanwhile)
        assert reader.facts(path).context_length == 1024
    assert reader.facts(path).context_length == 2048
    with monkeypatch.context() as patch:
        patch.setattr(facts_reader, "digest_of", lambda path: (path / "absent").stat())
        with pytest.raises(CheckpointError, match="a can not be read: No such file"):
            reader.facts(path)
    reader.process.close()


def test_S_28_a_model_that_costs_too_much_is_refused_with_a_reason(tmp_path: Path) -> None:
    reader = FactsReader(max_cpu_seconds=0.05)
    names = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(2**15))
    with pytest.raises(CheckpointError, match="its headers can not be read: it took more than 0.05 s"):
        reader.facts(write(tmp_path / "a", b"{" + names + b"}", 0))
    with pytest.raises(CheckpointError, match="its headers can not be read"):
        reader.check(tmp_path / "a")
    reader.process.close()


def test_S_28_a_directory_of_too_many_files_is_refused(
    reader: FactsReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a")
    monkeypatch.setattr(model_facts, "MAX_FILES", 2)
    assert reader.facts(folder)
    monkeypatch.setattr(model_facts, "MAX_FILES", 1)
    with pytest.raises(CheckpointError, match="has more than 1 files"):
        reader.facts(folder)


def test_what_is_too_long_to_pass_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a")
    job = msgspec.msgpack.encode(str(path))
    assert msgspec.msgpack.decode(facts_worker.answer(job), type=facts_worker.Reply).facts is not None
    monkeypatch.setattr(facts_worker, "MAX_REPLY_BYTES", 100)
    reply = msgspec.msgpack.decode(facts_worker.answer(job), type=facts_worker.Reply)
    assert reply.facts is None
    assert "must have at most 100" in reply.error


def test_one_reader_is_shared() -> None:
    assert facts_reader.shared() is facts_reader.shared()


def test_a_lower_limit_of_the_system_is_left_as_it_is(tmp_path: Path) -> None:
    """The program of a bounded process sets limits, and may not raise them."""
    code = f"""
import resource
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
resource.setrlimit(resource.RLIMIT_DATA, (2**29, 2**29))
from headrace.engine.library.facts_reader import FactsReader
print(FactsReader().facts(Path({str(write(tmp_path / "a"))!r})).num_parameters)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("6\n", 0), done.stderr
