"""Every command, snippet and example of the README and of the how-tos is run once, on the built-in model.

One server answers all `curl` commands and all clients; `headrace` commands and Python snippets run in this process.
What can not run here is in `NOT_RUN`, with the reason, and its flags are checked all the same.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs import pages
from tests.docs.pages import PAGES, SHELLS, Block, blocks, commands, program
from tests.support import picture_model
from tests.support.adapters import write_adapter
from tests.support.picture_model import noisy
from tests.support.pictures import png
from tests.support.serving import serve
from tests.support.shallow import shallow

from headrace.cli import main
from headrace.cli import serve as serve_command
from headrace.cli.agents import AGENTS

# One server has the commands of all pages, among them those that make it sleep and wake up.
pytestmark = pytest.mark.in_order

NOT_RUN = {
    "make": "sets up an environment, or runs these tests",
    "git worktree": "changes the repository",
    "curl -X POST localhost:8000/v1/load_lora_adapter": "for a server with adapters; tests/adapters has one",
    "curl localhost:8000/lora-adapters": "for a server with adapters; tests/adapters has one",
    "curl -X POST localhost:8000/lora-adapters": "for a server with adapters; tests/adapters has one",
    'curl localhost:8000/completion -H Content-Type: application/json -d {"prompt": "All users': "as these",
    "curl -X POST localhost:8000/v1/unload_lora_adapter": "for a server with adapters; tests/adapters has one",
    "git tag": "changes the repository",
    "git push": "changes another repository",
    "python supply/release.py": "fails before the day of a release; tests/deploy/test_release.py runs its parts",
    "pip install": "changes the environment",
    "python -m pip install": "changes the environment",
    "pytest": "the tests themselves",
    "lm_eval": "650 MB of packages; tests/e2e/test_lm_eval.py runs it",
    "python -m bench.compare": "other engines, 30 GB, hours",
    "python -m bench.pairs": "another checkout, minutes",
    "python -m bench.record": "minutes, and it writes into the repository",
    "python -m bench.plot": "it writes into the repository",
    "python -m bench.speculation": "it writes into the repository",
    "python training/": "minutes to hours",
    "tail": "a log of training",
    "python3 -m venv": "makes an environment; supply/wheel.py does",
    "docker": "needs a daemon; tests/deploy reads the files",
    "kubectl": "needs a cluster; tests/deploy reads the files",
    "sudo": "changes the machine",
    "python -m tests.programs.rolling": "minutes, and a proxy",
    "python -c": "prints a new key",
    "headrace plan builtin --check": "minutes; tests/plan/test_check.py runs it",
    "headrace plan path/to/model --quantization int8 --check": "minutes; tests/plan/test_check.py runs it",
    "ray ": "a cluster; tests/campaigns/ray_cluster.py runs it",
    "headrace deploy": "a cluster; tests/fleet/ray and tests/campaigns/ray_cluster.py run it",
    "headrace engine": "a server; tests/fleet/remote/test_commands.py runs it",
    "headrace rank": "two hosts; tests/parallel/test_hosts_commands.py runs it",
    "headrace serve builtin --tensor-parallel-size 2 --rendezvous": "two hosts; test_hosts_commands.py runs it",
    "headrace serve builtin --pipeline-parallel-size 2 --rendezvous": "two hosts; test_hosts_commands.py runs it",
    "openssl": "tests/support/remote.py and tests/serve/test_reach.py run them",
    "headrace chat https": "a server by TLS; tests/serve/test_reach.py runs it",
    "headrace pull": "needs the hub; tests/serve/test_models_folder.py runs it",
    "npm install": "changes the environment",
    "export": "sets a variable of the shell",
    "cn": "an agent of others; tests/serve/test_agents.py replays its first request",
    "headrace launch": "an agent of others; tests/cli/test_launch.py and test_launched_agents.py run it",
    "open-webui": "a server of others",
    "python -m tests.support.scripted": "a server",
    "headrace bench ablate": "minutes; tests/cli/bench/test_ablate.py runs it",
    "headrace simulate path/to/model --trace trace.jsonl --duration 120": "minutes; tests/cli/test_trace_check.py",
    "python -m bench.ablation": "minutes, and it writes into the repository",
    "headrace bench speculate": "minutes; tests/cli/test_verify_speculation.py runs it",
    "headrace verify": "ten seconds; tests/cli/test_verify_speculation.py runs it",
    "headrace replay": "a log of a server; tests/e2e/test_replay.py runs it",
    "headrace fleet update": "a fleet; tests/serve/test_fleet.py runs it",
    "headrace top": "a running server; tests/serve/test_inspector.py runs it",
    "headrace explain": "a log of a server; tests/insight/test_lives.py runs it",
}
"""Beginnings of commands, and why these are not run."""
LIMITS = {
    "headrace generate": ["--max-tokens", "8"],
    "headrace chat": ["--max-tokens", "8"],
    "headrace bench serve": ["--num-prompts", "2", "--random-output-len", "4", "--request-rate", "100"],
    "headrace bench sweep": ["--num-prompts", "2", "--random-output-len", "4", "--num-rates", "1"],
    "headrace quantize": ["--num-calibration-tokens", "64", "--num-steps", "1"],
    "headrace lab": ["--small"],
    "headrace bench throughput": ["--num-prompts", "1", "--output-len", "2", "--rounds", "1"],
    "headrace bench latency": ["--batch-size", "1", "--output-len", "2", "--num-iters", "1", "--num-iters-warmup", "0"],
}
"""Flags added to commands that are run, so that they take little time."""
PLACES = {"path/to/model.gguf": "made.gguf", "path/to/model": shallow(), "./model": shallow()}
"""Placeholders of the pages, and what stands in their place."""

BLOCKS = [block for path in PAGES for block in blocks(path.name, path.read_text(encoding="utf-8"))]
COMMANDS = [(block, words) for block in BLOCKS if block.language in SHELLS for words in commands(block.text)]


def reason(words: list[str]) -> str:
    """The entry of NOT_RUN that the command falls under, or nothing."""
    text = " ".join([words[0].rpartition("/")[2], *words[1:]])
    return next((beginning for beginning in NOT_RUN if text.startswith(beginning)), "")


RUN = [(block, words) for block, words in COMMANDS if not reason(words)]


def label(value: Any) -> str:
    return " ".join(value)[:60] if isinstance(value, list) else str(value)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the server that all clients of the pages talk to."""
    models = tmp_path_factory.mktemp("models")
    (models / "my-model").symlink_to(shallow())
    picture_model.write(models / "eyes")
    flags = ("--models-dir", str(models), "--keep-alive", "0", "--any-model-name")
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("storage", "sessions")]
    with serve("builtin", "--storage-dir", folders[0], "--slot-save-path", folders[1], *flags) as served:
        yield served.url


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture
def folder(root: Path, block: Block) -> Path:
    """The folder in which the commands of a page run, with the files that pages name."""
    path = root / block.page
    path.mkdir(exist_ok=True)
    (path / "schedule.log").touch()
    [request] = [block.text for block in BLOCKS if block.page == "howto-batch.md" and block.language == "json"]
    for name in ("in.jsonl", "requests.jsonl"):
        (path / name).write_text(request)
    [trace] = [block.text for block in BLOCKS if block.page == "howto-plan.md" and block.language == "json"]
    (path / "trace.jsonl").write_text(trace)
    if block.page == "howto-adapters.md":
        write_adapter(path / "adapters" / "sql", {"model.layers.0.self_attn.q_proj.weight": torch.zeros(256, 256)})
    if block.page == "howto-pictures.md" and not (path / "photo.png").exists():
        picture_model.write(path / "path" / "to" / "model")
        (path / "photo.png").write_bytes(png(noisy(1)))
    (path / "text.txt").write_text("Once upon a time there was a little dog. He liked to run in the park. " * 8)
    return path


