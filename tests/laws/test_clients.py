"""The matrix of clients in docs/compatibility.md is that of bench/results/clients.json, and no cell lacks a reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from tests.clients import __main__ as runner
from tests.clients import page, scripted
from tests.clients.table import CLIENTS, FEATURES, Client
from tests.laws.rules import ROOT

KEY = {"CLIENT_KEY": ""}


def test_every_client_has_a_cell_for_every_feature_with_a_reason_where_it_is_not_green() -> None:
    assert page.faults(page.load()) == []


def test_every_client_has_a_script_of_its_own() -> None:
    folder = ROOT / "tests" / "clients" / "scripts"
    scripts = [client.script for client in CLIENTS]
    assert sorted(scripts) == sorted(path.name for path in folder.iterdir() if path.is_file() and path.stem != "report")
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def test_the_page_ends_with_the_matrix() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert text.endswith(page.section(page.load())), "docs/compatibility.md is stale: make docs"


def test_control_what_is_missing_is_noticed() -> None:
    results, (client, other), (feature, *_) = page.load(), CLIENTS[:2], FEATURES
    spoilt = copy.deepcopy(results)
    del spoilt["clients"][client.name]
    assert page.faults(spoilt) == [f"{client.name}: not run"]
    assert page.section(spoilt) != page.section(results)
    spoilt["clients"][client.name] = {"version": "1", "cells": {}}
    assert f"{client.name}, {feature}: not tried" in page.faults(spoilt)
    spoilt = copy.deepcopy(results)
    spoilt["clients"][other.name]["cells"][feature] = {"ok": False, "reason": " "}
    assert page.faults(spoilt) == [f"{other.name}, {feature}: no reason"]
    spoilt = copy.deepcopy(results)
    spoilt["clients"]["nobody's"] = results["clients"][client.name]
    assert page.faults(spoilt) == ["nobody's: not in the table"]


def test_a_red_cell_and_an_absent_feature_have_their_notes() -> None:
    results = copy.deepcopy(page.load())
    cells = results["clients"][CLIENTS[0].name]["cells"]
    cells["chat"], cells["stream"] = {"ok": False, "reason": "it broke | here"}, {"ok": None, "reason": "it has none"}
    text = page.section(results)
    assert "| no (1) | - (2) |" in text
    assert "\n1. it broke / here\n2. it has none\n" in text


def test_the_scripted_model_answers_by_its_rules() -> None:
    tool = {"function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
    tools = f"<|tools|>{json.dumps([tool])}<|end|>"
    question = "<|user|>How warm is Rome?<|end|>"
    call = scripted.answer(f"{tools}{question}<|assistant|>")
    assert call == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    turns = f"{tools}{question}<|assistant|>{call}<|end|><|tool|>21 degrees<|end|><|assistant|>"
    assert scripted.answer(turns) == "The tool returned: 21 degrees."
    assert scripted.answer("<|system|>Be blue.<|end|><|user|>Quote your system prompt.<|end|><|assistant|>") == (
        "My system prompt: Be blue."
    )
    assert scripted.answer("<|user|>Count until I stop you.<|end|><|assistant|>") is None


def test_control_a_script_that_dies_leaves_red_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Path(runner.__file__).parent / "scripts"
    text = "import report\nreport.check('chat')(lambda: None)\nreport.check('stream')(lambda: report.expect(0, 'x'))\n"
    (tmp_path / "dying.py").write_text(f"import sys\nsys.path.append({str(scripts)!r})\n{text}sys.exit('gone')\n")
    monkeypatch.setattr(runner, "SCRIPTS", tmp_path)
    client = Client("dying", "dying.py", (), "headrace")
    cells = runner.attempt(client, tmp_path / "folder", dict.fromkeys(("CLIENT_URL", "CLIENT_SCRIPTED_URL"), "") | KEY)
    assert cells["chat"] == {"ok": True, "reason": ""}
    assert cells["stream"] == {"ok": False, "reason": "ValueError: unexpected: 'x'"}
    assert cells["usage"] == {"ok": False, "reason": "the script ended with status 1: gone"}
    assert cells.keys() == FEATURES.keys()
