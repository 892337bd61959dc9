"""`headrace generate`: one prompt, one answer, without a server. Streams text to the terminal, or prints one JSON
object. The names under `usage` are OpenAI's, those under `timings` llama-server's, as in the server's replies."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headrace.cli.options import build, options
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams

if TYPE_CHECKING:
    from headrace.text.outputs import Logprob, RequestOutput

# The fields of SamplingParams that are flags of this command.
SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "logprobs",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


@options(SamplingParams, EngineConfig, only=SAMPLING, skip=("skip_tokenizer_init",), max_tokens=128)
def generate(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, or 'builtin'.")] = "builtin",
    *,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The text to continue.")] = None,
    prompt_file: Annotated[str | None, typer.Option(metavar="FILE", help="Read it from here; - is stdin.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when all is done.")] = False,
    **fields: Any,
) -> None:
    """Complete one prompt without a server."""
    text = read_prompt(prompt, prompt_file)
    params = build(SamplingParams, fields)
    config = build(EngineConfig, {name: value for name, value in fields.items() if name != "seed"} | {"model": model})
    from headrace.llm import LLM

    with closing(LLM(**msgspec.structs.asdict(config))) as llm:
        if as_json:
            [output] = llm.generate(text, params, use_tqdm=False)
            print(json.dumps(as_object(output, params), ensure_ascii=False))
        else:
            output = stream_text(llm.stream(text, params))
        if output.outputs[0].finish_reason == "error":
            raise HeadraceError("the engine ended this request with an error; see its log above")


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Return the prompt of whichever flag is set. None, both, or an unreadable file is a usage error."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give the prompt by exactly one of --prompt and --prompt-file")
    if prompt_file is None:
        return prompt or ""
    if prompt_file == "-":
        return sys.stdin.read()
    try:
        return Path(prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("prompt_file", prompt_file, f"a readable UTF-8 file ({error})") from error


def stream_text(outputs: Any) -> RequestOutput:
    """Write the text of an answer as it grows, and a line of figures to stderr if that is a terminal."""
    num_printed = 0
    last: RequestOutput | None = None
    for last in outputs:
        text = last.outputs[0].text
        sys.stdout.write(text[num_printed:])
        sys.stdout.flush()
        num_printed = len(text)
    if last is None:
        raise HeadraceError("the engine gave no output")
    print()
    if sys.stderr.isatty():
        answer, times = last.outputs[0], timings(last)
        print(
            f"[{len(answer.token_ids)} tokens, {times['predicted_per_second']:.1f} tok/s, first after "
            f"{times['prompt_ms']:.0f} ms, {answer.finish_reason}, seed {answer.seed}]",
            file=sys.stderr,
        )
    return last


def as_object(output: RequestOutput, params: SamplingParams) -> dict[str, Any]:
    """Return the object that --json prints. `logprobs`, where requested, has one entry for each of `token_ids`."""
    answer = output.outputs[0]
    num_prompt, num_answer = len(output.prompt_token_ids), len(answer.token_ids)
    result: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seed": answer.seed,
    }
    if params.logprobs is not None:
        result["logprobs"] = [
            logprob_entry(token_id, entry, params.logprobs)
            for token_id, entry in zip(answer.token_ids, answer.logprobs or [], strict=True)
        ]
    result["usage"] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
    }
    result["timings"] = timings(output)
    return result


def logprob_entry(token_id: int, entry: dict[int, Logprob], count: int) -> dict[str, Any]:
    """Return one token: its log-probability (natural, of the raw logits), its rank, and the likeliest others."""

    def one(token_id: int, value: Logprob) -> dict[str, Any]:
        return {"token_id": token_id, "token": value.decoded_token, "logprob": value.logprob, "rank": value.rank}

    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    top = ranked if count == -1 else ranked[:count]
    return one(token_id, entry[token_id]) | {"top_logprobs": [one(*item) for item in top]}


def timings(output: RequestOutput) -> dict[str, float]:
    """Return times (ms) and rates of one request. `prompt_ms` ends with the first token; `predicted_ms`, and its rate,
    are of the others."""
    metrics = output.metrics
    prompt_n = len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
    predicted_n = len(output.outputs[0].token_ids)
    prompt_ms = 1e3 * ((metrics.prefill_time if metrics else None) or 0.0)
    predicted_ms = 1e3 * ((metrics.decode_time if metrics else None) or 0.0)
    return {
        "cache_n": output.num_cached_tokens or 0,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_second": 1e3 * (predicted_n - 1) / predicted_ms if predicted_ms else 0.0,
    }
