"""A sample of MaskBench's schemas on every run; `make test-schemas` has all of them."""

from __future__ import annotations

from pathlib import Path

from tests.grammar.rig import campaign
from tests.programs.schemas.campaign import cases, summary


def test_a_sample_of_real_schemas(shared_data: Path) -> None:
    chosen = list(cases(shared_data / "prompts" / "jsonschema"))[::14]
    assert len(chosen) > 90
    output = summary([campaign().judge(case, num_documents=1) for case in chosen])
    assert output["coverage"] > 0.85
    assert output["documents"] > 70
    assert output["documents_invalid"] == 0, output["invalid_documents"]
    assert output["invalid_but_accepted"] == 0, output["wrong_instances"]
    assert output["instances_judged_right"] > 0.98 * output["instances"]
