"""The keyed noise: Philox against published vectors and plain integers, and the Gumbel variates made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling.reference import philox, token_bits, token_gumbel

from headrace.sampling import noise

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
U32 = st.integers(0, 2**32 - 1)


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    c = tuple(np.array([word], np.uint64) for word in words(counter))
    got = noise.philox4x32(c, words(key))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in got) == words(result)
    assert philox(words(counter), words(key)) == words(result)  # type: ignore[arg-type]


@given(U32, U32, U32, U32, U32, U32)
def test_against_plain_integers(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> None:
    arrays = tuple(np.array([word], np.uint64) for word in (c0, c1, c2, c3))
    got = noise.philox4x32(arrays, (k0, k1))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in got) == philox((c0, c1, c2, c3), (k0, k1))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), min_size=1), U32)
def test_layout_of_key_and_counter(seed: int, position: int, token_ids: list[int], purpose: int) -> None:
    got = noise.bits(seed, position, np.array(token_ids), purpose).tolist()
    assert got == [token_bits(seed, position, token_id, purpose) for token_id in token_ids]


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 512, 8191, 8192, 8193, 20001])
def test_all_at_once_equals_one_by_one(num_tokens: int) -> None:
    everything = noise.bits_of_all(11, 5, num_tokens)
    some = np.unique(np.linspace(0, num_tokens - 1, 40).astype(np.int64))
    assert np.array_equal(everything[some], noise.bits(11, 5, some))
    assert everything.tolist()[-1] == token_bits(11, 5, num_tokens - 1)
    # The logarithms too: a variate's bits depend on the token alone, not on its place in the array.
    assert np.array_equal(noise.gumbel(everything)[some], noise.gumbel(noise.bits(11, 5, some)))


def test_gumbel_against_math() -> None:
    got = noise.gumbel(noise.bits_of_all(3, 9, 500))
    assert got == pytest.approx([token_gumbel(3, 9, i) for i in range(500)], rel=1e-13, abs=1e-13)


def test_gumbel_ends_are_finite() -> None:
    least, most = noise.gumbel(np.array([0, 2**64 - 1], np.uint64))
    assert least == pytest.approx(-math.log(53 * math.log(2)))
    assert most <= noise.GUMBEL_MAX + 1e-9
    assert most == pytest.approx(53 * math.log(2))


def moments_ok(u: np.ndarray) -> bool:
    n = len(u)
    return bool(
        abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
        and abs((u**2).mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / n)
        and abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / math.sqrt(n)
    )


def uniform(words: np.ndarray) -> np.ndarray:
    return (words >> np.uint64(11)).astype(np.float64) / 2**53


def test_uniform_over_token_ids_positions_and_seeds() -> None:
    n = 20000
    assert moments_ok(uniform(noise.bits_of_all(7, 1, n)))
    one = np.array([17])
    assert moments_ok(np.concatenate([uniform(noise.bits(7, position, one)) for position in range(n // 4)]))
    assert moments_ok(np.concatenate([uniform(noise.bits(seed, 1, one)) for seed in range(n // 4)]))


def test_control_a_poor_hash_is_caught() -> None:
    assert not moments_ok(uniform(np.arange(20000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 // 1000)))
