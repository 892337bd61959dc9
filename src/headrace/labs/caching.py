"""Labs of the KV cache: generation with and without it, times by prompt length, blocks, and shared prefixes."""

from __future__ import annotations

from headrace.labs.base import Lab
from headrace.labs.engine import Bench, opened
from headrace.plan import planner
from headrace.protocol.errors import HeadraceError


def _uncached(bench: Bench, prompt: list[int], num_new: int) -> tuple[list[int], float]:
    """Return an answer computed without a cache, each token from the prompt and all tokens before it, and its
    seconds."""
    known, seconds = list(prompt), 0.0
    for _ in range(num_new):
        [answer] = bench.run([known], [1])
        known, seconds = known + answer.token_ids, seconds + answer.latency
    return known[len(prompt) :], seconds


def cache(model: str, small: bool) -> Lab:
    """Cached against uncached generation, by the length of the answer."""
    num_prompt, lengths = (8, (4, 8, 16)) if small else (32, (16, 32, 64, 128, 256))
    rows: list[list[str | int | float]] = []
    with opened(model) as bench:
        bench.run([bench.prompt(num_prompt, 0)], [2])
        for length in lengths:
            prompt, before = bench.prompt(num_prompt, length), bench.meter.num_rows
            seen = bench.meter.num_seen
            [answer] = bench.run([prompt], [length])
            with_cache, looked = bench.meter.num_rows - before, bench.meter.num_seen - seen
            before = bench.meter.num_rows
            tokens, seconds = _uncached(bench, prompt, length)
            if tokens != answer.token_ids:
                raise HeadraceError(f"{length} tokens differ without the cache: the engine breaks its law")
            rows.append(
                [length, with_cache, bench.meter.num_rows - before, looked, 1e3 * answer.latency, 1e3 * seconds]
            )
        token_bytes = bench.core.info.kv_token_bytes
    values = planner.read(model).values
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    most, few, many, last_looked, *_ = rows[-1]
    right = [
        f"A prompt of p tokens and an answer of n compute p + n - 1 rows with a cache ({few:,} at n = {most:,}), and "
        f"n p + n (n - 1) / 2 without ({many:,}): {int(many) / int(few):.0f} times as many, not n² and not n times.",
        f"A token still looks back on all before it: {last_looked:,} positions in all. The cache saves rows, "
        "not attention.",
        "Both give the same tokens, which this lab compares.",
    ]
    if isinstance(heads, int) and isinstance(kv_heads, int) and token_bytes:
        right.append(
            f"The bytes of a token count the heads of keys and values ({kv_heads}), not those of queries ({heads}): "
            f"{token_bytes:,}, where the formula 2 x layers x hidden x bytes gives "
            f"{token_bytes * heads // kv_heads:,}."
        )
    return Lab(
        name="cache",
        title="Cached and uncached generation",
        measured=f"One prompt of {num_prompt} tokens, answered with the KV cache, and then without: each token "
        "is the "
        "answer to the prompt grown by those before. Rows are counted by the engine.",
        wrong="with a KV cache the cost of a token does not depend on the length; its bytes are 2 x layers x "
        "hidden x "
        "bytes.",
        right=right,
        columns=[
            "answer tokens",
            "rows, cached",
            "rows, uncached",
            "positions seen, cached",
            "ms, cached",
            "ms, uncached",
        ],
        rows=rows,
        x="answer tokens",
        series=["ms, cached", "ms, uncached"],
        y="ms for the answer",
        logarithmic=True,
        counts=["rows, cached", "rows, uncached", "positions seen, cached"],
    )


def lengths(model: str, small: bool) -> Lab:
    """TTFT and TPOT by the length of the prompt."""
    prompts, num_new, repeats = ((8, 32, 96), 8, 1) if small else ((32, 128, 512, 1024, 2048), 32, 3)
    rows: list[list[str | int | float]] = []
    with opened(model) as bench:
        bench.run([bench.prompt(16, 0)], [4])
        for length in prompts:
            if length + num_new > bench.core.info.max_model_len:
                continue
            answers = [bench.run([bench.prompt(length, seed)], [num_new])[0] for seed in range(repeats)]
            answer = min(answers, key=lambda one: one.latency)
            first, each, whole = 1e3 * answer.ttft, 1e3 * answer.tpot, 1e3 * answer.latency
            rows.append([length, first, each, whole, first + each * (num_new - 1), first + each * num_new])
    longest, first, each, whole, right, wrong = (float(cell) for cell in rows[-1])
    return Lab(
        name="lengths",
        title="TTFT and TPOT by the length of the prompt",
        measured=f"Prompts of random tokens, one after the other, each answered with {num_new} tokens; the "
        "fastest of "
        f"{repeats}. No prefix is cached.",
        wrong="latency = TTFT + TPOT x n, and TPOT does not depend on the prompt.",
        right=[
            f"The first token comes with the prompt, so latency = TTFT + TPOT x (n - 1): at {longest:,.0f} tokens "
            f"{right:.1f} ms, and it took {whole:.1f}; with n it would be {wrong:.1f}.",
            f"TTFT is {first / float(rows[0][1]):.1f} times that of the shortest prompt, for "
            f"{longest / float(rows[0][0]):.0f} times the tokens. TPOT is {each / float(rows[0][2]):.2f} times.",
            "Each token of the answer looks back on the whole prompt. That shows in TPOT once the prompt's keys and "
            "values are many bytes beside the weights.",
        ],
        columns=["prompt tokens", "TTFT ms", "TPOT ms", "latency ms", "TTFT + TPOT (n - 1)", "TTFT + TPOT n"],
        rows=rows,
        x="prompt tokens",
        series=["TTFT ms", "TPOT ms"],
        y="ms",
        logarithmic=True,
    )


