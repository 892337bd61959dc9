"""Print an answer as it is made: `python examples/stream.py [URL]`, after `make run`."""

import sys
import time

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

start = time.perf_counter()
first = None
stream = client.completions.create(
    model=model,
    prompt="Once upon a time",
    max_tokens=64,
    temperature=0.7,
    seed=7,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        first = first or time.perf_counter()
        print(choice.text, end="", flush=True)
    if chunk.usage:
        tokens = chunk.usage.completion_tokens
print(f"\n  -- first text after {1e3 * (first - start):.0f} ms, {tokens} tokens in {time.perf_counter() - start:.2f} s")
