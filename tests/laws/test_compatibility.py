"""The table of what works names tests that exist, and docs/compatibility.md is written from it."""

from __future__ import annotations

import re

from tests.laws.rules import ROOT
from tests.programs import compatibility

from headrace import models

PAGE = ROOT / "docs" / "compatibility.md"


def test_every_row_names_tests_that_exist() -> None:
    assert compatibility.missing_tests(compatibility.all_tests()) == []
    for rows in compatibility.TABLES.values():
        assert len({row.feature for row in rows}) == len(rows)
        for row in rows:
            assert row.works in ("yes", "partly", "no")
            assert row.tests or row.works == "no", row.feature


def test_every_type_of_a_model_has_a_row() -> None:
    rows = {row.feature for row in compatibility.TABLES["Models"]}
    assert set(models.names()) <= rows
    more = {
        "the same bits for every type",
        "native kernels of every type",
        "layers for multi-token prediction",
        "text of other types",
        "other causal types of transformers",
    }
    assert rows - set(models.names()) == more
    assert {row.feature for row in compatibility.TABLES["Encoders"]} == set(models.encoder_names())


def test_the_readme_counts_the_types() -> None:
    match = re.search(
        r"(\d+) \[types\]\(docs/compatibility\.md#models\)", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert match is not None
    assert int(match[1]) == len(models.names())


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert compatibility.without_results(text) == compatibility.without_results(compatibility.page({})), (
        "docs/compatibility.md is stale: make compatibility"
    )
    assert "FAILED" not in text
    assert "not run" not in text


def test_control_a_test_that_is_gone_is_noticed() -> None:
    assert compatibility.missing_tests(["openai:test_models", "openai:test_nothing"]) == ["openai:test_nothing"]


def test_control_a_stale_page_is_noticed() -> None:
    text = compatibility.page({})
    without = compatibility.without_results
    assert without(text) == without(text.replace("not run", "passed"))
    assert without(text) != without(text.replace("`top_k`", "`topk`"))


def test_results_are_kept_for_rows_that_did_not_change() -> None:
    text = compatibility.page({})
    passed = text.replace("not run", "passed")
    assert compatibility.with_results_of(text, passed) == passed
    changed = text.replace("`top_k`", "`topk`")
    assert compatibility.with_results_of(changed, passed).count("not run") == 1
