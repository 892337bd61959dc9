"""`POST /inspect/plan`: the numbers of `headrace plan --json`, bounds on what is planned, and the form of the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.inspector import browser
from tests.plan import configs
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.cli import planning as cli_planning
from headrace.cli.main import main
from headrace.insight.limits import Machine
from headrace.plan import worker
from headrace.plan.hardware import measured
from headrace.plan.plans import Job, Plan
from headrace.protocol import step_model
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.step_model import StepModel
from headrace.serve.inspection import Inspection
from headrace.serve.inspector import planning
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Live]:
    engine = EngineConfig(model="builtin")
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), engine=engine) as live:
        yield live


OPT = {"model_type": "opt", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64,
       "max_position_embeddings": 64}  # fmt: skip


def post(live: Live, **body: Any) -> Any:
    return HTTP.post(f"{live.url}/inspect/plan", json=body)


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What `headrace plan` prints."""
    monkeypatch.setattr(sys, "argv", ["headrace", "plan", *words, "--json"])
    with pytest.raises(SystemExit):
        main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("fits", [True, False])
def test_a_plan_is_that_of_the_command(
    server: Live, tmp_path: Path, fits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(configs.LLAMA_3_8B))
    form = {"hardware": "l4", "context": 2048, "concurrency": 8 if fits else 900, "quantization": "int8",
            "kv_cache_dtype": "int8", "slo": "ttft:900,tpot:90", "price": 0.8}  # fmt: skip
    words = [word for name, value in form.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    reply = post(server, config=configs.LLAMA_3_8B, **form)
    assert reply.status_code == 200, reply.text
    theirs = printed(monkeypatch, capsys, str(path), *words)
    assert reply.json() | {"model": ""} == theirs | {"model": ""}
    assert (reply.json()["parameters"], reply.json()["fits"]) == (8_030_261_248, fits)
    # The control: another form of the weights is another plan.
    assert post(server, config=configs.LLAMA_3_8B, **(form | {"quantization": None})).json() != reply.json()


def test_the_served_model_on_this_machine_takes_the_steps_that_check_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    # What was measured on this machine before.
    monkeypatch.setattr(step_model, "FOLDER", tmp_path)
    machine = Machine(bandwidth=2e10, peaks={"f32": 3e11})

    async def measure(self: Inspection) -> Machine:
        return machine

    monkeypatch.setattr(Inspection, "machine", measure)
    monkeypatch.setattr(cli_planning, "this_machine", lambda: measured(machine.bandwidth, machine.peaks))
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), engine=EngineConfig(model="builtin")) as live:
        plan = post(live).json()
        assert plan | {"model": "builtin"} == printed(monkeypatch, capsys, "builtin")
        assert plan["machine"]["name"] == "this machine"
        machine = Machine()
        reply = post(live)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_measured")
    # The fitted steps are read where the planner runs.
    fit = StepModel(base=0.01, knots=(1,), slopes=(1e-4,), logits=0.0, seen=0.0)
    step_model.save(step_model.path_of("builtin", plan["form"], plan["kv_cache_dtype"]), fit)
    job = Job(name="builtin", path="builtin", hardware="this", machine=measured(2e10, {"f32": 3e11}))
    assert worker.plan(job).step_source == "by steps that --check measured here"


@pytest.mark.parametrize(
    ("body", "field", "bound"),
    [
        ({"context": 0}, "context", "from 1 to"),
        ({"context": 2**40}, "context", "from 1 to"),
        ({"context": 40_000}, "context", "at most 32768"),
        ({"context": "40k"}, "context", "at most 32768"),
        ({"context": "a page"}, "context", "32k (32,000) or 32K (32,768)"),
        ({"context": "1.0005k"}, "context", "a whole number"),
        ({"context": "9" * 30}, "context", "from 1 to 2147483648"),
        ({"context": 2**70}, "context", "from 1 to 2147483648"),
        ({"output_len": "-5"}, "output_len", "a whole number such as 4096"),
        ({"output_len": ""}, "output_len", "a whole number such as 4096"),
        ({"output_len": 0}, "output_len", "from 1 to"),
        ({"concurrency": True}, "concurrency", "an integer"),
        ({"output_len": 5000}, "output_len", "below the context"),
        ({"concurrency": -1}, "concurrency", "from 1 to"),
        ({"concurrency": 1.5}, "concurrency", "an integer"),
        ({"price": -1}, "price", "from 0"),
        ({"dtype": "int5"}, "dtype", "one of auto"),
        ({"kv_cache_dtype": "int5"}, "kv_cache_dtype", "one of auto"),
        ({"quantization": "int5"}, "quantization", "one of int4"),
        ({"slo": "ttft"}, "slo", "ttft:200"),
        ({"hardware": "/etc/hostname"}, "hardware", "one of h100"),
        ({"model": "/etc"}, "model", "one of "),
        ({"model": "fake", "config": {}}, "config", "without a model"),
        ({"config": {}}, "config", "the planner knows no model_type None"),
        ({"config": {"model_type": 2**70}}, "config", "without such"),
        ({"config": "llama"}, "config", "an object"),
        (
            {"config": configs.LLAMA_3_8B | {"num_hidden_layers": 10**9}},
            "config",
            "num_hidden_layers is 1000000000, expected an integer from 1 to 4096",
        ),
        (
            {"config": {"model_type": "gpt2", "n_layer": 4097}},
            "config",
            "n_layer is 4097, expected an integer from 1 to 4096",
        ),
        (
            {"config": OPT | {"num_hidden_layers": 5000}},
            "config",
            "num_hidden_layers is 5000, expected an integer from 1 to 4096",
        ),
        ({"weights": 1}, "weights", "a field that headrace knows"),
    ],
)
def test_what_can_not_be_planned_is_refused_by_field(server: Live, body: Any, field: str, bound: str) -> None:
    reply = post(server, **({"hardware": "l4"} | body))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert bound in error["message"]


