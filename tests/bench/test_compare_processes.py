"""The processes of `bench.compare`: what a worker does when asked, how it is watched, and what is made for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench.compare import __main__ as command
from bench.compare import conductor, figures, plan, serve, workers
from bench.compare.environments import OURS, PEERS, ROOT, SetupError, Workshop, last_words
from bench.compare.shapes import SHAPES, Shape, write_checkpoint
from bench.peers import headrace_, llama_cpp_, protocol
from bench.peers.protocol import Job, Works

TINY = Shape("tiny", "nothing", "Qwen3ForCausalLM", "qwen3", 2, 32, 4, 2, 16, 48, 320, 1e4, 1e-6, 64, True)


class Counting:
    """An engine whose time is a clock that it turns itself: 10 a prompt token, 100 a step."""

    weight_bytes: int | None = None
    instructions = "none"

    def __init__(self, clock: list[float], lost: int = 0) -> None:
        self.clock, self.lost = clock, lost
        self.calls: list[tuple[int, int, int]] = []
        self.prompts: list[list[int]] = []

    def prepare(self, num_seqs: int, length: int) -> None: ...

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        self.calls.append((len(prompts), len(prompts[0]), num_new))
        self.prompts += prompts
        self.clock[0] += 10 * sum(map(len, prompts)) + 100 * num_new
        return len(prompts) * num_new - self.lost


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: now[0])
    return now


def test_works_time_what_they_say(clock: list[float]) -> None:
    engine = Counting(clock)
    works = Works(engine, 1000, seed=1)
    assert works.run("decode")["value"] == pytest.approx(1 / 100), "prompts are taken off by the difference"
    assert works.run("prefill512")["value"] == pytest.approx(512 / (5120 + 100))
    assert works.run("batch8")["value"] == pytest.approx(8 * 128 / (8 * 1280 + 12800))
    assert works.run("step8")["value"] == pytest.approx(1.0)
    prefix = works.run("prefix")
    assert prefix["value"] == 1.0
    assert engine.prompts[-1][:2048] == engine.prompts[-2][:2048]
    assert engine.prompts[-1][2048:] != engine.prompts[-2][2048:]
    assert engine.calls[:3] == [(1, 128, 128), (1, 128, 1), (1, 512, 1)]
    assert len({tuple(prompt) for prompt in engine.prompts}) == len(engine.prompts)
    with pytest.raises(ValueError, match="nothing"):
        works.run("nothing")


def test_warm_ups_are_short(clock: list[float]) -> None:
    engine = Counting(clock)
    works = Works(engine, 1000)
    for work in ("decode", "prefill2048", "batch32", "step8", "prefix"):
        works.run(work, warm=True)
    assert max(num_new for _, _, num_new in engine.calls) <= 8
    assert max(num_seqs * length for num_seqs, length, _ in engine.calls) <= 8 * 128


def test_tokens_that_are_missing_are_an_error(clock: list[float]) -> None:
    works = Works(Counting(clock, lost=1), 1000)
    assert "tokens came of" in protocol.answer(works, {"work": "decode"}, 0)["error"]


SCRIPT = """
import json, os, sys
print(json.dumps({"load_s": 0.1, "weight_bytes": 7, "versions": {}}), flush=True)
for line in sys.stdin:
    work = json.loads(line)["work"]
    if work == "die":
        print("RuntimeError: it broke", file=sys.stderr, flush=True)
        os._exit(3)
    if work == "sleep":
        sys.stdin.readline()
    print(json.dumps({"value": 1.5, "work": work}), flush=True)
"""


def worker(tmp_path: Path) -> workers.Worker:
    return workers.Worker([sys.executable, "-c", SCRIPT], {}, tmp_path / "log", 30.0)


def test_a_worker_answers_and_is_stopped_between_turns(tmp_path: Path) -> None:
    one = worker(tmp_path)
    assert one.ready["weight_bytes"] == 7
    for _ in range(2):
        assert one.ask(30.0, work="decode") == {"value": 1.5, "work": "decode"}
        wait_for(lambda: psutil.Process(one.process.pid).status() == psutil.STATUS_STOPPED)
    one.close()
    assert one.process.returncode is not None


def wait_for(true: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_worker_that_dies_tells_its_last_words(tmp_path: Path) -> None:
    one = worker(tmp_path)
    with pytest.raises(workers.WorkerError, match="status 3: RuntimeError: it broke"):
        one.ask(30.0, work="die")
    with pytest.raises(workers.WorkerError):
        one.ask(30.0, work="decode")


ORPHAN = """
import subprocess, sys
code = "import os; from bench.tied import end_with_parent; end_with_parent(os.getppid()); print(1, flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
child.send_signal(19)
print(child.pid, flush=True)
input()
"""


def test_a_stopped_worker_goes_with_whoever_started_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for(lambda: child.status() == psutil.STATUS_STOPPED)
    parent.kill()
    parent.communicate()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    one = worker(tmp_path)
    with pytest.raises(workers.WorkerError, match="no answer within"):
        one.ask(0.2, work="sleep")
    assert one.process.poll() is not None


def busy_for(seconds: float) -> types.SimpleNamespace:
    """The times of a machine's cores."""
    return types.SimpleNamespace(user=seconds, nice=0.0, system=0.0, irq=0.0, softirq=0.0, steal=0.0)


