"""`python -m tests.campaigns.mutation`: how many wrong schedulers and block pools the tests of `core` notice.

Cosmic Ray's operators change one place of the scheduler's files at a time; a mutant is killed if the simulation, the
unit tests of `core` or the planted bugs fail with it. Each runs in a process forked for it, which gets the changed
source from memory: no file is touched. Mutants are a seeded sample of all, less those that change nothing by
construction (annotations, what does not compile). Needs Cosmic Ray, whose operators alone are used:

    pip install --no-deps --target build/mutation cosmic-ray==8.7.0 parso==0.8.7 stevedore==5.10.0

The score is killed / (all - equivalent). Those that no test can kill are named in EQUIVALENT, each with its reason.
`--again FILE` runs only the survivors of an earlier run, after tests were added.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build" / "mutation"))

CORE = "src/headrace/core"
FILES = ("scheduler", "batches", "requests", "finish", "blocks", "tables", "prefix", "queue")
TESTS = "tests/core"
# These start another process, which would have the unchanged source. What test_simulation has more is in other stages.
NOT_USED = ("test_simulation.py", "test_S_05_checks_survive")
# State machines of hypothesis, and what makes thousands of requests: for the files that they are about.
SLOW = {
    "blocks": "TestPoolMachine or TestPrefixMachine", "prefix": "TestPrefixMachine",
    "queue": "without_end or shares_are_of_work",
}  # fmt: skip
# Too long for what they add: each waits for a rare event.
LONG = ("beams_without_room_to_run", "beams_do_not_wait_for_one_another", "test_colliding_keys_do_no_harm",
        "test_I_20_a_hidden_source", "preempted_without_end", "the_wrong_path_kept", "allocation_not_rolled_back",
        "beams_left_behind", "before_it_is_full", "seen_by_the_ledger", "salt_left_out")  # fmt: skip
MEMORY = 3 << 30

# (line of the source, the same changed): why nobody can tell.
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "if not length and num_shared % self.block_size:",
        "if not length and num_shared * self.block_size:",
    ): "one whole shared block less needs one block more, and frees one at most: what did not fit does not fit",
    (
        "seq.publish_at = NEVER if source.publish_at == NEVER else (seq.num_published + 1) * pool.block_size",
        "seq.publish_at = NEVER if source.publish_at == NEVER else (seq.num_published + 1) >> pool.block_size",
    ): "publishing is tried a step early, finds no full block, and puts the number right",
}


class Mutant(NamedTuple):
    """One change: the line it stands in, before and after, and the whole source with it."""

    file: str
    line: int
    operator: str
    before: str
    after: str
    source: str

    @property
    def name(self) -> tuple[str, str]:
        return self.before, self.after


def positions(source: str) -> list[tuple[str, int, tuple[int, int]]]:
    """(operator, occurrence, where) of all that can be changed, outside of annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    nodes = list(ast_nodes(get_ast(source)))
    spans = annotations(source)
    result = []
    for name in sorted(provider):
        if name in ("VariableReplacer", "VariableInserter"):
            continue  # These want to be told which variables.
        operator, occurrence = provider[name](), 0
        for node in nodes:
            for begin, _ in operator.mutation_positions(node):
                if not any(first <= begin < last for first, last in spans):
                    result.append((name, occurrence, begin))
                occurrence += 1
    return result


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where they begin and end. They are never evaluated."""
    output: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            output.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            output.append(node.annotation)
    return [
        ((each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0)) for each in output if each
    ]


@cache
def meaning(source: str) -> str:
    return ast.dump(ast.parse(source))


def mutant(file: str, source: str, operator: str, occurrence: int) -> Mutant | None:
    """None if it does not compile, or says the same."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    changed = mutate_code(source, OperatorProvider()[operator](), occurrence)
    try:
        if changed is None or ast.dump(ast.parse(changed)) == meaning(source):
            return None
        compile(changed, file, "exec")
    except SyntaxError:
        return None
    old, new = source.splitlines(), changed.splitlines()
    first = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return Mutant(file, first + 1, operator, old[first].strip(), new[first].strip(), changed)


