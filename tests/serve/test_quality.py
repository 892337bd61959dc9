"""What was measured beside the weights is shown by /v1/models, if it is of the form that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.server import HTTP, Live, inproc

from headrace.insight import audit
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.serve.loading import load_audits
from headrace.text.tokenizer import Tokenizer

MEASURED = {"perplexity": 7.5, "mean_kl": 0.01, "reference": "m bfloat16 cpu"}


@pytest.mark.parametrize("fits", [True, False])
def test_models_show_what_was_measured(tokenizer: Tokenizer, fits: bool) -> None:
    client = inproc()
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as plain:
        form = audit.precision_of(client.info)
        assert "quality" not in HTTP.get(plain.url + "/v1/models").json()["data"][0]
    audits: list[dict[str, Any]] = [{"form": form | {"quantization": "int8"}, "measured": {"perplexity": 1.0}}]
    if fits:
        audits.append({"form": form, "measured": MEASURED})
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), audits=audits) as live:
        [card] = HTTP.get(live.url + "/v1/models").json()["data"]
        assert card.get("quality") == (MEASURED if fits else None)
        assert HTTP.get(live.url + "/v1/models/fake").json() == card


def test_a_broken_audit_stops_no_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = EngineConfig(model=str(tmp_path))
    assert load_audits(engine) == []
    assert not caplog.records
    (tmp_path / audit.NAME).write_text("{")
    assert load_audits(engine) == []
    assert "is not JSON" in caplog.text
