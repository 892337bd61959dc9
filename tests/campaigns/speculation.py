"""C-3 for speculation: every drafter, at every temperature, alone and in company, against answers without guesses.

Each of `NUM_PROMPTS` prompts is continued at each temperature, some with filters, penalties, a grammar or
log-probabilities; then again with each drafter, alone and in batches of 16. Token ids and log-probability bits must be
equal.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from tests.support.law import PROMPTS, Bits, groups_of, make_core, run

from headrace import hub
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import METHODS
from headrace.protocol.step import Request
from headrace.text.tokenizer import Tokenizer

NUM_PROMPTS = 200
TEMPERATURES = (0.0, 0.7, 1.2)
MAX_TOKENS = 24
DRAFTERS = [name for name in METHODS if name != "eagle3"]
"""eagle3 is another name of the built-in model's eagle."""
KINDS: list[dict[str, Any]] = [
    {},
    {"top_k": 40},
    {"top_p": 0.9, "logprobs": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.2},
    {"logprobs": 0, "min_p": 0.05},
    {"structured_outputs": StructuredOutputs(regex=r"[A-Za-z ,.']{8,80}"), "ignore_eos": False},
]


def make_requests(num_prompts: int) -> list[Request]:
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    result = []
    for i in range(num_prompts):
        text = PROMPTS[i % len(PROMPTS)]
        # The same stories, gone further: no two prompts are alike.
        text += "".join(f" Then number {k} came." for k in range(i // len(PROMPTS)))
        token_ids = tokenizer.encode(text)
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, seed=9000 + i, max_tokens=MAX_TOKENS, ignore_eos=True)
            kind = KINDS[i % len(KINDS)]
            if temperature == 0.0:
                kind = {name: value for name, value in kind.items() if name not in ("top_k", "top_p", "min_p")}
            params = msgspec.structs.replace(params, **kind)
            result.append(Request(request_id=f"{i}@{temperature}", prompt_token_ids=token_ids, params=params))
    return result


def run_campaign(num_prompts: int = NUM_PROMPTS) -> dict[str, Any]:
    """What was compared, by drafter, and how many answers differ."""
    begin = time.monotonic()
    requests = make_requests(num_prompts)
    core = make_core(model="builtin", enable_prefix_caching=False)
    reference: dict[str, Bits] = {}
    for request in requests:
        reference |= run(core, [request])
    core.close()
    drafters: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    for method in DRAFTERS:
        core = make_core(model="builtin", max_num_seqs=16, speculative_config={"method": method, "adaptive": False})
        result: dict[str, Bits] = {}
        num = 0
        for size in (1, 16):
            for group in groups_of(requests, size):
                result = run(core, group)
                num += len(result)
                wrong += [f"{method}, {size} together: {name}" for name in result if result[name] != reference[name]]
        stats = core.stats()
        core.close()
        drafters[method] = {
            "generations": num,
            "drafts": stats.num_drafts,
            "guesses": stats.num_draft_tokens,
            "kept": stats.num_accepted_tokens,
            "tokens_a_pass": round(1 + stats.num_accepted_tokens / max(1, stats.num_drafts), 3),
        }
    return {
        "campaign": "C-3 speculation",
        "prompts": num_prompts,
        "temperatures": list(TEMPERATURES),
        "generations": int(sum(each["generations"] for each in drafters.values())),
        "drafters": drafters,
        "differing": len(wrong),
        "examples": wrong[:5],
        "minutes": round((time.monotonic() - begin) / 60, 2),
    }
