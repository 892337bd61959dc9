"""A sample of MaskBench's schemas on every run; `make test-schemas` has all of them."""

from __future__ import annotations

from pathlib import Path

from tests.grammar.rig import campaign
from tests.programs.schemas.campaign import cases, summary


def test_a_sample_of_real_schemas(shared_data: Path) -> None:
    chosen = list(cases(shared_data / "prompts" / "jsonschema"))[::14]
    assert len(chosen) > 90
    told = summary([campaign().judge(case, num_documents=1) for case in chosen])
    assert told["coverage"] > 0.85
    assert told["documents"] > 70
    assert told["documents_invalid"] == 0, told["invalid_documents"]
    assert told["invalid_but_accepted"] == 0, told["wrong_instances"]
    assert told["instances_judged_right"] > 0.98 * told["instances"]