def test_numbers_are_those_of_the_command_line(server: Live) -> None:
    """ "1k" is 1,000 and "1K" is 1,024 tokens, and the cache of the whole batch is theirs."""
    for text, context in (("1k", 1000), ("1K", 1024), ("2048", 2048), ("0.5k", 500)):
        reply = post(server, config=configs.LLAMA_3_8B, hardware="h100", context=text, concurrency="53")
        assert reply.status_code == 200, reply.text
        assert (
            reply.json()
            == post(server, config=configs.LLAMA_3_8B, hardware="h100", context=context, concurrency=53).json()
        )
        assert reply.json()["context"] == context
        # Meta's model card and every other engine: 2 x 32 layers x 8 heads x 128 numbers x 2 bytes.
        assert reply.json()["kv_batch_bytes"] == 53 * context * 131_072


def test_a_config_that_takes_for_ever_ends_at_the_bound(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = next(each for each in server.app.state.lifespan.at_end if isinstance(each.__self__, planning.Planning))
    monkeypatch.setattr(plans.__self__, "_process", planning.BoundedProcess("headrace.plan.worker", 0.3))
    one_head = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    endless = configs.LLAMA_3_8B | one_head | {"max_position_embeddings": 2**31 - 1}
    reply = post(server, config=endless, hardware="h200", context=2**31 - 1)
    assert reply.status_code == 400, reply.text
    assert "processor time" in reply.json()["error"]["message"]
    # It harms nobody else.
    assert post(server, hardware="l4").status_code == 200


def test_a_plan_needs_an_administrators_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(api_key_file=rig.write_keys(tmp_path), log_stats_interval=0)
    with Live(inproc(), tokenizer, config, engine=EngineConfig(model="builtin")) as locked:
        url = f"{locked.url}/inspect/plan"
        codes = [
            HTTP.post(url, json={"hardware": "l4"}, headers=rig.bearer(key)).status_code
            for key in (rig.ALICE, rig.ROOT)
        ]
        assert codes == [403, 200]


def test_a_model_without_files_is_not_planned(tokenizer: Tokenizer) -> None:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        reply = post(live, hardware="l4")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


def test_the_worker_names_its_bounds() -> None:
    with pytest.raises(RequestError, match="hardware: 'x' is not allowed"):
        worker.plan(Job(config=configs.LLAMA_3_8B, hardware="x"))
    assert isinstance(worker.plan(Job(config=configs.LLAMA_3_8B, hardware="h200")), Plan)


@pytest.mark.parametrize("settings", [{"viewport": browser.PHONE}, {"color_scheme": "dark"}], ids=["phone", "dark"])
def test_the_form_shows_the_servers_numbers_and_its_changes_fit(
    open_page: Callable[..., Any], settings: dict[str, Any]
) -> None:
    page = open_page("/inspect#plan", **settings)
    page.locator("form.plan select").first.select_option(label="a config.json")
    page.locator("form.plan textarea").fill(json.dumps(configs.LLAMA_3_8B))
    page.locator("form.plan select").nth(1).select_option("l4")
    for label, text in (("Context", "8192"), ("Sequences at once", "64"), ("Dollars an hour", "0.8")):
        page.get_by_label(label).fill(text)
    page.get_by_role("button", name="Plan", exact=True).click()
    page.locator("h2", has_text="It does not fit: l4 has no room for 64 sequences of 8,192 tokens").wait_for()
    assert browser.violations(page) == []
    assert not browser.is_wider_than_the_screen(page)
    change = page.locator(".changes button").first
    assert change.inner_text() == "--concurrency 4"
    change.focus()
    page.keyboard.press("Enter")
    page.locator("h2", has_text="It fits: 4 sequences of 8,192 tokens on l4").wait_for()
    assert page.get_by_label("Sequences at once").input_value() == "4"
    cells = page.locator("main.plan tbody tr").all_inner_texts()
    assert any(row.split("\t")[:2] == ["parameters", "8,030,261,248"] for row in cells)
    assert any(row.startswith("price\t$") for row in cells)
    assert any(row.startswith("a batch\t4.29 GB\t4 × 1.07 GB") for row in cells)
    page.get_by_label("Context").fill("8k")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.locator("h2", has_text="It fits: 4 sequences of 8,000 tokens on l4").wait_for()
    assert "headrace plan config.json --hardware l4" in page.locator("main.plan code").inner_text()
    assert browser.violations(page) == []
    page.locator("form.plan textarea").fill("{")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_role("alert").filter(has_text="config: ").wait_for()
