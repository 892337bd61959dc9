"""`python -m tests.campaigns.zoo`: small random checkpoints of every causal type of transformers, beside transformers.

Of each type that headrace runs: its small config, each switch, number, shape, rope and window of its config class
changed alone, and its checkpoint with four kinds of tokenizer and three kinds of weight files. transformers (float32,
eager) continues a text greedily, and `LLM` continues the folder that it saved. A case is right (equal ids, or another
one where the best two logits are within `TIE`), wrong, refused (a `HeadraceError`), or unmade (transformers itself
fails). Types that headrace does not run must be refused by name.

A type is one process with a limit on its memory. Counts go to bench/results/zoo.json, and the cases that are wrong are
kept under build/zoo. The exit status is 1 if a case is wrong, or ends in anything but a `HeadraceError`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from bench.record import commit
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tests.support.harness import SAME_AS, save_random
from tokenizers import AddedToken, decoders, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Plain
from tokenizers.models import BPE
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as their_logging

from headrace import LLM, SamplingParams, models
from headrace.protocol.errors import HeadraceError

ROOT = Path(__file__).resolve().parents[2]
RESULT, KEPT = ROOT / "bench" / "results" / "zoo.json", ROOT / "build" / "zoo"
MAX_BYTES = 9 * 2**30
TIMEOUT_S = 1800
NUM_TOKENS = 4
TIE = 1e-3
"""Two logits as close as that may change places by rounding: their spread is about 1."""
VOCAB = 400
NUM_PIECES = 340
TEXT = "The mill stands by the river; its wheel turns 12 times a minute. <|im_start|>user\nWhy?<|im_end|>"
CORPUS = [
    TEXT,
    "a an and the of in to it is was for on with as by that this",
    "Grüße, où? 0123456789",
    "def f(x): return x + 1",
]
MARKS = ("<|im_start|>", "<|im_end|>")

PASSED_OVER = frozenset(
    "vocab_size pad_token_id bos_token_id eos_token_id output_router_logits use_cache initializer_range pretraining_tp "
    "return_dict output_hidden_states torchscript dtype output_attentions chunk_size_feed_forward is_encoder_decoder "
    "architectures id2label label2id problem_type transformers_version model_type text_config tokenizer_class "
    "image_token_id video_token_id audio_token_id vision_config audio_config".split()
)
"""Fields of configs that do not change a model, or that make another kind of model."""
VALUES: dict[str, tuple[Any, ...]] = {
    "rope_parameters": (
        {"rope_theta": 777.0, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
    ),
    "hidden_act": ("gelu", "relu"),
    "hidden_activation": ("gelu", "silu"),
    "num_key_value_heads": (1,),
    "head_dim": (24,),
    "num_attention_heads": (2,),
    "intermediate_size": (100,),
    "num_hidden_layers": (1, 2),
    "sliding_window": (None, 7),
    "n_group": (1,),
    "topk_group": (1,),
    "num_experts_per_tok": (1, 3),
    "n_shared_experts": (2,),
    "first_k_dense_replace": (0,),
    "mlp_only_layers": ([1],),
    "decoder_sparse_step": (2,),
    "layer_types": (None,),
    "max_window_layers": (0, 1),
}
"""Values of fields that are no switches and no floats."""
TOKENIZERS = ("tokenizer.json", "vocab.json and merges.txt", "tokenizer.model", "added_tokens.json")
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "unk_token": "<unk>", "add_bos_token": True}
"""With the key that real folders have: without it transformers 5 adds no begin, against its own documentation."""
WEIGHTS = ("float32", "shards", "bfloat16")


class Case(NamedTuple):
    """A checkpoint: changes of the type's small config, and the forms of its files."""

    name: str
    changes: dict[str, Any]
    tokenizer: str = TOKENIZERS[0]
    weights: str = WEIGHTS[0]


class Outcome(NamedTuple):
    """kind: right, wrong, refused, unmade or failed (any other exception). why: a reason, where there is one."""

    name: str
    kind: str
    why: str = ""


def cases(model_type: str) -> Iterator[Case]:
    """The cases of a type that headrace runs."""
    for tokenizer in TOKENIZERS:
        for weights in WEIGHTS:
            yield Case(f"{tokenizer}, {weights}", {}, tokenizer, weights)
    whole = CONFIG_MAPPING[SAME_AS.get(model_type, model_type)]
    kind = whole.sub_configs.get("text_config", whole)
    tiny = models.find(model_type).TINY
    sizes = tiny.get("text_config", tiny)
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.name):
        if field.name in PASSED_OVER:
            continue
        value = sizes.get(field.name, field.default)
        values = VALUES.get(field.name, ())
        if isinstance(value, bool):
            values = (not value,)
        elif isinstance(value, float) and not values:
            values = (value * 0.5 + 0.13,)
        for other in values:
            if other != value:
                yield Case(f"{field.name}={other!r:.60}", {field.name: other})