def run_headrace(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command in this process. Raises ValueError with its exit status if that is not 0."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", words)
    try:
        main.main()
    except SystemExit as error:
        if error.code:
            raise ValueError(f"{' '.join(words)} ended with status {error.code}") from error


def run_serve(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `headrace serve` up to the two configs, which are made and checked."""
    build = serve_command.build
    configs = []

    def build_and_stop(struct: Any, fields: dict[str, Any]) -> Any:
        configs.append(build(struct, fields))
        if len(configs) == 2:
            raise SystemExit(0)
        return configs[-1]

    monkeypatch.setattr(serve_command, "build", build_and_stop)
    run_headrace(words, folder, monkeypatch)
    assert len(configs) == 2


def run(words: list[str], folder: Path, url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    if program(words) == "curl":
        pages.check_reply(pages.curl(words[1:], url()))
        return
    if program(words) != "headrace":
        raise ValueError(f"{words[0]} is neither run nor in NOT_RUN")
    if words[1] == "serve":
        run_serve(words, folder, monkeypatch)
        return
    words = [PLACES.get(word, word) for word in words]
    if words[1:3] == ["quantize", "builtin"]:
        words[2] = shallow()  # two of its layers
    if "made.gguf" in words and not (folder / "made.gguf").exists():
        run_headrace(["headrace", "quantize", "builtin", "made.gguf", "--method", "Q8_0"], folder, monkeypatch)
    for beginning, flags in LIMITS.items():
        if " ".join(words).startswith(beginning):
            words = [*words, *flags]
    if words[1:3] in (["bench", "serve"], ["bench", "sweep"]):
        words += ["--base-url", url()]
    if words[1] in ("list", "ps", "show", "rm", "fleet"):
        words += ["--url", url()]
    if words[1] == "doctor":
        monkeypatch.setattr("headrace.doctor.PROBE_BYTES", 2**20)
    if words[1] == "chat":
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    run_headrace(words, folder, monkeypatch)


@pytest.mark.parametrize(("block", "words"), RUN, ids=label)
def test_command(
    block: Block, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    run(words, folder, lambda: request.getfixturevalue("url"), monkeypatch)


@pytest.mark.parametrize(("block", "words"), [(block, words) for block, words in COMMANDS if reason(words)], ids=label)
def test_command_that_is_not_run(block: Block, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    pages.check(words)


def test_every_reason_is_needed() -> None:
    unused = NOT_RUN.keys() - {reason(words) for _, words in COMMANDS}
    assert not unused
    assert len(RUN) > 25


# -- snippets ----------------------------------------------------------------------------------------------------


def names_for(block: Block) -> dict[str, Any]:
    """Names that a snippet takes from the text around it."""
    if block.page == "howto-sampling.md":
        return {"token_ids": list(range(300, 400))}
    if block.page == "howto-add-a-model.md":
        from headrace.models import qwen2

        return {"qwen2": qwen2, "Decoder": Any, "Attention": Any}
    return {}


# An indented block is an excerpt of a file, which tests/models/test_howto.py compares with the file.
SNIPPETS = [block for block in BLOCKS if block.language == "python" and not block.text.startswith(" ")]


def run_snippet(block: Block, url: Callable[[], str]) -> dict[str, Any]:
    """Run a snippet against the server at `url()`, and return its names."""
    text = block.text.replace("http://127.0.0.1:8000", url()) if "127.0.0.1:8000" in block.text else block.text
    names = names_for(block)
    exec(compile(text, str(block), "exec"), names)
    return names


@pytest.mark.parametrize("block", [block for block in SNIPPETS if block.page != "howto-tools.md"], ids=str)
def test_snippet(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(folder)
    run_snippet(block, lambda: str(request.getfixturevalue("url")))


def test_K2_the_tools_of_the_page_take_two_turns(request: pytest.FixtureRequest) -> None:
    """The page's first turn ends with a call, and the second goes on from the call and its result."""
    [block] = [block for block in SNIPPETS if block.page == "howto-tools.md"]
    names = run_snippet(block, lambda: str(request.getfixturevalue("url")))
    assert [names["call"].function.name, len(names["messages"])] == ["weather", 3]
    assert "city" in json.loads(names["call"].function.arguments)
    assert names["reply"].choices[0].message.content


@pytest.mark.parametrize(
    ("line", "message"),
    [("client.responses.create(input='Hi', max_tokenz=1)", "max_tokenz"), ("from headrace import LLLM", "LLLM")],
)
def test_a_wrong_snippet_is_caught(line: str, message: str) -> None:
    text = f"from openai import OpenAI\nclient = OpenAI(base_url='http://127.0.0.1:8000/v1', api_key='none')\n{line}\n"
    [block] = blocks("wrong.md", f"```python\n{text}```\n")
    with pytest.raises((TypeError, ImportError), match=message):
        run_snippet(block, lambda: "http://127.0.0.1:9")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_json(block: Block) -> None:
    """One document, or one on each line."""
    for text in [block.text] if block.text.startswith("{\n") else block.text.splitlines():
        json.loads(text)


def test_the_agents_of_the_page_are_those_of_the_command() -> None:
    """The table has a row for each agent, with its command and the context that it needs."""
    page = (pages.DOCS / "howto-agents.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    stated = {row[0].split("`")[1]: (row[1].strip("`"), int(row[4].replace(",", ""))) for row in rows}
    assert stated == {name: (agent.install, agent.needs) for name, agent in AGENTS.items()}


def test_the_config_of_continue_names_the_server_and_its_route() -> None:
    [block] = [block for block in BLOCKS if block.page == "howto-agents.md" and block.language == "yaml"]
    (model,) = pytest.importorskip("yaml").safe_load(block.text)["models"]
    assert (model["provider"], model["apiBase"]) == ("openai", "http://127.0.0.1:8000/v1")


def test_every_block_has_a_language_or_is_output() -> None:
    """A block without a language is a log, a listing or a file: no line of it begins like a command."""
    silent = [block for block in BLOCKS if block.language not in (*SHELLS, "python", "json")]
    beginning = r"^\s*(?:\$ )?(?:headrace [a-z]|curl|python|pip|make|pytest) ?"
    assert not [str(block) for block in silent if re.search(beginning, block.text, re.M)]
    assert {block.language for block in silent} <= {"", "c", "toml", "yaml"}


# -- negative controls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("headrace generate --prompt Once --max-tokenz 4", "status 2"),
        ("headrace generate --prompt Once --temperature=-1", "status 2"),
        ("headrace serve builtin --prot 8000", "status 2"),
        ("headrace serve builtin --max-num-seqs 0", "status 2"),
        ("headrace sreve builtin", "status 2"),
        ("vllm serve builtin", "neither run nor in NOT_RUN"),
        ("curl -q localhost:8000/health", "not known"),
        ("curl localhost:8001/health", "not the server"),
    ],
)
def test_a_wrong_command_is_caught(command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = blocks("wrong.md", f"```bash\n{command}\n```\n")
    [words] = commands(block.text)
    with pytest.raises(ValueError, match=message):
        run(words, tmp_path, lambda: "http://127.0.0.1:9", monkeypatch)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("headrace verify builtin --num-promts 3", "--num-promts"),
        ("headrace bench speculate builtin --load many", "'many' is not a number"),
        ("headrace dinner", "no command dinner"),
        ("python -m bench.compare --qick", "--qick"),
        ("python -m bench.plot --dpi 300", "takes no arguments"),
        ("python -m bench.nothing", "bench.nothing"),
        ("python training/pack.py", "required"),
        ("python training/nothing.py", "there is no"),
        ("make dinner", "no target dinner"),
        ("pip install 'headrace[otel]'", "on no index"),
        ("pip install -e '.[nothing]'", "no extra nothing"),
        ("pytest tests/nothing", "there is no"),
        ("rm -rf build", "nothing is known"),
        ("docker build -f deploy/Dockerfil .", "there is no deploy/Dockerfil"),
    ],
)
def test_a_wrong_word_of_a_command_that_is_not_run_is_caught(command: str, message: str) -> None:
    [words] = commands(command)
    with pytest.raises(ValueError, match=message):
        pages.check(words)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"prompt": "Once", "max_tokens": -1}', "status 400"),
        ('{"prompt": "Once", "max_tokenz": 4, "max_tokens": 1}', "max_tokenz"),
    ],
)
def test_a_wrong_field_is_caught(body: str, message: str, url: str) -> None:
    [words] = commands(f"curl localhost:8000/v1/completions -d '{body}'")
    with pytest.raises(ValueError, match=message):
        pages.check_reply(pages.curl(words[1:], url))


def test_blocks_and_commands() -> None:
    text = "a\n```bash\n$ one 'a\nb' \\\n  c   # why\ntwo && three &\n```\n  ```\n  out\n  ```\n"
    first, second = blocks("p", text)
    assert (first.line, first.language, second.line, second.language) == (2, "bash", 8, "")
    assert list(commands(first.text)) == [["one", "a\nb", "c"], ["two"], ["three"]]
    with pytest.raises(ValueError, match="within a quotation"):
        list(commands("one 'two\n"))
