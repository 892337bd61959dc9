"""What llama-server's flags --metrics and --no-slots do."""

from __future__ import annotations

import re

from tests.support.server import HTTP, Live, inproc

from headrace.insight.llama_metrics import LlamaMetrics
from headrace.insight.observer import Totals
from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer


def numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^llamacpp:(\S+) (\S+)$", text, re.MULTILINE)}


def test_llama_servers_names_are_behind_a_flag(live: Live, tokenizer: Tokenizer) -> None:
    assert "llamacpp:" not in HTTP.get(live.url + "/metrics").text
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, metrics=True)) as named:
        timings = [
            named.post("/completion", {"prompt": "C" * 40, "n_predict": 5, "seed": 1}).json()["timings"]
            for _ in range(2)
        ]
        reply = HTTP.get(named.url + "/metrics")
        assert "headrace:generation_tokens_total" in reply.text
        assert int(dict(reply.headers.raw)[b"Process-Start-Time-Unix"]) > 10**9
        output = numbers(reply.text)
        for name in output:
            assert f"# HELP llamacpp:{name} " in reply.text
            assert f"# TYPE llamacpp:{name} " in reply.text
        assert output["prompt_tokens_total"] == sum(each["prompt_n"] for each in timings)
        assert output["prompt_tokens_cached_total"] == sum(each["cache_n"] for each in timings) > 0
        assert output["tokens_predicted_total"] == 10
        assert output["n_tokens_max"] == 45
        assert output["requests_processing"] == output["requests_deferred"] == 0
        assert output["n_decode_total"] > 0
        assert 0 < output["n_busy_slots_per_decode"] <= 1


def test_rates_are_those_since_the_last_scrape() -> None:
    metrics = LlamaMetrics()
    first = Totals(num_generated_tokens=100, decode_seconds=4.0, most_tokens=7)
    assert numbers(metrics.render([first]).decode())["predicted_tokens_seconds"] == 25
    assert numbers(metrics.render([first]).decode())["predicted_tokens_seconds"] == 0
    # Another model counts with it, and the longest request is that of either.
    both = numbers(metrics.render([first, Totals(num_generated_tokens=10, decode_seconds=1.0, most_tokens=9)]).decode())
    assert (both["predicted_tokens_seconds"], both["tokens_predicted_total"], both["n_tokens_max"]) == (10, 110, 9)


def test_no_slots_hides_the_slots(tokenizer: Tokenizer) -> None:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, slots=False)) as hidden:
        reply = HTTP.get(hidden.url + "/slots")
        assert (reply.status_code, reply.json()["error"]["type"]) == (501, "not_supported_error")
        assert "--no-slots" in reply.json()["error"]["message"]