def test_foreign_time_is_that_of_nobody_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    times, busy, own_times = iter([0.0, 4.0]), iter([10.0, 13.0]), iter([3.0, 4.0])
    monkeypatch.setattr(workers.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(workers.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(workers.psutil, "cpu_times", lambda: busy_for(next(busy)))
    monkeypatch.setattr(workers.os, "times", lambda: os.times_result((next(own_times), 0, 0, 0, 0)))
    assert workers.Watch().share() == pytest.approx((3 - 1) / (2 * 4))


def test_own_time_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own clock: a busy loop of ours, on a machine that does nothing else, does not look like somebody else's."""
    monkeypatch.setattr(workers.psutil, "cpu_times", lambda: busy_for(sum(os.times()[:4])))
    watch = workers.Watch()
    sum(i * i for i in range(3_000_000))
    assert watch.share() < 0.1


def test_a_journal_is_read_again_without_its_torn_end(tmp_path: Path) -> None:
    journal = conductor.Journal(tmp_path / "j.jsonl")
    mine = {"shape": "l1b", "work": "decode", "peer": OURS, "quant": "int4", "round": 0, "value": 1.0, "foreign": 0.0}
    journal.add(mine)
    journal.add({**mine, "peer": "vllm", "foreign": 0.5})
    journal.add({"shape": "l1b", "work": "batch8", "peer": "vllm", "quant": "w8a8", "round": 1, "error": "no"})
    with journal.path.open("a") as file:
        file.write('{"shape": "l1b", "wo')
    again = conductor.Journal(journal.path)
    assert len(again.samples) == 3
    assert again.done() == {(0, "l1b", "decode", OURS, "int4"), (1, "l1b", "batch8", "vllm", "w8a8")}


# -- disturbed samples -------------------------------------------------------------------------------------------


class FakeMachine:
    """Clock, workers and other processes of a machine: each measurement takes `seconds`, `noise` says what others do.

    noise: the shares of the CPU that others take during the samples of a peer, in order; 0 after the last.
    paces: the pace of each sample of a peer, in order; 100 after the last.
    """

    def __init__(
        self, noise: dict[str, list[float]], seconds: float = 30.0, paces: dict[str, list[float]] | None = None
    ) -> None:
        self.now, self.pace = 0.0, 100.0
        self.paces = {peer: list(each) for peer, each in (paces or {}).items()}
        self.noise, self.seconds = {peer: list(shares) for peer, shares in noise.items()}, seconds
        self.share = 0.0

    # The faces of `Worker`, `Conditions` and `Workshop` that the conductor uses.

    def worker(self, command: Sequence[str], environment: Any, log: Any, seconds: float) -> Any:
        return FakeWorker(self, command[0])

    def conditions(self, pid: int | None = None) -> Any:
        return types.SimpleNamespace(facts=lambda: {"foreign": self.share, "pace": self.pace})

    def workshop(self) -> Any:
        return types.SimpleNamespace(
            environment=lambda peer: {},
            job=lambda *words: {},
            command=lambda peer, job: [peer.name],
            log=lambda *words: None,
        )


class FakeWorker:
    def __init__(self, machine: FakeMachine, peer: str) -> None:
        self.machine, self.peer = machine, peer
        self.ready: dict[str, Any] = {"load_s": 1.0}
        self.warm: set[str] = set()
        self.process = types.SimpleNamespace(pid=1, poll=lambda: None)

    def ask(self, seconds: float, **words: Any) -> dict[str, Any]:
        if words.get("warm"):
            return {}
        shares = self.machine.noise.get(self.peer, [])
        paces = self.machine.paces.get(self.peer, [])
        self.machine.share = shares.pop(0) if shares else 0.0
        self.machine.pace = paces.pop(0) if paces else 100.0
        self.machine.now += self.machine.seconds
        return {"value": 100.0 * (1 - self.machine.share), "peak_rss_mib": 1.0}

    def close(self) -> None: ...


def conducted(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float | None = None
) -> list[dict[str, Any]]:
    """The samples of two rounds of decode with a peer and with us."""
    monkeypatch.setattr(conductor, "Worker", machine.worker)
    monkeypatch.setattr(conductor, "Conditions", machine.conditions)
    monkeypatch.setattr(conductor, "wait_until_quiet", lambda seconds: True)
    monkeypatch.setattr(conductor.limits, "probe", lambda environment, seconds: {"bandwidth": 24.0, "int8": 1.2})
    monkeypatch.setattr(conductor.time, "monotonic", lambda: machine.now)
    journal = conductor.Journal(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl")
    one = conductor.Conductor(
        machine.workshop(), journal, lambda line: None,
        measure_seconds=600.0, num_tries=3, quiet_seconds=0.0, budget_seconds=budget,
    )  # fmt: skip
    who = {("l1b", "decode"): (plan.Contender("onnxruntime-genai", "int4"), plan.OURS4)}
    one.run(plan.turns(who, lambda work: 2, shapes_apart=True))
    return [sample for sample in journal.samples if sample["work"] == "decode"]


@pytest.mark.parametrize("peer", ["onnxruntime-genai", OURS])
def test_a_disturbed_sample_is_measured_again_whoever_it_is(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = conducted(FakeMachine({peer: [0.5, 0.05]}), tmp_path, monkeypatch)
    assert [s["foreign"] for s in samples if s["peer"] == peer] == [0.5, 0.05, 0.0, 0.0]
    both = figures.figures(samples, "l1b", "decode")
    assert [(figure.value, figure.count) for figure in both] == [(100.0, 2), (100.0, 2)]
    for sample in samples:  # the control: had nobody looked at the disturbance, this median would be another
        sample["foreign"] = 0.0
    assert {figure.value for figure in figures.figures(samples, "l1b", "decode")} == {100.0, 97.5}


@pytest.mark.parametrize("peer", ["onnxruntime-genai", OURS])
def test_a_sample_beside_a_neighbour_on_the_same_cores_is_measured_again(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no CPU time that a virtual machine shows, only the pace. The first samples come before the best pace is
    known, so they are judged once more at the end."""
    paces = {each: [100.0] for each in ("onnxruntime-genai", OURS)} | {peer: [60.0, 84.0, 86.0, 100.0]}
    samples = conducted(FakeMachine({}, paces=paces), tmp_path, monkeypatch)
    [figure] = [each for each in figures.figures(samples, "l1b", "decode") if each.contender.peer == peer]
    mine = [s["pace"] for s in samples if s["peer"] == peer]
    assert figure.count == sum(pace >= 85.0 for pace in mine) < len(mine)
    [tally] = [each for each in figures.tallies(samples, "l1b") if each.contender.peer == peer]
    assert tally.num_disturbed == len(mine) - figure.count
    for sample in samples:  # the control: without a pace nothing shows it
        del sample["pace"]
    assert not any(each.num_disturbed for each in figures.tallies(samples, "l1b"))


def test_the_pace_and_the_share_of_others_are_facts_of_a_sample() -> None:
    facts = workers.Conditions().facts()
    assert facts.keys() == {"foreign", "pace"}
    assert facts["pace"] > 0
    assert facts["foreign"] >= 0


def test_a_slow_peer_is_repeated_as_often_as_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the budget a measurement takes, as long as there is time for another."""
    samples = conducted(FakeMachine({"onnxruntime-genai": [0.5, 0.5]}, 100.0), tmp_path, monkeypatch, budget=1000.0)
    assert [s["foreign"] for s in samples if s["peer"] == "onnxruntime-genai"] == [0.5, 0.5, 0.0, 0.0]
    samples = conducted(FakeMachine({"onnxruntime-genai": [0.5, 0.5]}, 100.0), tmp_path, monkeypatch, budget=150.0)
    mine = [s for s in samples if s["peer"] == "onnxruntime-genai"]
    assert [s["foreign"] for s in mine] == [0.5], "no time is left for a second one"
    assert not figures.figures(mine, "l1b", "decode")


@pytest.mark.parametrize("peer", ["onnxruntime-genai", OURS])
def test_who_was_disturbed_each_time_has_no_figure(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = conducted(FakeMachine({peer: [0.5] * 6}), tmp_path, monkeypatch)
    assert [figure.contender.peer == peer for figure in figures.figures(samples, "l1b", "decode")] == [False]
    [tally] = [tally for tally in figures.tallies(samples, "l1b") if tally.contender.peer == peer]
    assert (tally.num_samples, tally.num_disturbed, tally.only_disturbed) == (6, 6, True)


def test_a_peer_is_measured_on_unless_it_is_far_behind_peers_of_as_many_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"shape": "l1b", "work": "decode", "round": 0, "foreign": 0.0, "value": 30.0}
    journal = conductor.Journal(tmp_path / "j.jsonl")
    one = conductor.Conductor(
        FakeMachine({}).workshop(), journal, lambda line: None,
        measure_seconds=600.0, num_tries=3, quiet_seconds=0.0, budget_seconds=None,
    )  # fmt: skip
    turn = plan.Turn(1, "l1b", "decode", plan.CTRANSLATE8)
    one._durations[turn.shape, turn.work, turn.contender] = 60.0
    journal.add({**entry, "peer": "ctranslate2", "quant": "int8", "value": 8.0})
    journal.add({**entry, "peer": "onnxruntime-genai", "quant": "int4"})
    assert one._why_not(turn) == "", "four bits are faster than eight"
    journal.add({**entry, "peer": "openvino-genai", "quant": "int8"})
    assert "far from the best" in one._why_not(turn)


# -- what is made ------------------------------------------------------------------------------------------------


def test_commands_of_peers_run_in_their_environments(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, lambda line: None)
    write_checkpoint(TINY, tmp_path / "models" / "tiny-hf")
    peer = PEERS["openvino-genai"]
    job = shop.job(peer, TINY, "int4", "work")
    line = shop.command(peer, job)
    assert line[:3] == [
        str(tmp_path / "venvs" / "openvino-genai" / "bin" / "python"),
        "-m",
        "bench.peers.openvino_genai_",
    ]
    assert Job(**json.loads(line[3])).model.endswith("tiny-openvino_genai-int4")
    assert shop.environment(peer)["OMP_NUM_THREADS"] == "2"
    ours = shop.job(PEERS[OURS], TINY, "int4", "work")
    assert "tokenizer" not in ours["source"]
    assert shop.command(PEERS[OURS], ours)[2] == "bench.peers.headrace_"


def test_torch_comes_first_and_is_always_the_same() -> None:
    for peer in PEERS.values():
        pins = [word for words in peer.installs for word in words]
        if any(name in " ".join(pins) for name in ("transformers", "vllm", "optimum")):
            assert peer.installs[0] == ("torch==2.13.0",)


def test_a_failed_install_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Workshop(tmp_path, lambda line: None)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ValueError: because\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(shop, "python", lambda peer: python)
    (tmp_path / "venvs" / "vllm").mkdir(parents=True)
    log = shop.log(PEERS["vllm"], "install")
    with pytest.raises(SetupError, match="status 1: ValueError: because"):
        shop.install(PEERS["vllm"])
    assert last_words(log) == "ValueError: because"


def test_gguf_names() -> None:
    names = [llama_cpp_.gguf_name(name) for name, _ in SHAPES["q06"].tensors()]
    assert len(set(names)) == len(names)
    assert names[0] == "token_embd.weight"
    assert "blk.27.attn_q_norm.weight" in names
    with pytest.raises(KeyError):
        llama_cpp_.gguf_name("model.layers.0.mlp.experts.weight")


def test_stored_bits_are_read_as_they_lie(tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path)
    result = dict(llama_cpp_.stored(tmp_path / "model.safetensors"))
    assert {name: bits.shape for name, bits in result.items()} == dict(TINY.tensors())
    assert (result["model.norm.weight"] == 0x3F80).all()


def test_the_server_is_asked_for_the_same_engine(tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path)
    job = Job("work", "tiny", TINY.vocab, str(tmp_path), "MODEL", "int4", 2)
    line = serve.arguments(job, Path("TOK"), 7)
    assert line[3:9] == ["serve", "MODEL", "--tokenizer", "TOK", "--port", "7"]
    assert "--no-enable-prefix-caching" in line
    assert line[line.index("--quantization") + 1] == "int4"
    assert line[line.index("--kv-cache-memory-bytes") + 1] == str(headrace_.cache_bytes(job))
    assert not any("skip-tokenizer" in word for word in line)


def test_names_on_the_command_line_are_checked() -> None:
    assert command.names("", ["a", "b"], "--x") == ["a", "b"]
    assert command.names("b, a", ["a", "b"], "--x") == ["b", "a"]
    with pytest.raises(SystemExit, match="'c' is none of a, b"):
        command.names("a,c", ["a", "b"], "--x")
