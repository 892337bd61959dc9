"""Talk to a running server with OpenAI's client: `python examples/chat.py [URL]`, after `make run`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

messages = []
for question in ["Tell me a story about a dog.", "And what did the dog do then?"]:
    messages.append({"role": "user", "content": question})
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0.7, seed=7)
    answer = reply.choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}\n")
    # The second question finds the first one's tokens in the prefix cache.
    print(f"  -- {reply.usage.prompt_tokens} prompt tokens, {reply.usage.prompt_tokens_details.cached_tokens} cached\n")
