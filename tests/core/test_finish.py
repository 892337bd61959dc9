"""When a sequence ends."""

import pytest

from headrace.core.requests import finish_after, stop_ids
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Finish

EOS = (2, 3)


def ends(token_id, num_generated=5, full=False, **params):
    return finish_after(token_id, num_generated, full, SamplingParams(**{"max_tokens": 9, **params}), EOS)


@pytest.mark.parametrize(
    ("inputs", "finish"),
    [
        ({"token_id": 7}, None),
        ({"token_id": 2}, Finish("stop")),
        ({"token_id": 3}, Finish("stop")),
        ({"token_id": 2, "ignore_eos": True}, None),
        ({"token_id": 7, "stop_token_ids": [7]}, Finish("stop", stop_reason=7)),
        ({"token_id": 7, "stop_token_ids": [7], "ignore_eos": True}, Finish("stop", stop_reason=7)),
        ({"token_id": 2, "stop_token_ids": [2]}, Finish("stop")),
        ({"token_id": 2, "stop_token_ids": [2], "ignore_eos": True}, Finish("stop", stop_reason=2)),
        ({"token_id": 2, "min_tokens": 6}, None),
        ({"token_id": 7, "min_tokens": 6, "stop_token_ids": [7]}, None),
        ({"token_id": 2, "min_tokens": 5}, Finish("stop")),
        ({"token_id": 7, "full": True}, Finish("length")),
        ({"token_id": 2, "full": True}, Finish("stop")),
        ({"token_id": 2, "full": True, "min_tokens": 6}, Finish("length")),
        ({"token_id": 2, "full": True, "ignore_eos": True}, Finish("length")),
    ],
)
def test_the_rules(inputs, finish):
    assert ends(**inputs) == finish


def test_every_id_that_may_end_a_sequence_is_a_stop_id():
    assert stop_ids(SamplingParams(), EOS) == {2, 3}
    assert stop_ids(SamplingParams(stop_token_ids=[9]), EOS) == {2, 3, 9}
    assert stop_ids(SamplingParams(stop_token_ids=[9], ignore_eos=True), EOS) == {9}