def places(seed: int) -> list[tuple[str, str, int]]:
    """(file, operator, occurrence) of all that can be changed, in an order that the seed decides."""
    result = [
        (file, name, nth)
        for file in FILES
        for name, nth, _ in positions((ROOT / CORE / f"{file}.py").read_text(encoding="utf-8"))
    ]
    random.Random(seed).shuffle(result)
    return result


class Changed(SourceFileLoader):
    """A module's loader that has another source than its file."""

    source = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec")  # type: ignore[no-any-return]


class Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.name = f"headrace.core.{mutant.file}"
        self.source = mutant.source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        file = str(ROOT / CORE / f"{fullname.rpartition('.')[2]}.py")
        loader = Changed(fullname, file)
        loader.source = self.source
        return spec_from_file_location(fullname, file, loader=loader)


def simulated(first: int, last: int) -> bool:
    """Whether seeds first ... last - 1 of the simulation see nothing wrong."""
    from tests.programs.sim.__main__ import run_seed

    return all(not run_seed(seed, 150).violation for seed in range(first, last))


def tested(*arguments: str) -> bool:
    """Whether pytest is content."""
    import pytest

    # What is imported already is not rewritten, and pytest says so.
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0", "--no-header", "--tb=line",
               "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # fmt: skip
    return pytest.main([*options, *arguments]) == 0


def without(names: tuple[str, ...]) -> str:
    return " and ".join(f"not {name.removesuffix('.py')}" for name in names)


PLANTED = sorted(str(path.relative_to(ROOT)) for path in (ROOT / TESTS).rglob("test_planted_*.py"))
# The quickest first. Each gets the name of the changed file ("" for none).
STAGES: tuple[Callable[[str], bool], ...] = (
    lambda _: simulated(0, 10),
    lambda _: tested(TESTS, "-k", without((*NOT_USED, "planted", "machine", "without_end", "shares_are_of_work"))),
    lambda _: tested(*PLANTED, "-k", without(LONG)),
    lambda file: tested(TESTS, "-k", f"({SLOW[file]}) and not broken") if file in SLOW else True,
    lambda _: simulated(10, 30),
)


def child(mutant: Mutant | None, log: Path, limits: list[float]) -> int:
    """Runs the stages; 0 if all pass, else the number of the one that fails, from 1 on."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # This checkout's package, whichever one is installed.
    sys.path.insert(0, str(ROOT / "src"))
    sys.meta_path.insert(0, PathFinder)
    if mutant is not None:
        sys.meta_path.insert(0, Finder(mutant))
    for number, (stage, limit) in enumerate(zip(STAGES, limits, strict=True), start=1):
        # Processor time, so that a machine that is busy kills nobody.
        signal.setitimer(signal.ITIMER_PROF, limit)
        begin = time.process_time()
        try:
            passed = stage(mutant.file if mutant else "blocks")
        except BaseException as error:
            print(f"stage {number}: {error!r}")
            passed = False
        print(f"stage {number}: {passed}, {time.process_time() - begin:.2f} s", flush=True)
        if not passed:
            return number
    return 0


def outcome(mutant: Mutant | None, log: Path, limits: list[float]) -> str:
    """'survived', 'stage N' that killed it, or 'timeout' (also for one that takes all memory and crashes)."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = child(mutant, log, limits)
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) == signal.SIGPROF else f"signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    return f"stage {code}" if code else "survived"


