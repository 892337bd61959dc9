"""S-24: what one caller puts into a cache is neither found nor evicted by another."""

from __future__ import annotations

from headrace.grammar.salted import HOLDER_LENGTH, SaltedCache

ALICE, BOB = "a" * HOLDER_LENGTH, "b" * HOLDER_LENGTH


def test_S_24_a_value_is_found_under_its_salt_only() -> None:
    cache: SaltedCache[int] = SaltedCache(4)
    cache.put(ALICE, "key", 1)
    assert cache.get(ALICE, "key") == 1
    assert [cache.get(salt, "key") for salt in (BOB, "", ALICE + "own", ALICE[:-1])] == [None] * 4


def test_S_24_a_flood_evicts_nothing_of_another_holder() -> None:
    cache: SaltedCache[int] = SaltedCache(8)
    for i in range(4):
        cache.put(ALICE, i, i)
    for i in range(1000):
        # Salts of Bob's own do not make him several.
        cache.put(BOB + str(i % 7), i, i)
        assert len(cache) <= 8
    assert [cache.get(ALICE, i) for i in range(4)] == [0, 1, 2, 3]
    cache.put(ALICE, "more", 4)
    assert [cache.get(ALICE, i) for i in (0, 1, "more")] == [None, 1, 4], "beyond the half she evicts her own"
    assert len(cache) == 8


def test_the_least_recently_used_gives_way() -> None:
    cache: SaltedCache[int] = SaltedCache(2)
    for i in range(2):
        cache.put("", i, i)
    cache.get("", 0)
    cache.put("", 2, 2)
    assert [cache.get("", i) for i in range(3)] == [0, None, 2]
    cache.clear()
    assert len(cache) == 0
