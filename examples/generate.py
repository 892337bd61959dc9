"""Complete a few prompts without a server: `python examples/generate.py [MODEL]`."""

import sys

from headrace import LLM, SamplingParams

prompts = ["Once upon a time", "The ship left the harbour at dawn, and"]
llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "builtin")

for output in llm.generate(prompts, SamplingParams(temperature=0.8, seed=7, max_tokens=48)):
    answer = output.outputs[0]
    print(f"{output.prompt}|{answer.text}")
    print(f"  -- {len(answer.token_ids)} tokens, {answer.finish_reason}, seed {answer.seed}\n")