def interval(hits: int, num: int) -> tuple[float, float]:
    """95 % of a share hits / num (Wilson 1927)."""
    if not num:
        return 0.0, 1.0
    z, share = 1.96, hits / num
    middle = share + z * z / (2 * num)
    spread = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return (middle - spread) / (1 + z * z / num), (middle + spread) / (1 + z * z / num)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and score of what was run."""
    survivors = [each for each in results if each["outcome"] == "survived"]
    equivalent = [each for each in survivors if (each["before"], each["after"]) in EQUIVALENT]
    killed, real = len(results) - len(survivors), len(results) - len(equivalent)
    files = {}
    for file in FILES:
        caught = [each["outcome"] != "survived" for each in results if each["file"] == file]
        files[file] = {"mutants": len(caught), "killed": sum(caught)}
    low, high = interval(killed, real)
    return {
        "mutants": len(results),
        "killed": killed,
        "survived": len(survivors),
        "equivalent": len(equivalent),
        "score": round(killed / max(1, real), 4),
        "score_low": round(low, 4),
        "score_high": round(high, 4),
        "score_with_equivalent": round(killed / max(1, len(results)), 4),
        "outcomes": dict(sorted(Counter(each["outcome"] for each in results).items())),
        "files": files,
        "survivors": [each | {"equivalent": EQUIVALENT.get((each["before"], each["after"]))} for each in survivors],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=0, help="number of mutants (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="then the sample is what was run so far")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "mutation.json")
    parser.add_argument("--again", type=Path, help="the log of an earlier run: its killed mutants stay killed")
    parser.add_argument("--least", type=float, default=0.85, help="the score below which the exit status is 1")
    args = parser.parse_args()
    os.environ["CI"] = "1"  # The examples of hypothesis are the same every time.
    os.chdir(ROOT)
    import hypothesis.stateful  # noqa: F401 (what all children need is imported once; nothing of headrace may be)
    import msgspec  # noqa: F401
    import pytest  # noqa: F401

    warnings.simplefilter("ignore", SyntaxWarning)  # "is" with a number

    samples = places(args.seed)
    if any(name.startswith("headrace") for name in sys.modules):
        raise SystemExit("headrace is imported already: no mutant would be")
    logs = ROOT / "build" / "mutation-logs"
    logs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    output = outcome(None, logs / "none.txt", [600.0] * len(STAGES))
    if output != "survived":
        raise SystemExit(f"the unchanged source fails: {output}, see {logs}/none.txt")
    seconds = [float(line.split()[-2]) for line in (logs / "none.txt").read_text().splitlines() if line[:6] == "stage "]
    limits = [3 * each + 5 for each in seconds]
    print(f"{len(samples)} places; the unchanged source takes {seconds} s", flush=True)
    journal = args.out.with_suffix(".jsonl")
    before = {}
    if args.again:
        lines = [json.loads(line) for line in args.again.read_text().splitlines()]
        before = {(e["file"], e["line"], e["before"], e["after"]): e for e in lines if e["outcome"] != "survived"}
    results: list[dict[str, Any]] = []
    with journal.open("w", encoding="utf-8") as lines_out:
        for file, operator, nth in samples:
            if len(results) == (args.sample or len(samples)) or time.monotonic() - begin > 60 * args.minutes:
                break
            each = mutant(file, (ROOT / CORE / f"{file}.py").read_text(encoding="utf-8"), operator, nth)
            if each is None:
                continue
            result = before.get((each.file, each.line, each.before, each.after))
            if result is None:
                output = outcome(each, logs / f"{len(results)}.txt", limits)
                result = {name: getattr(each, name) for name in ("file", "line", "operator", "before", "after")}
                result["outcome"] = output
            results.append(result)
            lines_out.write(json.dumps(result) + "\n")
            lines_out.flush()
            if result["outcome"] == "survived":
                print(f"{len(results)} {each.file}:{each.line}\n  - {each.before}\n  + {each.after}", flush=True)
    actual = summary(results)
    from bench.record import commit

    from headrace import doctor

    facts = {"commit": commit(), "host": doctor.examine()["cpu"], "seed": args.seed, "places": len(samples)}
    facts["minutes"] = round((time.monotonic() - begin) / 60, 1)
    args.out.write_text(json.dumps(facts | actual, indent=1) + "\n", encoding="utf-8")
    print({name: value for name, value in actual.items() if name != "survivors"})
    return 0 if actual["score"] >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