def prefix(model: str, small: bool) -> Lab:
    """TTFT by the tokens of a prompt that the prefix cache has."""
    length, shares = (96, (0, 40, 64, 96)) if small else (1024, (0, 256, 500, 768, 1024))
    rows: list[list[str | int | float]] = []
    with opened(model, enable_prefix_caching=True, block_size=16) as bench:
        base = bench.prompt(length, 1)
        bench.run([base], [1])
        for number, shared in enumerate(shares):
            prompt = base[:shared] + bench.prompt(length - shared, 100 + number)
            before = bench.meter.num_rows
            [answer] = bench.run([prompt], [2])
            rows.append([shared, answer.num_cached, bench.meter.num_rows - before - 1, 1e3 * answer.ttft])
    cold, warm = float(rows[0][3]), float(rows[-1][3])
    return Lab(
        name="prefix",
        title="Time to the first token with a cached prefix",
        measured=f"Prompts of {length:,} tokens that share their first tokens with one before, in blocks of 16. What "
        "was cached is the engine's own counter.",
        wrong="a prefix that was seen before costs nothing, and a prompt that was seen as a whole answers at once.",
        right=[
            f"The last token is always computed, because its row gives the first token of the answer: of a "
            "prompt that "
            f"is known as a whole {rows[-1][1]:,} of {length:,} tokens are cached, and {rows[-1][2]:,} is computed.",
            f"TTFT falls to {warm / cold:.0%} of that without a shared prefix: one step is left, which reads all "
            "weights.",
            "A block that matches in part is used as far as it matches, so cached tokens need not be whole blocks.",
        ],
        columns=["shared tokens", "cached tokens", "rows of the prompt", "TTFT ms"],
        rows=rows,
        x="shared tokens",
        series=["TTFT ms"],
        y="TTFT, ms",
        counts=["cached tokens", "rows of the prompt"],
    )


def paging(model: str, small: bool) -> Lab:
    """The waste of blocks by their size, and of contiguous memory."""
    num_seqs, most, sizes = (4, 96, (8, 32)) if small else (16, 512, (8, 16, 32, 64, 128))
    rows: list[list[str | int | float]] = []
    for size in sizes:
        with opened(model, block_size=size, max_model_len=2 * most, max_num_seqs=num_seqs) as bench:
            core, fullest = bench.core, (0, 0)
            prompts = [bench.prompt(4 + (i * 37) % (most // 2), i) for i in range(num_seqs)]
            inner = bench.core.executor.finish

            def noted(ticket: object, inner: object = inner, bench: Bench = bench) -> object:
                nonlocal fullest
                scheduler = bench.core.scheduler
                tokens = sum(seq.num_computed for seq in scheduler.running)
                fullest = max(fullest, (scheduler.pool.num_held, tokens))
                return inner(ticket)  # type: ignore[operator]

            bench.core.executor.finish = noted  # type: ignore[method-assign,assignment]
            bench.run(prompts, [24 + (i * 53) % (most // 2) for i in range(num_seqs)])
            num_blocks, tokens = fullest
            slots, whole = num_blocks * size, num_seqs * core.info.max_model_len
            rows.append([size, tokens, slots, 1 - tokens / slots, 1 - tokens / whole])
    return Lab(
        name="paging",
        title="What blocks of the KV cache waste",
        measured=f"{num_seqs} sequences of different lengths at once. At the step that holds the most blocks: the "
        f"tokens in them, the places that the blocks have, and what {num_seqs} contiguous pieces of the context's "
        f"{2 * most:,} tokens would waste.",
        wrong="paging wastes less than 4 % of the memory.",
        right=[
            "A sequence wastes on average half of its last block, so the share is (block / 2) / length: it "
            "depends on "
            f"both. With blocks of {rows[0][0]} it is {float(rows[0][3]):.1%} here, with blocks of {rows[-1][0]} "
            f"{float(rows[-1][3]):.1%}.",
            f"Contiguous pieces as long as the context waste {float(rows[0][4]):.0%}: that is what paging saves.",
        ],
        columns=["block size", "tokens", "places in blocks", "waste, paged", "waste, contiguous"],
        rows=rows,
        x="block size",
        series=["waste, paged", "waste, contiguous"],
        y="share of the memory",
        counts=["tokens", "places in blocks"],
    )
