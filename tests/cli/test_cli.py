"""The `headrace` command: its flags are the configs' fields, its errors are one line, its JSON is one object."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.commands import Done, run_command

import headrace
from headrace.cli import options, reference
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.serve.reach import Reach

Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, as the console script does."""

    return functools.partial(run_command, monkeypatch, capsys)


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"headrace {headrace.__version__}\n", "")


def test_R_28_a_full_disk_is_one_line_and_a_bug_is_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int) -> Callable[[], None]:
        def app() -> None:
            raise OSError(number, os.strerror(number), "out.jsonl")

        return app

    monkeypatch.setattr("headrace.cli.main.app", fails(errno.ENOSPC))
    assert run() == (1, "", "headrace: [Errno 28] No space left on device: 'out.jsonl'\n")
    monkeypatch.setattr("headrace.cli.main.app", fails(errno.EBADF))
    with pytest.raises(OSError, match="Bad file"):
        run()


def test_help_lists_the_commands(run: Run) -> None:
    printed = run("--help").out
    for name in ("serve", "generate", "chat", "doctor", "replay", "bench"):
        assert f"  {name} " in printed


@pytest.mark.parametrize("path", [path for path, _ in reference.commands()])
def test_help_of_each_command_names_every_flag_in_full(run: Run, path: str) -> None:
    printed = run(*path.split()[1:], "--help").out
    command = dict(reference.commands())[path]
    for option in command.params:
        if option.param_type_name == "option":
            assert option.help, option.name
            for name in [*option.opts, *option.secondary_opts]:
                assert name in printed


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--no-such-flag"],
        ["sreve"],
        ["serve", "--max-num-seqs", "many"],
        ["generate", "--prompt", "a", "--prompt-file", "b"],
        ["generate"],
        ["bench", "throughput", "tpot:4"],
        ["serve", "one", "two"],
    ],
)
def test_a_word_out_of_place_is_fatal(run: Run, words: list[str]) -> None:
    done = run(*words)
    assert done.code == 2
    assert done.out == ""
    assert "Error" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["serve", "--max-num-seqs", "0"], "max_num_seqs"),
        (["serve", "--port", "70k"], "port"),
        (["serve", "--dtype", "int3"], "dtype"),
        (["generate", "--prompt", "a", "--top-p", "2"], "top_p"),
        (["generate", "--prompt", "a", "--temperature", "nan"], "temperature"),
        (["generate", "--prompt-file", "/no/such/file"], "prompt_file"),
        (["chat", "--max-tokens", "0"], "max_tokens"),
        (["bench", "latency", "--batch-size", "0"], "batch_size"),
        (["bench", "latency", "--goodput", "ttft:fast"], "goodput"),
        (["bench", "throughput", "--dataset-name", "x"], "dataset_name"),
        (["bench", "serve", "--request-rate", "0"], "request_rate"),
        (["bench", "serve", "--backend", "x"], "backend"),
        (["bench", "serve", "--extra-body", "[]"], "extra_body"),
        (["bench", "serve", "--metadata", "x"], "metadata"),
    ],
)
def test_a_bad_value_is_one_line_with_its_field(run: Run, words: list[str], field: str) -> None:
    done = run(*words)
    assert done.code == 2
    assert done.err.startswith(f"headrace: {field}: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "/no/such/model", "--prompt", "a"],
        ["bench", "latency", "--model", "x"],
        ["bench", "throughput", "no/such/model/at/all"],
    ],
)
def test_an_unknown_model_is_one_line(run: Run, words: list[str]) -> None:
    done = run(*words)
    assert done.code == 1
    assert "no such directory" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [["serve", ""], ["serve", " "], ["generate", "", "--prompt", "a"], ["chat", ""], ["bench", "throughput", ""]],
)
def test_an_empty_model_is_an_error_and_not_another_model(run: Run, words: list[str]) -> None:
    done = run(*words)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("headrace: MODEL is empty; name a directory")


@pytest.mark.parametrize("name", ["throughput", "latency"])
def test_a_bench_takes_its_model_and_more_goals_as_words(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plans: list[Any] = []

    def note(plan: Any, config: EngineConfig, goals: dict[str, float]) -> dict[str, Any]:
        plans.append((plan.model, goals))
        return {}

    monkeypatch.setattr(f"headrace.cli.bench.offline.measure_{name}", note)
    for words in (["some/model"], ["--model", "some/model"], ["some/model", "--goodput", "ttft:200", "tpot:5"]):
        assert run("bench", name, *words, "--json").code == 0, words
    goals = {"ttft": 200.0, "tpot": 5.0}
    assert plans == [("some/model", {}), ("some/model", {}), ("some/model", goals)]
    # `bench throughput` compares several.
    for words in [["one", "--model", "two"]] + [["one", "two"]] * (name == "latency"):
        done = run("bench", name, *words)
        assert (done.code, "MODEL is given once" in done.err) == (2, True)


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: str) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("headrace.doctor.examine", broken)
    with pytest.raises(KeyError):
        run("doctor")


