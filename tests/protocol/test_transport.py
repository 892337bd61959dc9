"""Frames: any cut of the bytes gives the same messages, and nothing but a known message is ever taken in (S-01)."""

from __future__ import annotations

import pickle
import socket
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol import frames
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import (
    Abort,
    Add,
    EngineInfo,
    Finish,
    Request,
    ResetPrefixCache,
    Stats,
    StepOutput,
    TokenLogprob,
)

REQUEST = Request(request_id="a", prompt_token_ids=[1, 2], params=SamplingParams(seed=1, logit_bias={3: 0.5}))
OUTPUT = StepOutput(
    step_id=7,
    request_ids=["a"],
    token_ids=[[5]],
    logprobs={"a": [TokenLogprob(5, -0.1, 1, ((5, -0.1), (6, -2.0)))]},
    started={"a": 3},
    finished={"a": Finish("stop", 5)},
    stats=Stats(num_steps=7),
)
INFO = EngineInfo(
    model="m",
    max_model_len=9,
    vocab_size=8,
    eos_token_ids=[1],
    block_size=4,
    num_blocks=3,
    max_num_seqs=2,
    max_num_batched_tokens=5,
)
TO_ENGINE = [
    frames.Start(EngineConfig(model="m", seed=3)),
    Add(REQUEST),
    Abort("a"),
    ResetPrefixCache(),
    frames.Shutdown(),
]
FROM_ENGINE = [
    frames.Ready(INFO),
    frames.Failed("ValueError", "no"),
    frames.Output(OUTPUT),
    frames.Rejected("a", "prompt", "[]", "longer", "code"),
]


@given(st.lists(st.integers(1, 50), max_size=40))
def test_any_cut_of_the_bytes_gives_the_same_messages(sizes: list[int]) -> None:
    data = b"".join(frames.encode(message) for message in (*TO_ENGINE, *FROM_ENGINE))
    buffer = frames.FrameBuffer()
    payloads: list[bytes] = []
    for size in [*sizes, len(data)]:
        payloads += buffer.feed(data[:size])
        data = data[size:]
    assert not buffer._bytes
    split = len(TO_ENGINE)
    assert [frames.decode_to_engine(x) for x in payloads[:split]] == TO_ENGINE
    assert [frames.decode_from_engine(x) for x in payloads[split:]] == FROM_ENGINE


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_S_01_garbage_is_refused(payload: bytes) -> None:
    for decode in (frames.decode_to_engine, frames.decode_from_engine):
        with pytest.raises(frames.TransportError):
            decode(payload)


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode({"type": "exec", "code": "1"}),
        msgspec.msgpack.encode({"type": "add"}),
        msgspec.msgpack.encode({"type": "add", "request": {"request_id": 1}}),
        msgspec.msgpack.encode({"type": "start", "config": {"block_size": -1}}),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(42, b"x")),
        pickle.dumps(print),
        # The other direction's messages are unknown here.
        frames.encode(FROM_ENGINE[1])[4:],
    ],
)
def test_S_01_unknown_tags_types_and_pickles_are_refused(payload: bytes) -> None:
    with pytest.raises(frames.TransportError):
        frames.decode_to_engine(payload)


def test_a_length_above_the_cap_is_refused_before_it_is_read() -> None:
    buffer = frames.FrameBuffer(max_frame_bytes=10)
    assert buffer.feed(struct.pack("<I", 10) + b"0123456789") == [b"0123456789"]
    with pytest.raises(frames.TransportError, match="cap of 10"):
        buffer.feed(struct.pack("<I", 11))


def test_the_engine_reads_what_is_there_and_notes_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        engine = frames.EngineSocket(theirs)
        assert engine.receive(wait=False) == []
        for message in TO_ENGINE:
            ours.sendall(frames.encode(message))
        assert engine.receive(wait=True) == TO_ENGINE
        engine.send(FROM_ENGINE[0])
        assert frames.decode_from_engine(ours.recv(4096)[4:]) == FROM_ENGINE[0]
    assert engine.receive(wait=True) is None
    theirs.close()