def run(model_type: str, case: Case, directory: Path, damage: bool = False) -> Outcome:
    """Make a checkpoint and compare. damage: change a weight after transformers' answer, as a control."""
    try:
        prompt, expected, gaps = _made(model_type, case, directory)
    except Exception as error:
        return Outcome(case.name, "unmade", f"{type(error).__name__}: {error!s:.100}")
    if damage:
        _damage(directory)
    try:
        token_ids, answer = _continued(directory)
    except HeadraceError as error:
        return Outcome(case.name, "refused", str(error)[:200])
    except Exception as error:
        return Outcome(case.name, "failed", f"{type(error).__name__}: {error!s:.200}")
    if token_ids != prompt:
        place = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, prompt, strict=False))
        )
        ours, others = token_ids[place : place + 8], prompt[place : place + 8]
        return Outcome(case.name, "wrong", f"the prompt has {ours} from token {place} on, transformers {others}")
    place = next((i for i, pair in enumerate(zip(expected, answer, strict=True)) if pair[0] != pair[1]), None)
    if place is None:
        return Outcome(case.name, "right")
    if gaps[place] < TIE:
        return Outcome(case.name, "right", "a tie")
    return Outcome(case.name, "wrong", f"token {place}: {answer}, transformers has {expected}, {gaps[place]:.2g} ahead")


def _made(model_type: str, case: Case, directory: Path) -> tuple[list[int], list[int], list[float]]:
    """Save a checkpoint; return the ids of the text, the ids after it, and by how much each was ahead."""
    tiny = copy.deepcopy(models.find(model_type).TINY)
    sizes = tiny.get("text_config", tiny)
    sizes |= {"vocab_size": VOCAB} | case.changes
    theirs = save_random(tiny, directory, seed=len(case.name))
    if case.weights == "shards":
        shutil.rmtree(directory)
        theirs.save_pretrained(directory, max_shard_size="40KB")
    elif case.weights == "bfloat16":
        shutil.rmtree(directory)
        theirs.to(torch.bfloat16).save_pretrained(directory)
        # Read again: a model that was cast keeps rounded frequencies of its positions too.
        theirs = type(theirs).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
    _save_tokenizer(directory, case.tokenizer)
    # By the class that the folder names: AutoTokenizer prefers the class of the type, whose folders never look so.
    kind = getattr(transformers, json.loads((directory / "tokenizer_config.json").read_text())["tokenizer_class"])
    prompt = kind.from_pretrained(directory)(TEXT)["input_ids"]
    token_ids, answer, gaps = list(prompt), [], []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = theirs(torch.tensor([token_ids]), use_cache=False).logits[0, -1].float()
            if not torch.isfinite(logits).all():
                raise ValueError("logits that are not finite")
            best = logits.topk(2).values
            answer.append(int(logits.argmax()))
            gaps.append(float(best[0] - best[1]))
            token_ids.append(answer[-1])
    return prompt, answer, gaps


def _save_tokenizer(directory: Path, form: str) -> None:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if form == "tokenizer.model":
        _save_pieces(directory)
        config = LLAMA | {"eos_token": "</s>"}
    elif form == "added_tokens.json":
        _save_pieces(directory)
        (directory / "added_tokens.json").write_text(json.dumps({mark: NUM_PIECES + i for i, mark in enumerate(MARKS)}))
        config = LLAMA | {"eos_token": MARKS[1]}
    else:
        plain = _byte_level()
        if form == "tokenizer.json":
            plain.save(str(directory / "tokenizer.json"))
        else:
            plain.model.save(str(directory))
            ids = {str(plain.token_to_id(mark)): {"content": mark, "special": True} for mark in MARKS}
            config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": ids, "eos_token": MARKS[1]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_level() -> Plain:
    plain = Plain(BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    plain.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return plain


def _save_pieces(directory: Path) -> None:
    import sentencepiece

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_text("\n".join(CORPUS * 4))
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(Path(folder) / "m"), vocab_size=NUM_PIECES, model_type="bpe",
            byte_fallback=True, hard_vocab_limit=True, minloglevel=2, character_coverage=1.0,
            normalization_rule_name="identity", remove_extra_whitespaces=False,
        )  # fmt: skip
        shutil.copy(Path(folder) / "m.model", directory / "tokenizer.model")


def _continued(directory: Path) -> tuple[list[int], list[int]]:
    """The ids of the text and the ids after it, of headrace."""
    llm = LLM(str(directory), dtype="float32", num_gpu_blocks_override=64, num_threads=1)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([TEXT], params, use_tqdm=False)
        return list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    finally:
        llm.close()