def test_serve_hands_over_what_the_flags_say(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("headrace.serve.app.serve", lambda *configs, reach: seen.extend([*configs, reach]))
    words = "serve some/model --max-model-len 32k --no-enable-prefix-caching --port 0 --max-logprobs -1".split()
    words += ["--root-path", "/llm"]
    assert run(*words).code == 0
    assert seen == [
        EngineConfig(model="some/model", max_model_len=32_000, enable_prefix_caching=False, max_logprobs=-1),
        ServerConfig(port=0),
        [],
        True,
        Reach(root_path="/llm"),
    ]


def test_defaults_are_the_structs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("headrace.serve.app.serve", lambda *configs, reach: seen.extend([*configs, reach]))
    assert run("serve").code == 0
    assert (seen[:2], seen[-1]) == ([EngineConfig(), ServerConfig()], Reach())
    assert [len(seen[2]), "writes small stories" in seen[2][0]] == [1, True]


class Plan(msgspec.Struct):
    """A struct with one field of each kind."""

    count: int = 1
    share: float | None = None
    names: list[str] | None = None
    quick: bool = True


def test_a_field_without_a_text_still_has_its_flag() -> None:
    def command(**fields: Any) -> None:
        """Nothing."""

    result = options.options(Plan, share=0.5)(command)
    parameters = inspect.signature(result).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    assert defaults == {"count": 1, "share": 0.5, "names": None, "quick": True}
    assert options.help_of(Plan, msgspec.structs.fields(Plan)[0]) == "", "and the next test would notice"


def test_every_field_has_a_text() -> None:
    for struct in (EngineConfig, ServerConfig):
        assert set(options.HELP[struct]) == set(struct.__struct_fields__)


def test_build_names_the_bound() -> None:
    from headrace.cli.bench.plans import ServePlan

    assert options.build(ServePlan, {"num_prompts": 3, "other": 1}) == ServePlan(num_prompts=3)
    with pytest.raises(RequestError, match="seed: -1 is not allowed; it must be at least 0"):
        options.build(ServePlan, {"seed": -1})


def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.doctor.PROBE_BYTES", 2**20)
    report = json.loads(run("doctor", "--json").out)
    assert report["versions"]["headrace"] == headrace.__version__
    assert report["memory"]["read_probe_bytes"] == 2**20
    assert "problem" not in report["model"]
    assert "torch_ref" in run("doctor").out


def test_generate_json_is_one_object(run: Run, model: str) -> None:
    words = ["generate", model, "--prompt", "Once upon a time", "--max-tokens", "8", "--json"]
    greedy = json.loads(run(*words, "--temperature", "0", "--logprobs", "2").out)
    assert len(greedy["token_ids"]) == len(greedy["logprobs"]) == 8
    for token_id, entry in zip(greedy["token_ids"], greedy["logprobs"], strict=True):
        assert entry["token_id"] == token_id == entry["top_logprobs"][0]["token_id"]
        assert entry["rank"] == 1
        assert len(entry["top_logprobs"]) == 2
    assert greedy["finish_reason"] == "length"
    assert greedy["usage"]["completion_tokens"] == 8
    assert greedy["usage"]["total_tokens"] == greedy["usage"]["prompt_tokens"] + 8
    assert greedy["timings"]["predicted_n"] == 8
    first = json.loads(run(*words).out)
    assert "logprobs" not in first
    again = json.loads(run(*words, "--seed", str(first["seed"])).out)
    assert again["token_ids"] == first["token_ids"], "the seed that was told gives the same answer"


def test_generate_streams_the_same_text(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Once upon a time")
    words = ["--max-tokens", "8", "--temperature", "0"]
    data = json.loads(run("generate", model, "--prompt", "Once upon a time", *words, "--json").out)
    assert run("generate", model, "--prompt-file", str(tmp_path / "prompt.txt"), *words).out == data["text"] + "\n"
    assert run("generate", model, "--prompt-file", "-", *words, stdin="Once upon a time").out == data["text"] + "\n"


def test_generate_stops(run: Run, model: str) -> None:
    words = ["generate", model, "--prompt", "Once upon a time", "--temperature", "0", "--json"]
    text = json.loads(run(*words, "--max-tokens", "24").out)["text"]
    stop = text.split()[3]
    stopped = json.loads(run(*words, "--max-tokens", "24", "--stop", stop).out)
    assert stopped["text"] == text[: text.index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


def test_chat_reads_lines_from_a_pipe(run: Run, model: str) -> None:
    words = ["chat", model, "--max-tokens", "8", "--temperature", "0"]
    once = run(*words, stdin="Hello\n")
    assert once.code == 0
    assert once.out.strip()
    assert run(*words, stdin="Hello\n/reset\n\nHello\n/quit\nnever said\n").out == once.out * 2, "/reset forgets"


def test_bench_latency_json(run: Run, model: str) -> None:
    words = "--input-len 4 --output-len 3 --batch-size 2 --num-iters 2 --num-iters-warmup 1 --json".split()
    done = run("bench", "latency", "--model", model, *words, "--goodput", "ttft:1e9", "tpot:1e9")
    result = json.loads(done.out)
    assert len(result["latencies"]) == 2
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert result["completed"] == 4
    assert result["total_output_tokens"] == 12
    assert result["prefix_cache_hit_tokens"] == 0
    assert result["request_goodput"] == result["request_throughput"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert result[f"median_{name}_ms"] > 0


def test_bench_throughput(run: Run, model: str, tmp_path: Path) -> None:
    words = ["bench", "throughput", "--model", model, "--num-prompts", "3", "--output-len", "3"]
    result = json.loads(run(*words, "--input-len", "5", "--output-json", str(tmp_path / "o.json"), "--json").out)
    assert result == json.loads((tmp_path / "o.json").read_text())
    assert result["num_requests"] == 3
    assert result["total_num_tokens"] == 24
    assert result["tokens_per_second"] == pytest.approx(24 / result["elapsed_time"])
    (tmp_path / "p.jsonl").write_text('{"prompt": "Once upon a time"}\n')
    printed = run(*words, "--dataset-name", "custom", "--dataset-path", str(tmp_path / "p.jsonl")).out
    assert "Total generated tokens:                  9" in printed


def test_help_of_a_sampling_field_tells_its_range() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(SamplingParams)}
    assert options.help_of(SamplingParams, fields["min_p"]).endswith("a finite number from 0 to 1.")
    assert options.help_of(SamplingParams, fields["seed"]).endswith("at least 0.")