def _damage(directory: Path) -> None:
    """Turn over a bit of the exponent of each weight of a matrix of the file."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = max(
        (name for name in tensors if "layers" in name and tensors[name].dim() == 2), key=lambda n: tensors[n].numel()
    )
    save_file(tensors | {name: -tensors[name]}, path, {"format": "pt"})


def refused(model_type: str, directory: Path) -> Outcome:
    """A type that headrace does not run: its config alone must be refused with its name."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": VOCAB}))
    try:
        LLM(str(directory), skip_tokenizer_init=True, model_impl="headrace")
    except HeadraceError as error:
        kind = "refused" if f"model_type '{model_type}' is not supported" in str(error) else "wrong"
        return Outcome("config.json alone", kind, str(error)[:200])
    except Exception as error:
        return Outcome("config.json alone", "failed", f"{type(error).__name__}: {error!s:.200}")
    return Outcome("config.json alone", "wrong", "it was loaded")


def types() -> list[str]:
    """All causal types of the installed transformers, and those of headrace that it has under other names."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *models.names()})


def child(model_type: str, only: str) -> None:
    """Run the cases of a type whose names `only` matches, and print a line of JSON for each."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    torch.set_num_threads(1)
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        if model_type not in models.names():
            print(json.dumps(refused(model_type, Path(folder) / "t")), flush=True)
            return
        for number, case in enumerate(cases(model_type)):
            if re.search(only, case.name) is None:
                continue
            directory = Path(folder) / str(number)
            outcome = run(model_type, case, directory)
            print(json.dumps(outcome), flush=True)
            if outcome.kind in ("wrong", "failed"):
                place = KEPT / model_type / str(number)
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(directory, place)
            shutil.rmtree(directory, ignore_errors=True)


def outcomes_of(model_type: str, only: str) -> list[Outcome]:
    """The outcomes of a type, from a process of its own. One that ends early is an outcome too."""
    command = [sys.executable, "-m", "tests.campaigns.zoo", "--child", model_type, "--only", only]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=TIMEOUT_S)
        text, why = done.stdout, "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired as error:
        text, why = (error.stdout or b"").decode(), f"no end after {TIMEOUT_S} s"
    outcomes = [Outcome(*json.loads(line)) for line in text.splitlines() if line.startswith("[")]
    return outcomes if not why else [*outcomes, Outcome("the process", "failed", why)]


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("types", nargs="*", metavar="TYPE", help="default: all")
    options.add_argument("--only", default="", metavar="PATTERN", help="cases whose names it matches")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="types at a time (default: %(default)s)")
    options.add_argument("--child", help=argparse.SUPPRESS)
    chosen = options.parse_args(arguments)
    if chosen.child:
        child(chosen.child, chosen.only)
        return 0
    start, console = time.monotonic(), Console(stderr=True)
    names = chosen.types or types()
    results: dict[str, list[Outcome]] = {}
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    with ThreadPoolExecutor(chosen.jobs) as pool, Progress(*columns, console=console) as progress:
        task = progress.add_task("types", total=len(names))
        futures = {name: pool.submit(outcomes_of, name, chosen.only) for name in names}
        for name, future in futures.items():
            results[name] = future.result()
            bad = [each for each in results[name] if each.kind in ("wrong", "failed")]
            for each in bad:
                progress.console.print(f"[red]{each.kind}[/] {name}, {each.name}: {each.why}", highlight=False)
            progress.advance(task)
    report = summary(results)
    show(report)
    report |= {"commit": commit(), "seconds": round(time.monotonic() - start)}
    if not chosen.types and not chosen.only:
        RESULT.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["counts"].get("wrong") or report["counts"].get("failed") else 0


def summary(results: dict[str, list[Outcome]]) -> dict[str, Any]:
    """Counts of all outcomes, of the reasons of refusals (numbers and quoted texts left out), and the bad cases."""
    every = [(name, outcome) for name, outcomes in results.items() for outcome in outcomes]
    served = [(name, outcome) for name, outcome in every if name in models.names()]
    reasons = Counter(
        re.sub(r"'[^']*'|\d+(\.\d+)?", "…", each.why)[:90] for _, each in served if each.kind == "refused"
    )
    return {
        "types": {"run": len({name for name, _ in served}), "refused by name": len(every) - len(served)},
        "counts": dict(Counter(outcome.kind for _, outcome in served)),
        "refused": dict(reasons.most_common()),
        "bad": [[name, *each] for name, each in every if each.kind in ("wrong", "failed")],
    }


def show(report: dict[str, Any]) -> None:
    table = Table(
        "outcome",
        "cases",
        title=f"{report['types']['run']} types, {report['types']['refused by name']} refused by name",
    )
    for kind, number in sorted(report["counts"].items()):
        table.add_row(kind, str(number))
    for reason, number in report["refused"].items():
        table.add_row(f"  {reason}", str(number))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
